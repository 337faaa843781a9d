"""An engine process: started, restarted with back-off, stopped; outdated news changes nothing."""

from __future__ import annotations

import pytest

from rose.core.effects import StartEngine, StopEngine
from rose.core.lifecycle import EngineLife, LifecycleSettings, Phase, ReplicaState
from rose.units import NS_PER_S, ReplicaId, WeightVersion

SETTINGS = LifecycleSettings(
    start_timeout_ns=300 * NS_PER_S,
    stop_grace_ns=10 * NS_PER_S,
    backoff_ns=2 * NS_PER_S,
    backoff_max_ns=60 * NS_PER_S,
)
R = ReplicaId("r")
V0 = WeightVersion(0)


def fresh() -> EngineLife:
    return EngineLife(R, SETTINGS)


def running(at_ns: int = 0) -> EngineLife:
    life = fresh()
    life.advance(at_ns)
    life.started(42)
    assert life.ready(V0, at_ns, adopted=False)
    return life


def test_a_stopped_engine_is_started_once() -> None:
    life = fresh()
    assert life.state is ReplicaState.STOPPED
    assert life.advance(0) == [StartEngine(R, 1)]
    assert life.advance(1) == []
    assert life.state is ReplicaState.STARTING


def test_an_engine_that_answers_is_ready() -> None:
    life = running()
    assert life.state is ReplicaState.READY
    assert life.pid == 42


def test_an_engine_that_never_answers_is_stopped_and_tried_again() -> None:
    life = fresh()
    life.advance(0)
    assert life.advance(300 * NS_PER_S - 1) == []
    assert StopEngine(R, 10 * NS_PER_S, "start_timeout") in life.advance(300 * NS_PER_S)
    assert life.state is ReplicaState.STOPPING
    assert life.exited("killed", 301 * NS_PER_S, restart=True)
    assert life.state is ReplicaState.BACKOFF
    assert life.reason == "start_timeout"
    assert life.advance(303 * NS_PER_S) == [StartEngine(R, 2)]


def test_back_off_doubles_up_to_its_maximum() -> None:
    life, now_ns, pauses = fresh(), 0, []
    for _ in range(8):
        life.advance(now_ns)
        assert life.exited("crashed", now_ns, restart=True)
        pauses.append((life.retry_at_ns - now_ns) // NS_PER_S)
        now_ns = life.retry_at_ns
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_long_run_wipes_the_slate() -> None:
    life = fresh()
    life.failures = 5
    life.advance(0)
    life.ready(V0, 0, adopted=False)
    life.exited("crashed", 61 * NS_PER_S, restart=True)
    assert life.failures == 1


def test_an_exit_ends_everything_that_was_going_on() -> None:
    life = running()
    life.fail("weights_refused")
    assert life.state is ReplicaState.FAILED
    life.exited("crashed", 1, restart=True)
    assert life.state is ReplicaState.BACKOFF
    assert not life.failed
    assert life.pid == 0


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.BACKOFF])
def test_an_engine_found_alive_is_adopted(phase: Phase) -> None:
    life = fresh()
    life.phase = phase
    assert not life.ready(WeightVersion(3), 0, adopted=False), "news about a process that is gone"
    assert life.ready(WeightVersion(3), 0, adopted=True)
    assert life.held == 3


def test_news_about_an_engine_being_stopped_is_ignored() -> None:
    life = running()
    life.stop("shutdown", 0)
    assert not life.ready(V0, 0, adopted=False)
    assert not life.ready(V0, 0, adopted=True)
    assert life.stop("shutdown", 0) == [], "told once"


def test_an_exit_of_no_process_is_ignored() -> None:
    assert not fresh().exited("?", 0, restart=True)


def test_a_shutdown_ends_the_wait_for_a_restart() -> None:
    life = running()
    life.exited("crashed", 0, restart=True)
    assert life.stop("shutdown", 1) == []
    assert life.state is ReplicaState.STOPPED


def test_draining_and_back() -> None:
    life = running()
    life.draining = True
    assert life.state is ReplicaState.DRAINING
    life.fail("weights_refused")
    life.restore()
    assert life.state is ReplicaState.READY
