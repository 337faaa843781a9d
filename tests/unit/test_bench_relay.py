"""`rose bench relay` moves what it says it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from rose_daemon.bench import relay as bench_relay
from rose_daemon.bench.plain_tcp import PlainTcp
from rose_daemon.bench.transfer import anchor, relay_process, sender_process

from rose.errors import RoseError


def test_a_report_has_every_way_beside_plain_tcp() -> None:
    said: list[str] = []
    report = bench_relay.measure(nbytes=3_000_000, rounds=2, seed=1, say=said.append)
    assert report["setup"]["bytes"] >= 3_000_000
    assert set(report["gb_s"]) == {"tcp", "push", "pull", "same-host pull"}
    for way in bench_relay.WAYS:
        ratio = report["ratio_to_tcp"][way]
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert len(said) == 2
    console = Console(width=100)
    with console.capture() as shown:
        bench_relay.show(report, console)
    assert "same-host pull" in shown.get()


def test_plain_tcp_fills_what_it_is_given() -> None:
    with sender_process() as port, PlainTcp("127.0.0.1", port) as sender:
        memory = bytearray(b"x" * 100_000)
        sender.fill(memoryview(memory)[:99_999])
        assert memory == bytes(99_999) + b"x"
        sender.fill(memoryview(memory))
        assert memory == bytes(100_000)


def test_the_anchor_is_the_same_for_the_same_seed() -> None:
    assert anchor(2_000_000, 1).buckets == anchor(2_000_000, 1).buckets
    assert anchor(2_000_000, 1).buckets != anchor(2_000_000, 2).buckets


def test_a_relay_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "rose.toml").write_text("schema = 99\n")
    with pytest.raises(RoseError, match="schema"), relay_process(tmp_path / "rose.toml"):
        pass
