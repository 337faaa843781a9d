"""What must survive a restart of the scheduler: jobs, finished answers, and the journal of decisions.

One SQLite file in WAL mode.  Every write is committed before the call returns, so that a killed process
loses nothing it has acknowledged; the journal is the exception, it is written in batches.  While the disk
fails, jobs cannot be changed (the call raises); answers and journal rows are dropped and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from rose.core.effects import ClusterEffect, DispatchTurn, Say
from rose.core.events import (
    ClusterEvent,
    JobEnded,
    JobSubmitted,
    ReplicaDistrusted,
    TrajectoryEnded,
    TrajectoryPinned,
    TurnArrived,
    TurnFinished,
    TurnProgressed,
)
from rose.core.suspension import SUSPENDED
from rose.errors import NotReady, RoseError
from rose.units import JobId, ReplicaId, TrajectoryId, TurnId, WeightVersion
from rose_daemon.scheduler.output import Answer

SCHEMA = 2
ANSWERS_MAX = 20_000
ANSWERS_BYTES_MAX = 256 << 20
JOURNAL_ROWS_MAX = 200_000
PINS_RESTORED_MAX = 10_000

_WAL_PAGES_MAX = 16_000
"""Beyond so many (64 MB) a write checkpoints by itself: `checkpoint` has not kept up."""

log = structlog.get_logger()

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    job TEXT PRIMARY KEY, spec BLOB NOT NULL, rl_step INTEGER, required_version INTEGER,
    step_open INTEGER NOT NULL, published_version INTEGER, paused INTEGER NOT NULL DEFAULT 0,
    cache_salt TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS answers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, turn TEXT NOT NULL, digest TEXT NOT NULL,
    body BLOB NOT NULL, trajectory TEXT NOT NULL DEFAULT '', UNIQUE (job, turn)
) STRICT;
CREATE TABLE IF NOT EXISTS workers (url TEXT PRIMARY KEY, model TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS drains (replica TEXT PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, boot INTEGER NOT NULL, now_ns INTEGER NOT NULL,
    event BLOB NOT NULL, effects BLOB NOT NULL
) STRICT;
"""


_FROM_1 = """
ALTER TABLE jobs ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN cache_salt TEXT NOT NULL DEFAULT '';
ALTER TABLE answers ADD COLUMN trajectory TEXT NOT NULL DEFAULT '';
PRAGMA user_version=2;
"""


class JobRecord(msgspec.Struct, frozen=True):
    """A job as it is stored."""

    spec: JobSubmitted
    rl_step: int | None = None
    required_version: WeightVersion | None = None
    step_open: bool = False
    published_version: WeightVersion | None = None
    """Highest version the trainer announced."""
    paused: bool = False
    """A client holds its turns back."""
    cache_salt: str = ""
    """Sets its prefixes apart from those before the last flush."""


class StoredAnswer(msgspec.Struct, frozen=True):
    """A finished turn and the digest of the request it answered."""

    digest: str
    answer: Answer


class AnswerRow(NamedTuple):
    """A finished turn in the order of ends."""

    sequence: int
    digest: str
    answer: Answer


class JournalRow(msgspec.Struct, frozen=True):
    """One decision: the event, when it was fed, and what the machine decided."""

    now_ns: int
    event: ClusterEvent
    effects: list[ClusterEffect]


