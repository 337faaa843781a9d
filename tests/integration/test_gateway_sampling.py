"""One test a sampling option: a turn that was cut is the turn it would have been.

Options without memory go on from their tokens; those with memory begin again from the prompt, and count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_world import MODEL, World, expected, world
from rose_daemon import mock_model
from rose_daemon.scheduler import requests
from rose_daemon.scheduler.requests import derived_seed

PROMPT = mock_model.encode("Which way to the goal?")
TOKENS, TEXT = expected(PROMPT, 60)
ASK: dict[str, Any] = {
    "model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip

GOES_ON: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"stop_token_ids": [TOKENS[44]]},
    {"ignore_eos": False},
    {"skip_special_tokens": True},
    {"spaces_between_special_tokens": False},
    {"include_stop_str_in_output": True},
    {"allowed_token_ids": [65, 66, 67, 68]},
    {"priority": 1},
    {"cache_salt": "pepper"},
    {"user": "someone"},
    {"session_id": "walk"},
    {"logprobs": 1},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
    {"stream_interval": 1},
    {"echo": False},
]
BEGINS_AGAIN: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"min_tokens": 40, "ignore_eos": False},
    {"stop": [TEXT[40:44]]},
    {"logit_bias": {"65": 2}},
    {"bad_words": ["x"]},
    {"n": 2},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"choice": ["up", "down"]}},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"thinking_token_budget": 9},
    {"vllm_xargs": {"knob": 1}},
    {"watermarking": True},
    {"repetition_detection": {"window": 8}},
    {"length_penalty": 0.5},
    {"logprob_token_ids": [65], "logprobs": 1},
    {"echo": True},
    {"an_option_of_tomorrow": 1},
    {"prompt_embeds": "QUJDRA==", "prompt": None},
]


async def outcome(world: World, option: dict[str, Any], cuts: int = 0) -> dict[str, Any]:
    """The answer to the request, cut so many times on its way."""
    task = asyncio.create_task(world.post("/v1/completions", ASK | option))
    for _ in range(cuts):
        engine = await world.running_turn(13)
        engine.state.abort("rose:kv_budget_cut")
    status, answer = await task
    assert status == 200, answer
    return answer


def content(answer: dict[str, Any]) -> list[Any]:
    return [
        [choice[name] for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")]
        for choice in answer["choices"]
    ]


async def test_without_memory_it_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, token_ms=0.5) as made:
        for option in GOES_ON:
            whole = await outcome(made, option)
            cut = await outcome(made, option, cuts=2)
            assert content(cut) == content(whole), option
            attempts = cut["rose"]["attempts"]
            assert (len(attempts), attempts[-1]["end"]) == (3, "finished"), option
            tokens = cut["choices"][0]["token_ids"]
            assert sum(attempt["tokens"] for attempt in attempts) == len(tokens), option
        assert (await made.turns())["restarted"] == 0


async def test_with_memory_it_begins_again(tmp_path: Path) -> None:
    async with world(tmp_path, token_ms=0.5) as made:
        for number, option in enumerate(BEGINS_AGAIN):
            whole = await outcome(made, option)
            for engine in made.engines:
                engine.state.served.clear()
            cut = await outcome(made, option, cuts=1)
            assert content(cut) == content(whole), option
            assert (await made.turns())["restarted"] == number + 1, option
            first, second = [body for engine in made.engines for body in engine.state.served]
            assert first == second, "all of it, from its prompt"


IN_SGLANGS_WORDS: list[tuple[dict[str, Any], bool]] = [
    ({"temperature": 0.7}, True),
    ({"stop_token_ids": [TOKENS[44]]}, True),
    ({"ignore_eos": False}, True),
    ({"no_stop_trim": True}, True),
    ({"skip_special_tokens": True}, True),
    ({"min_new_tokens": 40, "ignore_eos": False}, False),
    ({"stop": TEXT[40:44]}, False),
    ({"frequency_penalty": 0.5}, False),
    ({"logit_bias": {"65": 2}}, False),
    ({"json_schema": "{}"}, False),
    ({"regex": "a+"}, False),
    ({"ebnf": 'root ::= "a"'}, False),
    ({"structural_tag": "{}"}, False),
]
IN_VLLMS_WORDS: list[tuple[dict[str, Any], bool]] = [
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, True),
    ({"stop_token_ids": [TOKENS[44]]}, True),
    ({"allowed_token_ids": [65, 66, 67, 68]}, True),
    ({"min_tokens": 40, "ignore_eos": False}, False),
    ({"stop": [TEXT[40:44]]}, False),
    ({"repetition_penalty": 1.1}, False),
    ({"bad_words": ["x"]}, False),
    ({"structured_outputs": {"regex": "a+"}}, False),
    ({"thinking_token_budget": 9}, False),
]


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
async def test_the_same_holds_in_other_dialects(tmp_path: Path, dialect: str) -> None:
    async with world(tmp_path, token_ms=0.5) as made:
        for option, goes_on in IN_SGLANGS_WORDS if dialect == "sglang" else IN_VLLMS_WORDS:
            sampling = {"temperature": 0, "ignore_eos": True} | option
            if dialect == "sglang":
                path, limit = "/generate", {"max_new_tokens": 60}
                body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": sampling | limit}
            else:
                path, limit = "/inference/v1/generate", {"max_tokens": 60}
                body = {"token_ids": PROMPT, "sampling_params": sampling | limit}

            def output(answer: dict[str, Any]) -> Any:
                if "output_ids" in answer:
                    return answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]
                return [(choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]

            _, whole = await made.post(path, body)
            restarted = (await made.turns())["restarted"]
            task = asyncio.create_task(made.post(path, body))
            engine = await made.running_turn(13)
            engine.state.abort("rose:kv_budget_cut")
            status, cut = await task
            assert status == 200, cut
            assert output(cut) == output(whole), option
            assert (await made.turns())["restarted"] == restarted + (not goes_on), option


def test_every_option_that_goes_on_has_its_turn_here() -> None:
    """`_CARRIED` is what a continuation is asked with; each of it needs the proof above."""
    named = {name for option in GOES_ON for name in option} | ASK.keys()
    assert set(requests._CARRIED) <= named


async def test_a_seeded_turn_goes_on_with_a_seed_of_its_own(tmp_path: Path) -> None:
    """With the same seed the rest would be drawn with the numbers that the beginning was drawn with."""
    async with world(tmp_path, token_ms=1) as made:
        option = {"seed": 7, "temperature": 1.0}
        cut = await outcome(made, option, cuts=1)
        kept = cut["rose"]["attempts"][0]["tokens"]
        resumed = next(
            body
            for engine in made.engines
            for body in engine.state.served
            if len(body["prompt"]) > len(PROMPT)
        )
        assert resumed["seed"] == derived_seed(7, kept)
        tokens = cut["choices"][0]["token_ids"]
        assert len(tokens) == 60
        again = await made.post("/v1/completions", resumed | {"stream": False})
        assert tokens[kept:] == again[1]["choices"][0]["token_ids"], "reproducible from what the answer tells"


async def test_a_stream_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    async with world(tmp_path, token_ms=1) as made:
        body = ASK | {"presence_penalty": 0.5, "stream": True}
        async with made.http.post(f"{made.url}/v1/completions", json=body) as response:
            await response.content.readline()
            engine = await made.running_turn(3)
            engine.state.abort("rose:kv_budget_cut")
            rest = await response.read()
        assert b'"code":"stream_cut"' in rest
        assert b"presence_penalty" in rest
        assert (await made.turns())["failed"] == 1
