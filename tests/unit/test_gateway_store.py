"""The scheduler's durable state."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
from rose_daemon.scheduler import store as module
from rose_daemon.scheduler.driver import ClusterDriver
from rose_daemon.scheduler.output import Alternative, Answer, AttemptRecord, Choice, TokenLogprob
from rose_daemon.scheduler.requests import Dialect
from rose_daemon.scheduler.store import JobRecord, Store
from rose_daemon.scheduler.telemetry import Telemetry

from rose.core.cluster import ClusterSettings
from rose.core.effects import DispatchTurn, Say
from rose.core.events import (
    JobStepBegan,
    JobSubmitted,
    NodeRegistered,
    ReplicaDrainRequested,
    ReplicaReport,
    Tick,
    TrajectoryEnded,
    TurnArrived,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
    VersionPublished,
)
from rose.errors import NotReady, RoseError
from rose.units import JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion

JOB = JobId("walk")
REPORT = ReplicaReport(ReplicaId("r"), "dedicated", "ready", "http://h", "m", WeightVersion(0))


def answer(turn_id: str, text: str = "hello") -> Answer:
    choice = Choice(
        text=text,
        token_ids=[1, 2],
        logprobs=[TokenLogprob("a", -1.0, [97], (Alternative("b", -2.0, None),))],
        finish_reason="stop",
        stop_reason=7,
        prompt_token_ids=[3],
    )
    return Answer(
        turn_id=turn_id,
        trajectory="w",
        dialect=Dialect.CHAT,
        model="m",
        created=1,
        choices=[choice],
        usage={"prompt_tokens": 1},
        replica=ReplicaId("r"),
        attempts=[AttemptRecord(ReplicaId("r"), 2, "finished")],
        weight_versions=[(0, 1, WeightVersion(0))],
    )


def test_jobs_survive(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = JobRecord(JobSubmitted(JOB, "m", 1, 2), 3, WeightVersion(4), True, WeightVersion(5))
    store.put_job(JobRecord(record.spec))
    store.put_job(record)
    store.close()
    again = Store(tmp_path)
    assert again.jobs() == {JOB: record}
    again.delete_job(JOB)
    assert again.jobs() == {}
    again.close()


def test_answers_survive_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_answer(JOB, "digest", answer("t"))
    store.close()
    again = Store(tmp_path)
    kept = again.answer(JOB, "t")
    assert kept is not None
    assert (kept.digest, kept.answer) == ("digest", answer("t"))
    assert again.answer(JOB, "other") is None
    assert again.answer(JobId("other"), "t") is None
    again.close()


@pytest.mark.parametrize(("bound", "value"), [("ANSWERS_MAX", 3), ("ANSWERS_BYTES_MAX", 4000)])
def test_old_answers_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(module, bound, value)
    store = Store(tmp_path)
    dropped = sum(store.put_answer(JOB, "d", answer(str(number), "x" * 1000)) for number in range(10))
    kept = [number for number in range(10) if store.answer(JOB, str(number)) is not None]
    assert kept == [7, 8, 9]
    assert dropped == 7
    store.close()


def test_the_journal_is_read_as_written_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOURNAL_ROWS_MAX", 10)
    store = Store(tmp_path)
    finished = TurnFinished(TurnId("t"), ReplicaId("r"), 5, 1)
    effects = [DispatchTurn(TurnId("u"), ReplicaId("r"), 1, "affinity"), Say("info", "code", "text")]
    for number in range(25):
        store.record(number, Tick() if number % 2 else finished, effects if number % 2 else [])
    assert store.flush_journal() == 15
    rows = list(store.journal(store.boot))
    assert [row.now_ns for row in rows] == list(range(15, 25))
    assert (rows[0].event, rows[0].effects) == (Tick(), effects)
    assert (rows[1].event, rows[1].effects) == (finished, [])
    assert store.boots() == [store.boot]
    store.close()


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")
    for number in range(3):
        for _ in range(1000):
            store.record(number, Tick(), [])
        assert store.flush_journal() == 1000
    assert store.put_answer(JOB, "d", answer("t", "x" * 100_000)) == 1
    assert store.answer(JOB, "t") is None
    store._db.execute("PRAGMA max_page_count=100000")
    store.record(3, Tick(), [])
    assert store.flush_journal() == 0
    assert [row.now_ns for row in store.journal(store.boot)] == [3]
    assert store.put_answer(JOB, "d", answer("t")) == 0
    store.close()


def test_a_disk_that_became_read_only_costs_records_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.put_answer(JOB, "d", answer("before")) == 0
    store._db.execute("PRAGMA query_only=ON")  # as SQLite finds the file of a disk that was mounted read-only
    store.record(1, Tick(), [])
    assert store.flush_journal() == 1
    assert store.put_answer(JOB, "d", answer("t")) == 1
    store.checkpoint()
    assert store.answer(JOB, "before") is not None, "what is there is still read"
    store._db.execute("PRAGMA query_only=OFF")
    assert store.put_answer(JOB, "d", answer("t")) == 0
    store.close()


def test_a_directory_has_one_scheduler(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(NotReady, match="another scheduler"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_later_schema_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    database = sqlite3.connect(tmp_path / "scheduler.sqlite3")
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(RoseError, match="schema 99 is not supported"):
        Store(tmp_path)


def test_a_file_of_the_release_before_is_taken_over(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "scheduler.sqlite3")
    old.executescript(
        """
        CREATE TABLE jobs (job TEXT PRIMARY KEY, spec BLOB NOT NULL, rl_step INTEGER,
            required_version INTEGER, step_open INTEGER NOT NULL, published_version INTEGER) STRICT;
        CREATE TABLE answers (seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, turn TEXT NOT NULL,
            digest TEXT NOT NULL, body BLOB NOT NULL, UNIQUE (job, turn)) STRICT;
        PRAGMA user_version=1;
        """
    )
    spec = JobSubmitted(JobId("j"), "m", 1, 1)
    old.execute("INSERT INTO jobs VALUES ('j', ?, 3, 2, 1, 2)", (msgspec.msgpack.encode(spec),))
    old.commit()
    old.close()
    for _ in range(2):
        store = Store(tmp_path)
        assert store.jobs()[JobId("j")] == JobRecord(spec, 3, WeightVersion(2), True, WeightVersion(2))
        store.put_job(JobRecord(spec, paused=True, cache_salt="s"))
        assert store.jobs()[JobId("j")].paused
        store.put_job(JobRecord(spec, 3, WeightVersion(2), True, WeightVersion(2)))
        store.close()


def restarted(state_dir: Path) -> tuple[Store, ClusterDriver]:
    """A scheduler's store and driver, restored."""
    store = Store(state_dir)
    driver = ClusterDriver(ClusterSettings(), store, Telemetry(dict))
    driver.connect(lambda _: None, lambda _: None)
    driver.restore()
    return store, driver