class Store:
    """The scheduler's durable state.  Raises RoseError when the directory cannot be used.

    A lock file keeps a second scheduler out of the same directory.
    """

    def __init__(self, state_dir: Path) -> None:
        path = self._path = state_dir / "scheduler.sqlite3"
        self._lock: int | None = None
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(state_dir / "scheduler.lock")
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES_MAX}")
            self._db.execute("PRAGMA busy_timeout=2000")
            self._check_schema(path)
            self._db.executescript(_TABLES)
        except RoseError:
            self._release()
            raise
        except (OSError, sqlite3.Error) as error:
            self._release()
            raise RoseError(
                f"{path}: cannot be used: {error}", "set [scheduler] state_dir, or move the broken file away"
            ) from None
        self.boot = time.time_ns()
        """Names this run of the scheduler in the journal."""
        self._pending: list[tuple[int, int, bytes, bytes]] = []
        self._failing = False
        self._count_answers()

    def close(self) -> None:
        """Flush the journal and let the directory go."""
        self.flush_journal()
        self._db.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_schema(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 1:
            self._db.executescript(_FROM_1)
        elif version not in (0, SCHEMA):
            raise RoseError(
                f"{path}: schema {version} is not supported", f"this release reads schema {SCHEMA}"
            )
        self._db.execute(f"PRAGMA user_version={SCHEMA}")

    # ---- jobs --------------------------------------------------------------------------------------

    def jobs(self) -> dict[JobId, JobRecord]:
        """All jobs, in order of submission."""
        rows = self._db.execute(
            "SELECT spec, rl_step, required_version, step_open, published_version, paused, cache_salt"
            " FROM jobs ORDER BY rowid"
        )
        records = [
            JobRecord(
                msgspec.msgpack.decode(spec, type=JobSubmitted),
                rl_step,
                required,
                bool(is_open),
                published,
                bool(paused),
                salt,
            )
            for spec, rl_step, required, is_open, published, paused, salt in rows
        ]
        return {record.spec.job: record for record in records}

    def put_job(self, record: JobRecord) -> None:
        """Insert or replace a job."""
        self._db.execute(
            "INSERT INTO jobs (job, spec, rl_step, required_version, step_open, published_version, paused,"
            " cache_salt) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job) DO UPDATE SET spec=excluded.spec,"
            " rl_step=excluded.rl_step, required_version=excluded.required_version,"
            " step_open=excluded.step_open, published_version=excluded.published_version,"
            " paused=excluded.paused, cache_salt=excluded.cache_salt",
            (
                record.spec.job,
                msgspec.msgpack.encode(record.spec),
                record.rl_step,
                record.required_version,
                int(record.step_open),
                record.published_version,
                int(record.paused),
                record.cache_salt,
            ),
        )

    def delete_job(self, job: JobId) -> None:
        """Forget a job and its answers."""
        # Answers first: a job of the same name must not find those of the one before it.
        self._db.execute("DELETE FROM answers WHERE job=?", (job,))
        self._db.execute("DELETE FROM jobs WHERE job=?", (job,))
        self._count_answers()

    def _count_answers(self) -> None:
        self._answers, self._answer_bytes = self._db.execute(
            "SELECT count(*), coalesce(sum(length(body)), 0) FROM answers"
        ).fetchone()

    # ---- workers -----------------------------------------------------------------------------------

    def workers(self) -> dict[str, str]:
        """URL -> model of the engines that were registered, in order."""
        return dict(self._db.execute("SELECT url, model FROM workers ORDER BY rowid"))

    def put_worker(self, url: str, model: str) -> None:
        """Remember an engine."""
        self._db.execute("INSERT OR REPLACE INTO workers VALUES (?, ?)", (url, model))

    def delete_worker(self, url: str) -> None:
        """Forget an engine."""
        self._db.execute("DELETE FROM workers WHERE url=?", (url,))

    # ---- drains ------------------------------------------------------------------------------------

    def drains(self) -> list[ReplicaId]:
        """Replicas that the operator took out of use."""
        return [ReplicaId(name) for (name,) in self._db.execute("SELECT replica FROM drains ORDER BY rowid")]

    def put_drain(self, replica: ReplicaId, drain: bool) -> None:
        """Remember that it is out of use, or forget that."""
        if drain:
            self._db.execute("INSERT OR IGNORE INTO drains VALUES (?)", (replica,))
        else:
            self._db.execute("DELETE FROM drains WHERE replica=?", (replica,))

    # ---- answers -----------------------------------------------------------------------------------

    def put_answer(self, job: JobId, digest: str, answer: Answer) -> int:
        """Keep a finished turn; returns how many were dropped: old ones beyond the bounds, or this one.

        A disk that fails must not cost the client its answer: only a resend would not find it.
        """
        body = msgspec.msgpack.encode(answer)
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO answers (job, turn, digest, body, trajectory) VALUES (?, ?, ?, ?, ?)",
                (job, answer.turn_id, digest, body, answer.trajectory),
            )
        except sqlite3.OperationalError as error:
            self._note_failure(error)
            return 1
        self._answers += 1
        self._answer_bytes += len(body)
        dropped = 0
        while self._answers > ANSWERS_MAX or (self._answer_bytes > ANSWERS_BYTES_MAX and self._answers > 1):
            (size,) = self._db.execute(
                "DELETE FROM answers WHERE seq=(SELECT min(seq) FROM answers) RETURNING length(body)"
            ).fetchone()
            self._answers -= 1
            self._answer_bytes -= size
            dropped += 1
        return dropped

    def answer(self, job: JobId, turn_id: str) -> StoredAnswer | None:
        """The finished turn with that id, if it is still kept."""
        row = self._db.execute(
            "SELECT digest, body FROM answers WHERE job=? AND turn=?", (job, turn_id)
        ).fetchone()
        return None if row is None else StoredAnswer(row[0], msgspec.msgpack.decode(row[1], type=Answer))

    def answers(self, job: JobId, after: int, limit: int, trajectory: str | None = None) -> list[AnswerRow]:
        """Up to `limit` finished turns that came after the sequence number, of all or of one trajectory."""
        rows = self._db.execute(
            "SELECT seq, digest, body FROM answers WHERE job=? AND seq>? AND (? IS NULL OR trajectory=?)"
            " ORDER BY seq LIMIT ?",
            (job, after, trajectory, trajectory, limit),
        )
        decode = msgspec.msgpack.decode
        return [AnswerRow(seq, digest, decode(body, type=Answer)) for seq, digest, body in rows]

    def forget_answers(self, job: JobId, trajectory: str) -> int:
        """Forget the finished turns of a trajectory: a resend would run again.  Answers how many."""
        forgotten = self._db.execute(
            "DELETE FROM answers WHERE job=? AND trajectory=?", (job, trajectory)
        ).rowcount
        if forgotten:
            self._count_answers()
        return forgotten

    # ---- journal -----------------------------------------------------------------------------------

    def record(self, now_ns: int, event: ClusterEvent, effects: Sequence[ClusterEffect]) -> None:
        """Note a decision; it is written by the next `flush_journal`."""
        encode = msgspec.msgpack.encode
        self._pending.append((self.boot, now_ns, encode(event), encode(effects)))

    def flush_journal(self) -> int:
        """Write what is pending; returns how many rows were dropped to stay within the bound.

        A disk that fails costs the pending rows, which count as dropped, and never a decision.
        """
        if not self._pending:
            return 0
        rows, self._pending = self._pending, []
        try:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO journal (boot, now_ns, event, effects) VALUES (?, ?, ?, ?)", rows
            )
            dropped = self._db.execute(
                "DELETE FROM journal WHERE seq <= (SELECT max(seq) FROM journal) - ?", (JOURNAL_ROWS_MAX,)
            ).rowcount
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._note_failure(error)
            return len(rows)
        self._failing = False
        return dropped

    def checkpoint(self) -> None:
        """Move what is in the write-ahead log to the database file, which waits for the disk.

        May be called from another thread, meanwhile writing goes on.  A disk that fails is met by the next
        write.
        """
        existing = f"{self._path.absolute().as_uri()}?mode=rw"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(existing, uri=True, isolation_level=None)) as db,
        ):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _note_failure(self, error: sqlite3.OperationalError) -> None:
        """One line when writing begins to fail, not one for each write."""
        if not self._failing:
            self._failing = True
            log.error("store_failing", text=f"records are lost: {error}")

    def pins(self, pins_max: int = PINS_RESTORED_MAX) -> list[TrajectoryPinned]:
        """Where trajectories last ran in the run of the scheduler before this one, least recent first.

        As far back as its journal goes; the last `pins_max` at most.
        """
        rows: Iterator[tuple[bytes, bytes]] = self._db.execute(
            "SELECT event, effects FROM journal WHERE boot=(SELECT max(boot) FROM journal WHERE boot<?)"
            " AND (instr(event, ?) OR instr(event, ?) OR instr(event, ?) OR instr(event, ?)"
            " OR instr(effects, ?)) ORDER BY seq",
            (
                self.boot,
                b"TurnArrived",
                b"TrajectoryPinned",
                b"TrajectoryEnded",
                b"JobEnded",
                b"DispatchTurn",
            ),
        )
        turns: dict[TurnId, tuple[JobId, TrajectoryId]] = {}
        where: dict[tuple[JobId, TrajectoryId], TrajectoryPinned] = {}
        for event_blob, effects_blob in rows:
            event = msgspec.msgpack.decode(event_blob, type=ClusterEvent)
            if isinstance(event, TurnArrived):
                turns[event.turn] = (event.job, event.trajectory)
            elif isinstance(event, TrajectoryPinned):
                where[event.job, event.trajectory] = event
            elif isinstance(event, TrajectoryEnded):
                where.pop((event.job, event.trajectory), None)
            elif isinstance(event, JobEnded):
                where = {key: pin for key, pin in where.items() if key[0] != event.job}
            for effect in msgspec.msgpack.decode(effects_blob, type=list[ClusterEffect]):
                if isinstance(effect, DispatchTurn) and (key := turns.get(effect.turn)) is not None:
                    before = where.pop(key, None)  # so that the most recent one stands last
                    known = (effect.version, None if before is None else before.born_version)
                    born = min((version for version in known if version is not None), default=None)
                    where[key] = TrajectoryPinned(*key, effect.replica, born)
        return list(where.values())[-pins_max:]

    def suspended(self) -> list[ReplicaId]:
        """Replicas that the run of the scheduler before this one left out, and had no token from since."""
        (before,) = self._db.execute("SELECT max(boot) FROM journal WHERE boot<?", (self.boot,)).fetchone()
        rows = self._db.execute(
            "SELECT seq, event, effects FROM journal WHERE boot=?"
            " AND (instr(event, ?) OR instr(effects, ?)) ORDER BY seq",
            (before, b"ReplicaDistrusted", SUSPENDED.encode()),
        )
        since: dict[ReplicaId, int] = {}
        for seq, event_blob, effects_blob in rows:
            event = msgspec.msgpack.decode(event_blob, type=ClusterEvent)
            if isinstance(event, ReplicaDistrusted):
                since[event.replica] = seq
            for effect in msgspec.msgpack.decode(effects_blob, type=list[ClusterEffect]):
                if isinstance(effect, Say) and effect.code == SUSPENDED:
                    since[ReplicaId(effect.subject)] = seq
        return [replica for replica, seq in since.items() if not self._worked(before, replica, seq)]

    def _worked(self, boot: int, replica: ReplicaId, after: int) -> bool:
        """Whether tokens came from a replica after that row."""
        rows = self._db.execute(
            "SELECT event FROM journal WHERE boot=? AND seq>? AND instr(event, ?)"
            " AND (instr(event, ?) OR instr(event, ?))",
            (boot, after, replica.encode(), b"TurnProgressed", b"TurnFinished"),
        )
        events = (msgspec.msgpack.decode(blob, type=ClusterEvent) for (blob,) in rows)
        return any(
            isinstance(event, TurnProgressed | TurnFinished) and event.replica == replica for event in events
        )

    def boots(self) -> list[int]:
        """Runs of the scheduler that the journal still knows, oldest first."""
        return [boot for (boot,) in self._db.execute("SELECT DISTINCT boot FROM journal ORDER BY boot")]

    def journal(self, boot: int) -> Iterator[JournalRow]:
        """Decisions of one run of the scheduler, oldest first."""
        rows: Iterator[tuple[Any, ...]] = self._db.execute(
            "SELECT now_ns, event, effects FROM journal WHERE boot=? ORDER BY seq", (boot,)
        )
        for now_ns, event, effects in rows:
            yield JournalRow(
                now_ns,
                msgspec.msgpack.decode(event, type=ClusterEvent),
                msgspec.msgpack.decode(effects, type=list[ClusterEffect]),
            )


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise NotReady(f"{path.parent}: another scheduler uses this directory", "stop it first") from None
    return descriptor
