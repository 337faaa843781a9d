"""Reads of streams move apart while the process computes much, and lose nothing by it."""

from __future__ import annotations

import asyncio
import gc

import pytest
from rose_daemon.scheduler.garbage import BUSY_S, IDLE_S, collect_seldom, due
from rose_daemon.scheduler.pacing import Pacer, Spacing
from waiting import until


def after(spacing: Spacing, *shares: float) -> float:
    """The spacing after samples in which the process used these shares of a core."""
    now_s, cpu_s = spacing._sampled_s, spacing._cpu_s
    for share in shares:
        now_s += 0.1
        cpu_s += share * 0.1
        spacing.sample(now_s, cpu_s)
    return spacing.value_s


def test_a_calm_process_reads_at_once() -> None:
    assert after(Spacing(0.05, 10.0, 3.0), *[0.6] * 20) == 0


def test_a_busy_process_reads_further_apart_up_to_the_most() -> None:
    values = [after(Spacing(0.05, 10.0, 3.0), *[0.9] * count) for count in range(1, 10)]
    assert values == sorted(values)
    assert values[0] == 0.01
    assert values[-1] == 0.05


def test_between_busy_and_calm_it_stays_and_calm_ends_it() -> None:
    spacing = Spacing(0.05, 0.0, 0.0)
    widest = after(spacing, *[1.0] * 10)
    assert after(spacing, *[0.5] * 10) == widest
    assert after(spacing, *[0.1] * 10) == 0


def test_a_limit_below_the_least_spacing_holds_and_none_turns_it_off() -> None:
    assert after(Spacing(0.004, 0.0, 0.0), *[1.0] * 5) == 0.004
    assert after(Spacing(0.0, 0.0, 0.0), *[1.0] * 5) == 0


class Source:
    """A stream that can be left unread."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


async def test_each_stream_rests_once_a_read_and_is_read_again() -> None:
    pacer = Pacer(0.05)
    pacer._spacing.value_s = 0.02
    sources = [Source() for _ in range(5)]
    for source in sources:
        pacer.has_read(source)
        assert source.calls == ["pause"]
    await until(lambda: all(source.calls == ["pause", "resume"] for source in sources))
    assert not pacer._ticking
    pacer._spacing.value_s = 0.02
    pacer.has_read(sources[0])
    await until(lambda: sources[0].calls == ["pause", "resume"] * 2)


async def test_a_pacer_without_spacing_leaves_streams_alone() -> None:
    pacer, source = Pacer(0.0), Source()
    pacer.has_read(source)
    assert source.calls == []


@pytest.mark.parametrize(
    ("idle", "since_s", "took_s", "objects", "wanted"),
    [
        (True, IDLE_S, 0.04, 100_000, True),
        (True, IDLE_S - 1, 0.04, 100_000, False),
        (True, 1000.0, 0.04, 10, False),
        (False, IDLE_S, 0.04, 100_000, False),
        (False, BUSY_S, 0.04, 100_000, True),
        (False, BUSY_S, 2.0, 100_000, False),
        (False, 1001.0, 2.0, 100_000, True),
    ],
)
def test_garbage_is_collected_when_idle_and_else_seldom(
    idle: bool, since_s: float, took_s: float, objects: int, wanted: bool
) -> None:
    assert due(idle, since_s, took_s, objects) is wanted


async def test_the_collector_is_given_back() -> None:
    task = asyncio.create_task(collect_seldom(lambda: True))
    await until(lambda: not gc.isenabled())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.unfreeze()
    assert gc.isenabled()
