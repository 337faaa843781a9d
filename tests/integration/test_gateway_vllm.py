"""vLLM's dialect: fields, types and order of what POST /inference/v1/generate answers, and its errors.

`?` in a golden document stands for a value that differs from run to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dialect_asks import ASK_VLLM, GENERATE, PROMPT, SAMPLING, TEXT, TOKENS, events, like, refused
from gateway_world import MODEL, world
from waiting import until

VLLM_GOLDEN = {
    "request_id": "generate-tokens-mine",
    "model": MODEL,
    "created": "?",
    "usage": {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
    "prompt_logprobs": None,
    "prompt_token_id_logprobs": None,
    "prompt_token_ids": None,
    "mm_placeholders": None,
    "metrics": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": TOKENS,
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": None,
            "weight_versions": [{"version": "0", "start": 0, "end": 6}],
        }
    ],
    "rose": {"turn_id": "?", "trajectory": "walk", "attempts": "?", "weight_versions": [[0, 5, 0]]},
}


async def test_vllm_generate(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        status, answer = await made.post(
            GENERATE, ASK_VLLM | {"request_id": "mine"}, X_Session_ID="walk", x_rose_turn_id="t"
        )
        assert status == 200
        assert like(answer, VLLM_GOLDEN), answer
        status, again = await made.post(GENERATE, ASK_VLLM | {"request_id": "mine"}, x_rose_turn_id="t")
        assert again == answer
        (asked,) = made.engines[0].state.served
        assert asked["prompt"] == PROMPT
        assert {
            "temperature": 0,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
        }.items() <= asked.items()


async def test_vllm_generate_with_logprobs_and_prompt_ids(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        body = ASK_VLLM | {"return_token_ids": True, "sampling_params": SAMPLING | {"logprobs": 1}}
        _, answer = await made.post(GENERATE, body)
        assert answer["prompt_token_ids"] == PROMPT
        content = answer["choices"][0]["logprobs"]["content"]
        golden = {"token_id": "?", "logprob": "?", "rank": None, "top_logprobs": ["?"]}
        assert like(content, [golden] * 6), content
        assert [entry["token_id"] for entry in content] == TOKENS
        assert content[0]["top_logprobs"][0]["token_id"] == TOKENS[0]
        _, answer = await made.post(GENERATE, body | {"output_mode": "text"})
        (choice,) = answer["choices"]
        assert choice["text"] == TEXT
        entry = {"token": "?", "logprob": "?", "bytes": "?", "top_logprobs": ["?"]}
        assert like(choice["logprobs"]["content"], [entry] * 6)


async def test_vllm_generate_streamed(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        body = ASK_VLLM | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        chunks = await events(made, GENERATE, body)
        *tokens, usage = chunks
        choice = {
            "index": 0, "finish_reason": None, "stop_reason": None, "token_ids": "?", "routed_experts": None,
            "sampling_mask": None, "logprobs": None, "weight_versions": None,
        }  # fmt: skip
        golden = {"request_id": "?", "usage": None, "output_mode": "tokens", "choices": [choice]}
        assert like(tokens[0], golden | {"prompt_token_ids": PROMPT}), tokens[0]
        assert all(like(chunk, golden) for chunk in tokens[1:-1])
        last = tokens[-1]["choices"][0]
        assert (last["finish_reason"], last["weight_versions"]) == (
            "length",
            [{"version": "0", "start": 0, "end": 6}],
        )
        assert [token for chunk in tokens for token in chunk["choices"][0]["token_ids"]] == TOKENS
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 6
        assert usage["rose"]["weight_versions"] == [[0, 5, 0]]


async def test_vllm_generate_fills_the_context_without_a_limit(tmp_path: Path) -> None:
    """As in vLLM, and not the 16 tokens of a completion."""
    async with world(tmp_path, engines=1, token_ms=0.1) as made:
        made.engines[0].state.context_tokens_max = len(PROMPT) + 40
        await until(lambda: made.scheduler.driver.machine.replica("replica-0").context_tokens_max < 100)  # type: ignore
        body = ASK_VLLM | {"sampling_params": {"temperature": 0, "ignore_eos": True}}
        _, answer = await made.post(GENERATE, body)
        assert len(answer["choices"][0]["token_ids"]) == 40


async def test_vllm_generate_of_several_samples(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        _, answer = await made.post(GENERATE, ASK_VLLM | {"sampling_params": SAMPLING | {"n": 3}})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert all(len(choice["token_ids"]) == 6 for choice in answer["choices"])
        assert answer["choices"][2]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]


VLLM_BAD: list[tuple[Any, str]] = [
    (b"{", "invalid_json"),
    ({}, "bad_request"),
    ({"token_ids": []}, "bad_request"),
    ({"token_ids": [-1], "sampling_params": {}}, "bad_request"),
    ({"token_ids": ["a"], "sampling_params": {}}, "bad_request"),
    ({"token_ids": PROMPT}, "bad_request"),
    (ASK_VLLM | {"sampling_params": {"max_tokens": 0}}, "bad_request"),
    (ASK_VLLM | {"sampling_params": {"prompt_logprobs": 1}}, "unsupported"),
    (ASK_VLLM | {"sampling_params": {"no_such_thing": 1}}, "unsupported"),
    (ASK_VLLM | {"features": {"mm_hashes": {}}}, "unsupported"),
    (ASK_VLLM | {"output_mode": "braille"}, "bad_request"),
    (ASK_VLLM | {"weight_version": {"min_version": "1"}}, "bad_request"),
    (ASK_VLLM | {"weight_version": {"newest": 1}}, "bad_request"),
]


async def test_vllm_errors_have_its_shape(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for body, code in VLLM_BAD:
            status, error, headers = await refused(made, GENERATE, body)
            assert (status, headers["x-rose-error"]) == (400, code), body
            golden = {"error": {"message": "?", "type": "BadRequestError", "code": 400, "param": "?"}}
            assert like(error, golden), error
        status, error, _ = await refused(made, GENERATE, ASK_VLLM | {"model": "other"})
        assert (status, error["error"]["type"], error["error"]["code"]) == (404, "NotFoundError", 404)
        assert (await made.turns())["arrived"] == 0