def test_an_operator_s_drain_survives_the_scheduler(tmp_path: Path) -> None:
    """A replica that was taken out of use takes no turns after a restart, whenever it comes back."""
    node = NodeRegistered(NodeId("n"), "s", (REPORT,))

    def started() -> tuple[Store, ClusterDriver]:
        return restarted(tmp_path)

    def takes_turns(driver: ClusterDriver) -> bool:
        driver.feed(JobSubmitted(JOB, "m", 1, 0))
        driver.feed(node)
        (replica,) = driver.machine.view(0).replicas
        assert replica.drained is not replica.eligible
        return replica.eligible

    store, driver = started()
    driver.feed(ReplicaDrainRequested(ReplicaId("typing-error"), drain=True))
    assert takes_turns(driver)
    driver.feed(ReplicaDrainRequested(REPORT.replica, drain=True))
    store.close()
    store, driver = started()
    assert store.drains() == [REPORT.replica]
    assert not takes_turns(driver)
    driver.feed(ReplicaDrainRequested(REPORT.replica, drain=False))
    store.close()
    store, driver = started()
    assert takes_turns(driver)
    store.close()


def test_a_restart_does_not_trust_what_was_left_out(tmp_path: Path) -> None:
    """Nor does a second one, until tokens have come from it; others of its name's beginning are not meant."""
    reports = tuple(msgspec.structs.replace(REPORT, replica=ReplicaId(name)) for name in ("r", "r-2"))
    store, driver = restarted(tmp_path)
    store.put_job(JobRecord(JobSubmitted(JOB, "m", 2, 0)))

    def at_once(driver: ClusterDriver) -> dict[str, int]:
        """Turns that each replica runs of eight that come."""
        driver.feed(NodeRegistered(NodeId("n"), "s", reports))
        for number in range(8):
            turn = TurnId(f"{store.boot}-{number}")
            driver.feed(TurnArrived(turn, JOB, TrajectoryId(turn), 10, 10))
        return {view.replica: view.turns_in_flight for view in driver.machine.view(0).replicas}

    def fails(driver: ClusterDriver, times: int) -> None:
        for _ in range(times):
            (turn, *_) = driver.machine._dispatcher._jobs[JOB].router.turns_on(ReplicaId("r"))
            driver.feed(TurnInterrupted(turn, ReplicaId("r"), "engine_status_500", 0, 0, failed=True))

    store.close()
    store, driver = restarted(tmp_path)
    assert at_once(driver) == {"r": 4, "r-2": 4}
    fails(driver, 3)
    for _ in range(2):
        store.close()
        store, driver = restarted(tmp_path)
        assert at_once(driver) == {"r": 1, "r-2": 7}
        (probe,) = driver.machine._dispatcher._jobs[JOB].router.turns_on(ReplicaId("r"))
    driver.feed(TurnProgressed(probe, ReplicaId("r"), 1))
    store.close()
    store, driver = restarted(tmp_path)
    assert at_once(driver) == {"r": 4, "r-2": 4}
    store.close()


