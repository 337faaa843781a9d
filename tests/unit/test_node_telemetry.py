"""What rosed reads from /proc and from the serving engine's HTTP port; unknown is never a number."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from rose_daemon.node import telemetry
from rose_daemon.node.settings import kv_block_bytes
from rose_daemon.node.telemetry import CpuUse, device_memory, kv_used_share, probe_serving
from rose_daemon.node.warden import parents

from rose.boards import Owner, process_start_ticks
from rose.core.readings import Unknown

LIMIT_BYTES = 8 << 30


def owner(pid: int) -> Owner:
    return Owner(pid, process_start_ticks(pid))


def test_memory_of_a_process_tree_is_seen() -> None:
    code = "import time; held = bytearray(b'x') * (64 << 20); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        observed = device_memory(LIMIT_BYTES, owner(child.pid), [])
        child.kill()
    assert isinstance(observed.serving_bytes, int)
    assert 64 << 20 <= observed.serving_bytes < 128 << 20
    assert isinstance(observed.total_bytes, int)
    assert isinstance(observed.free_bytes, int)
    assert 0 < observed.free_bytes <= observed.total_bytes - observed.serving_bytes


def test_capacity_is_what_was_configured_and_never_more_than_the_host_has() -> None:
    assert device_memory(1 << 20, None, []).total_bytes == 1 << 20
    host = telemetry.meminfo("MemTotal")
    assert isinstance(host, int)
    total = device_memory(1 << 60, None, []).total_bytes
    assert isinstance(total, int)
    assert total <= host


def test_a_serving_engine_that_is_gone_is_unknown_and_so_is_what_is_free() -> None:
    observed = device_memory(LIMIT_BYTES, Owner(os.getpid(), 1), [])
    assert observed.serving_bytes == Unknown("serving_gone")
    assert observed.free_bytes == Unknown("serving_gone")


def test_a_replica_that_is_gone_makes_free_memory_unknown() -> None:
    assert device_memory(LIMIT_BYTES, None, [2**22 + 1]).free_bytes == Unknown("process_gone")


def test_unreadable_meminfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(telemetry, "_PROC", tmp_path)
    assert telemetry.meminfo("MemTotal") == Unknown("meminfo_unreadable")
    (tmp_path / "meminfo").write_text("MemFree: 12 kB\n")
    assert telemetry.meminfo("MemTotal") == Unknown("meminfo_incomplete")
    assert telemetry.meminfo("MemFree") == 12 * 1024


def test_use_of_cores_needs_two_looks() -> None:
    use = CpuUse((0,))
    assert use.sample() == Unknown("first_sample")
    share: float | Unknown = Unknown("no_time_passed")
    while isinstance(share, Unknown):
        assert share.reason == "no_time_passed"
        share = use.sample()
    assert 0 <= share <= 1


def test_the_process_table_knows_us() -> None:
    assert parents()[os.getpid()] == os.getppid()


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ('vllm:kv_cache_usage_perc{engine="0"} 0.25\n', 0.25),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n', 0.5),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n', 0.7),
        ("vllm:num_requests_running 3\n", Unknown("metrics_missing")),
        ("", Unknown("metrics_missing")),
        ("vllm:kv_cache_usage_perc 7\n", Unknown("metrics_contradictory")),
        ("vllm:kv_cache_usage_perc NaN\n", Unknown("metrics_contradictory")),
        ("vllm:kv_cache_usage_perc { nonsense\n", Unknown("metrics_malformed")),
    ],
)
def test_kv_use_from_metrics(text: str, share: float | Unknown) -> None:
    assert kv_used_share(text) == share


Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def serving(health: Handler, metrics: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/health", health)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def answer(_: web.Request) -> web.Response:
    return web.Response(text="vllm:kv_cache_usage_perc 0.25\n")


async def refuse(_: web.Request) -> web.Response:
    return web.Response(status=503)


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def probe(url: str) -> tuple[object, object]:
    async with aiohttp.ClientSession() as session:
        return tuple(await probe_serving(session, url, 0.3))  # type: ignore[return-value]


async def test_probe_of_a_healthy_engine() -> None:
    async with serving(answer, answer) as url:
        assert await probe(url) == (True, 0.25)
    assert await probe(url) == (False, Unknown("serving_down"))  # nobody listens any more


async def test_metrics_that_come_in_pieces_are_read_whole() -> None:
    async def pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (b"# TYPE vllm:kv_ca", b"che_usage_perc gauge\nvllm:kv_cache_usage_perc 0.", b"5\n"):
            await response.write(part)
            await asyncio.sleep(0.02)
        return response

    async with serving(answer, pieces) as url:
        assert await probe(url) == (True, 0.5)


async def test_metrics_without_end_are_given_up() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(80):
            await response.write(b"x" * 65_535 + b"\n")
        return response

    async with serving(answer, flood) as url:
        assert await probe(url) == (True, Unknown("metrics_too_long"))


async def test_probe_of_an_engine_in_trouble() -> None:
    async with serving(refuse, answer) as url:
        assert await probe(url) == (False, Unknown("serving_down"))
    async with serving(hang, answer) as url:
        assert await probe(url) == (Unknown("health_timeout"), Unknown("health_timeout"))
    async with serving(answer, hang) as url:
        assert await probe(url) == (True, Unknown("metrics_unreachable"))


def test_size_of_a_kv_block(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert kv_block_bytes(tmp_path, 32) == 0
    for text in ("", "[]", "{}", '{"num_attention_heads": 0}', '{"num_attention_heads": "x"}'):
        config.write_text(text)
        assert kv_block_bytes(tmp_path, 32) == 0
    config.write_text(
        '{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,'
        ' "num_hidden_layers": 36, "dtype": "bfloat16"}'
    )
    assert kv_block_bytes(tmp_path, 16) == 144 * 1024 * 16  # Qwen3-8B: 144 KiB a token
