"""SGLang's dialect: fields, types and order of what POST /generate answers, and its errors.

`?` in a golden document stands for a value that differs from run to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialect_asks import ASK_SGLANG, PROMPT, TEXT, TOKENS, events, like, refused
from gateway_world import expected, world
from rose_daemon import mock_model

META_GOLDEN = {
    "id": "mine",
    "finish_reason": {"type": "length", "length": 6},
    "prompt_tokens": len(PROMPT),
    "completion_tokens": 6,
    "cached_tokens": 0,
    "weight_version": "0",
    "rose": "?",
}


@pytest.mark.parametrize("prompt", [{"input_ids": PROMPT}, {"text": "Which way to the goal?"}])
async def test_sglang_generate(tmp_path: Path, prompt: dict[str, Any]) -> None:
    async with world(tmp_path, engines=1) as made:
        body = {"sampling_params": ASK_SGLANG["sampling_params"], "rid": "mine"} | prompt
        status, answer = await made.post("/generate", body)
        assert status == 200
        assert like(answer, {"text": TEXT, "output_ids": TOKENS, "meta_info": META_GOLDEN}), answer
        assert answer["meta_info"]["rose"]["trajectory"] == "mine"


async def test_sglang_generate_with_logprobs(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        body = ASK_SGLANG | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
        _, answer = await made.post("/generate", body)
        meta = answer["meta_info"]
        assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in TOKENS]
        assert all(isinstance(entry[0], float) for entry in meta["output_token_logprobs"])
        assert all(like(best, [["?", "?", None]] * 2) for best in meta["output_top_logprobs"])
        assert all(best[0][0] >= best[1][0] for best in meta["output_top_logprobs"])
        assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
        _, answer = await made.post(
            "/generate", ASK_SGLANG | {"return_logprob": True, "return_text_in_logprobs": True}
        )
        entries = answer["meta_info"]["output_token_logprobs"]
        assert [entry[2] for entry in entries] == [mock_model.decode([token]) for token in TOKENS]


async def test_sglang_generate_streams_everything_so_far(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        chunks = await events(made, "/generate", ASK_SGLANG | {"stream": True, "rid": "mine"})
        sizes = [len(chunk["output_ids"]) for chunk in chunks]
        assert sizes == sorted(sizes)
        assert sizes[-1] == 6
        for chunk in chunks:
            assert chunk["output_ids"] == TOKENS[: len(chunk["output_ids"])]
            assert TEXT.startswith(chunk["text"])
            assert chunk["meta_info"]["weight_version"] == "0"
        first = META_GOLDEN | {"finish_reason": None, "completion_tokens": sizes[0]}
        assert like(
            chunks[0]["meta_info"], {k: v for k, v in first.items() if k not in ("cached_tokens", "rose")}
        )
        assert like(chunks[-1], {"text": TEXT, "output_ids": TOKENS, "meta_info": META_GOLDEN})


async def test_sglang_batches_answer_with_a_list(tmp_path: Path) -> None:
    other = mock_model.encode("And back?")
    async with world(tmp_path, engines=1) as made:
        params = ASK_SGLANG["sampling_params"]
        body = {"input_ids": [PROMPT, other], "sampling_params": [params, params], "rid": ["a", "b"]}
        _, answers = await made.post("/generate", body)
        assert [one["output_ids"] for one in answers] == [TOKENS, expected(other, 6)[0]]  # type: ignore[index]
        assert [one["meta_info"]["id"] for one in answers] == ["a", "b"]  # type: ignore[index]
        _, answers = await made.post("/generate", ASK_SGLANG | {"sampling_params": params | {"n": 2}})
        assert len(answers) == 2
        chunks = await events(made, "/generate", body | {"stream": True})
        assert {chunk["index"] for chunk in chunks} == {0, 1}


async def test_sglang_names_what_stopped_a_choice(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        params = ASK_SGLANG["sampling_params"]
        for stop, matched in ({"stop": TEXT[2]}, TEXT[2]), ({"stop_token_ids": [TOKENS[3]]}, TOKENS[3]):
            _, answer = await made.post("/generate", ASK_SGLANG | {"sampling_params": params | stop})
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


SGLANG_BAD: list[tuple[Any, str]] = [
    (b"[]", "invalid_json"),
    ({}, "bad_request"),
    ({"text": "a", "input_ids": [1]}, "bad_request"),
    ({"text": ""}, "bad_request"),
    ({"input_ids": [[]]}, "bad_request"),
    ({"text": "a", "sampling_params": {"max_new_tokens": None}}, "bad_request"),
    ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "unsupported"),
    ({"text": "a", "sampling_params": [{"n": 1}, {"n": 2}]}, "bad_request"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 0}, "unsupported"),
    ({"text": ["a", "b"], "rid": ["only-one"]}, "bad_request"),
    ({"input_embeds": [[0.1]]}, "unsupported"),
]


async def test_sglang_errors_have_its_shape(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for body, code in SGLANG_BAD:
            status, error, headers = await refused(made, "/generate", body)
            assert (status, headers["x-rose-error"]) == (400, code), body
            assert like(error, {"error": {"message": "?", "type": "BadRequestError", "code": 400}}), error