def test_a_checkpoint_needs_no_writer_and_makes_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.record(1, Tick(), [])
    store.flush_journal()
    log = tmp_path / "scheduler.sqlite3-wal"
    assert log.stat().st_size > 0
    before = (tmp_path / "scheduler.sqlite3").read_bytes()
    store.checkpoint()
    assert (tmp_path / "scheduler.sqlite3").read_bytes() != before
    store.record(2, Tick(), [])
    store.flush_journal()
    assert [row.now_ns for row in store.journal(store.boot)] == [1, 2]
    store.close()
    for file in tmp_path.iterdir():
        file.unlink()
    store.checkpoint()
    assert list(tmp_path.iterdir()) == []


def test_the_age_of_trajectories_survives_the_scheduler(tmp_path: Path) -> None:
    """That of its first tokens, over several restarts; what has ended leaves no age behind."""
    ahead = msgspec.structs.replace(REPORT, weight_version=WeightVersion(1))
    spec = JobSubmitted(JOB, "m", 1, 0, staleness_max=4, trajectory_staleness_max=1)
    beats = iter(range(1, 100))

    def start() -> tuple[Store, ClusterDriver]:
        store, driver = restarted(tmp_path)
        driver.feed(NodeRegistered(NodeId("n"), f"s{next(beats)}", (ahead,)))
        return store, driver

    def turn(driver: ClusterDriver, trajectory: str) -> None:
        name = TurnId(f"x{next(beats)}")
        driver.feed(TurnArrived(name, JOB, TrajectoryId(trajectory), 10, 10))
        driver.feed(TurnFinished(name, REPORT.replica, 5))

    store, driver = restarted(tmp_path)
    store.put_job(JobRecord(spec))
    driver.feed(spec)
    driver.feed(NodeRegistered(NodeId("n"), "s0", (REPORT,)))
    for trajectory in ("old", "over", "old"):
        turn(driver, trajectory)
    driver.feed(TrajectoryEnded(JOB, TrajectoryId("over")))
    store.close()
    for _ in range(2):
        store, driver = start()
        driver.feed(VersionPublished(JOB, WeightVersion(1)))
        turn(driver, "old")
        turn(driver, "over")
        assert {pin.trajectory: pin.born_version for pin in store.pins()}["old"] == 0
        store.close()
    store, driver = start()
    driver.feed(JobStepBegan(JOB, 1, WeightVersion(2)))
    failed = driver.machine.counts().failed
    turn(driver, "over")
    assert driver.machine.counts().failed == failed
    turn(driver, "old")
    assert driver.machine.counts().failed == failed + 1
    store.close()
