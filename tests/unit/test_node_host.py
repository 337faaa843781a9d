"""What rosed reads from /proc; unknown is never a number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rose_daemon.node import host
from rose_daemon.node.host import CpuUse, device_memory, listener
from rose_daemon.node.settings import kv_block_bytes
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
    whole = host.meminfo("MemTotal")
    assert isinstance(whole, int)
    total = device_memory(1 << 60, None, []).total_bytes
    assert isinstance(total, int)
    assert total <= whole


def test_a_serving_engine_that_is_gone_is_unknown_and_so_is_what_is_free() -> None:
    observed = device_memory(LIMIT_BYTES, Owner(os.getpid(), 1), [])
    assert observed.serving_bytes == Unknown("serving_gone")
    assert observed.free_bytes == Unknown("serving_gone")


def test_a_serving_engine_that_was_never_seen_is_unknown_too() -> None:
    observed = device_memory(LIMIT_BYTES, Unknown("serving_not_seen"), [])
    assert observed.serving_bytes == observed.free_bytes == Unknown("serving_not_seen")


def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(port) == owner(os.getpid())
    assert listener(port) == Unknown("serving_not_found")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert listener(server.getsockname()[1]) == owner(os.getpid())


def test_a_replica_that_is_gone_makes_free_memory_unknown() -> None:
    assert device_memory(LIMIT_BYTES, None, [2**22 + 1]).free_bytes == Unknown("process_gone")


def test_unreadable_meminfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert host.meminfo("MemTotal") == Unknown("meminfo_unreadable")
    (tmp_path / "meminfo").write_text("MemFree: 12 kB\n")
    assert host.meminfo("MemTotal") == Unknown("meminfo_incomplete")
    assert host.meminfo("MemFree") == 12 * 1024


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
