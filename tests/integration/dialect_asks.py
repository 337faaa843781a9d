"""Requests of each dialect, and how their answers are compared with golden documents."""

from __future__ import annotations

import json
from typing import Any

from gateway_world import World, expected
from rose_daemon import mock_model

PROMPT = mock_model.encode("Which way to the goal?")
TOKENS, TEXT = expected(PROMPT, 6)
GENERATE = "/inference/v1/generate"
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
ASK_VLLM: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": SAMPLING}
ASK_SGLANG: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
}
LONG_VLLM = ASK_VLLM | {"sampling_params": SAMPLING | {"max_tokens": 400}}
LONG_SGLANG = ASK_SGLANG | {"sampling_params": ASK_SGLANG["sampling_params"] | {"max_new_tokens": 400}}


def like(document: Any, golden: Any) -> bool:
    """Whether a document equals a golden one, `?` standing for any value; members may not be missing."""
    if golden == "?":
        return True
    if isinstance(golden, dict):
        return (
            isinstance(document, dict)
            and document.keys() == golden.keys()
            and all(like(document[key], golden[key]) for key in golden)
        )
    if isinstance(golden, list):
        return (
            isinstance(document, list) and len(document) == len(golden) and all(map(like, document, golden))
        )
    return bool(document == golden)


async def events(world: World, path: str, body: Any, **headers: str) -> list[Any]:
    """Documents of a streamed answer; it must end with [DONE]."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.http.post(world.url + path, json=body, headers=named) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = (await response.read()).splitlines()
    *found, end = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert end == b"[DONE]"
    return [json.loads(data) for data in found]


async def refused(world: World, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.http.post(world.url + path, data=data, headers=named) as response:
        return response.status, await response.json(), response.headers
