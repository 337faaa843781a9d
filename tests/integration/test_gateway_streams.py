"""What holds in every dialect: limits, authentication, and streams that are silent for long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from dialect_asks import ASK_SGLANG, ASK_VLLM, GENERATE, PROMPT, refused
from gateway_world import World, expected, world
from rose_daemon.scheduler import dispatch, process, server
from waiting import until


async def test_edges_speak_the_callers_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oversize bodies, slow senders and bad tokens, on an endpoint of each dialect."""
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process, "_LINGER_S", 0.05)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s3cret")
    codes = {"/v1/completions": "word", GENERATE: "status", "/generate": "status", "/pause": "status"}
    async with world(tmp_path, engines=1, job=False, body_bytes_max=1000, token_file=str(secret)) as made:
        host, _, port = made.url.removeprefix("http://").partition(":")
        for path, kind in codes.items():
            status, error, headers = await refused(made, path, {})
            assert status == 401
            assert error["error"]["code"] == (401 if kind == "status" else "bad_token")
            assert headers["x-rose-error"] == "bad_token"
            status, error, _ = await refused(made, path, {"text": "x" * 2000}, authorization="Bearer s3cret")
            assert (status, error["error"]["code"]) == (
                413,
                413 if kind == "status" else "body_too_large",
            )
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n"
            writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            async with asyncio.timeout(60):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408")
            document = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert document["error"]["code"] == (408 if kind == "status" else "body_timeout")
            writer.close()


async def test_a_silent_stream_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "KEEP_ALIVE_S", 0.1)
    async with world(tmp_path, engines=1) as made:
        for path, body in ((GENERATE, ASK_VLLM), ("/generate", ASK_SGLANG)):
            made.engines[0].state.stalled = True
            async with made.http.post(made.url + path, json=body | {"stream": True}) as response:
                lines = [await response.content.readline() for _ in range(4)]
                assert lines == [b": keep-alive\n", b"\n"] * 2
                made.engines[0].state.stalled = False
                rest = await response.read()
                assert rest.endswith(b"data: [DONE]\n\n")
                assert rest.count(b"keep-alive") <= 1


async def test_an_error_after_a_comment_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "KEEP_ALIVE_S", 0.05)
    async with world(tmp_path, engines=1) as made:
        made.engines[0].state.stalled = True
        async with made.http.post(f"{made.url}/generate", json=ASK_SGLANG | {"stream": True}) as response:
            assert await response.content.readline() == b": keep-alive\n"
            async with made.http.delete(f"{made.url}/rose/v1/jobs/job-0") as ended:
                assert ended.status == 200
            events = [line for line in (await response.read()).splitlines() if line.startswith(b"data: ")]
            document = json.loads(events[-1].removeprefix(b"data: "))
            assert document["error"]["code"] == 410


async def test_a_client_that_reads_slowly_misses_nothing_and_holds_up_nobody(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, token_ms=0.1) as made:
        # SGLang's chunks repeat everything so far: megabytes that the client does not fetch at first.
        body = ASK_SGLANG | {"stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
        reader, writer = await _connect(made)
        writer.write(_request("/generate", body, "1.1"))
        await until(lambda: made.engines[0].state.tokens > 200)
        status, _ = await made.post(GENERATE, ASK_VLLM)
        assert status == 200
        await until(lambda: not made.engines[0].state.requests, 30)
        data = b""
        while b"data: [DONE]\n\n" not in data[-64:]:
            async with asyncio.timeout(60):
                data += await reader.read(1 << 20)
        assert len(data) > 4 << 20
        assert data.count(b"data: {") >= 100
        last = data[data.rindex(b"data: {") :].splitlines()[0].removeprefix(b"data: ")
        assert json.loads(last)["output_ids"] == expected(PROMPT, 1500)[0]
        writer.close()


async def test_a_client_of_http_1_0_gets_its_stream(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, token_ms=0.5) as made:
        reader, writer = await _connect(made)
        writer.write(_request(GENERATE, ASK_VLLM | {"stream": True}, "1.0"))
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
        assert events.pop() == b"[DONE]"
        ids = [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]
        assert ids == expected(PROMPT, 6)[0]
        writer.close()


async def _connect(made: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = made.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 16)


def _request(path: str, body: Any, version: str) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
