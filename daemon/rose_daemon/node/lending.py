"""rosed's lending desk: feeds the lender with what the engines logged, and carries out what it decides.

It reads the rings of the serving engine (requests) and of the rollout engines (steps), tells the node's
machine whether this host lends, orders reclaim drills, and writes the audit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rose import audit, switch
from rose.boards import BoardPaths
from rose.config import Config
from rose.core.attribution import Span
from rose.core.events import DrillRequested, LendingDecided, MemoryObserved, NodeEvent, ServingObserved
from rose.core.harm import JUDGE_AFTER_NS, BudgetSettings, Counts, Judged
from rose.core.hours import DAY_MINUTES, Hours
from rose.core.lender import Decision, Lender, LenderSettings, Mode
from rose.core.lifecycle import Phase
from rose.core.memory import MemoryReading
from rose.core.node import NodeMachine
from rose.core.readings import GateReason, ServedRequest, SlackReading, StepRecord
from rose.core.switchback import SwitchbackSettings, Window
from rose.core.takeback import DrillSettings
from rose.errors import RoseError
from rose.rings import RingReader
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId, ms_to_ns, s_to_ns
from rose_daemon.node.engines import Engines
from rose_daemon.node.journal import Journal

PERIOD_S = 0.5
"""How often it looks: a ring holds 512 steps."""
_MINUTE_NS = 60 * NS_PER_S
_AUDIT_BYTES_MAX = 8 << 20
_RESTORE_S = 34 * 3600.0
_STEP_NS_MAX = 10 * NS_PER_S
"""A step that nobody logged the end of began at most so long ago."""

log = structlog.get_logger("rosed")


class StepTail:
    """The steps of one rollout engine as they are logged, and what is missing of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ring = RingReader(path, StepRecord)
        self._lost = self._pid = 0
        self._known_ns = self._looked_ns = 0

    def fetch(self, now_ns: int, pid: int, ready: bool) -> tuple[list[StepRecord], Span | None]:
        """Steps since the last call, and a stretch of which not all are known.

        `pid` is that of the engine, 0 for none; `ready`: it may be taking steps.
        """
        steps = self._ring.fetch()
        lost = self._ring.dropped + self._ring.torn
        ended = self._pid not in {0, pid}  # in the middle of a step, maybe
        unlogged = ready and not self.path.exists()
        gap = None
        if lost != self._lost or ended or unlogged:
            gap = Span(max(self._known_ns, self._looked_ns - _STEP_NS_MAX), now_ns)
        self._lost, self._pid, self._looked_ns = lost, pid, now_ns
        if steps:
            self._known_ns = steps[-1].end_ns
        return steps, gap


class _Minute:
    """What is added up for the audit."""

    def __init__(self, now_ns: int) -> None:
        self.began_ns = now_ns
        self.counts = Counts()
        self.busy: tuple[int, int, int] | None = None
        """Stamp and busy time of the serving engine at its begin, and busy time now; None: not known."""
        self.last_ns = 0
        self.spare_bytes: int | None = None

    def serving(self, slack: SlackReading) -> None:
        if self.busy is None or slack.busy_ns < self.busy[2]:  # a restarted engine counts from 0
            self.busy = slack.stamp_ns, slack.busy_ns, slack.busy_ns
        self.busy = *self.busy[:2], slack.busy_ns
        self.last_ns = slack.stamp_ns

    def idle_share(self) -> float | None:
        if self.busy is None or self.last_ns <= self.busy[0]:
            return None
        busy_share = (self.busy[2] - self.busy[1]) / (self.last_ns - self.busy[0])
        return round(min(1.0, max(0.0, 1 - busy_share)), 4)


class LendingDesk:
    """One host's."""

    def __init__(
        self,
        config: Config,
        emit: Callable[[NodeEvent], None],
        machine: NodeMachine,
        engines: Engines,
        rng: random.Random | None = None,
    ) -> None:
        self._emit, self._machine, self._engines = emit, machine, engines
        self._rng = rng or random.Random()
        self._state_dir = Path(config.node.state_dir)
        self._headroom_share = config.memory.headroom_share
        self._audit = Journal(
            self._state_dir / audit.NAME, min(config.node.journal_bytes_max, _AUDIT_BYTES_MAX)
        )
        paths = BoardPaths(Path(config.node.run_dir))
        names = config.serving.boards or (config.serving.name,)
        self._served = [RingReader(paths.served(name), ServedRequest) for name in names if config.serving.url]
        lent = [section.id for section in config.replicas if section.kind == "opportunistic"]
        self._tails = {replica: StepTail(paths.lent_steps(replica)) for replica in lent}
        now_ns = time.monotonic_ns()
        self.lender = Lender(lender_settings(config), self._rng, now_ns)
        self._minute = _Minute(now_ns)
        self._told: Decision | None = None
        self._stopped_for: GateReason | None = GateReason.LENDING_OFF
        self._serving_seen = False
        self._occupied = False
        """A replica's engine runs that could use what is lent."""
        self._requests_lost = 0

    # ---- life -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take up what an earlier rosed knew, and decide: before any gate is published."""
        self.lender.switched_off = self._read_switch()
        self._restore(time.time(), time.monotonic_ns())
        self.look(time.monotonic_ns())

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look(time.monotonic_ns())

    def close(self) -> None:
        """Write what is left, and take away the rings of engines that have ended by now."""
        now_ns = time.monotonic_ns()
        self._fetch(now_ns)
        self._book(self.lender.judge(now_ns + JUDGE_AFTER_NS))  # no step goes on that could still be logged
        self._close_minute(now_ns)
        for tail in self._tails.values():
            tail.path.unlink(missing_ok=True)
        self._audit.close()

    @property
    def lost(self) -> int:
        """Audit lines that the disk did not take."""
        return self._audit.lost

    def _restore(self, wall_s: float, now_ns: int) -> None:
        try:
            lines = audit.since_reset(audit.read(self._state_dir, wall_s - _RESTORE_S))
        except OSError as error:
            log.warning("the audit cannot be read", code="audit_unreadable", error=str(error))
            return
        windows: list[Window] = []
        unsummed = Counts()  # late requests of a minute that a killed rosed did not sum up
        for line in lines:
            at_ns = now_ns - s_to_ns(max(0.0, wall_s - line.at_s))
            match line:
                case audit.Minute():
                    self.lender.budget.add(line.counts, at_ns)
                    unsummed = Counts()
                case audit.Late():
                    unsummed = unsummed.plus(line.counts)
                case audit.Compared(off=off, requests=requests, late=late):
                    windows.append(Window(at_ns, off, requests, late))
                case audit.Drilled(blocks=blocks, ms=ms):
                    self.lender.take_back.measured(blocks, ms_to_ns(ms))
                case _:
                    pass
        self.lender.budget.add(unsummed, now_ns)
        self.lender.switchback.restore(windows)
        self.lender.budget.advance(now_ns)

    # ---- what was observed ----------------------------------------------------------------------

    def heard(self, event: NodeEvent, now_ns: int) -> None:
        """Something was observed that the machine is told of."""
        match event:
            case ServingObserved(slack=slack):
                self._serving_seen = isinstance(slack, SlackReading)
                if isinstance(slack, SlackReading):
                    self._minute.serving(slack)
            case MemoryObserved(serving_bytes=serving, free_bytes=free, total_bytes=total):
                if isinstance(serving, int) and self._serving_seen:
                    self.lender.take_back.serving_holds(serving, now_ns)
                else:
                    self.lender.take_back.serving_unseen()
                spare = MemoryReading(serving, free, total).spare_bytes(self._headroom_share)
                if isinstance(spare, int):
                    least = self._minute.spare_bytes
                    self._minute.spare_bytes = spare if least is None else min(least, spare)
            case _:
                pass

    def took_back(self, replica: ReplicaId, blocks: int, duration_ns: int) -> None:
        """A drill is over."""
        self.lender.take_back.measured(blocks, duration_ns)
        self._write(
            audit.Drilled(at_s=time.time(), replica=replica, blocks=blocks, ms=duration_ns / NS_PER_MS)
        )

    def _engine(self, replica: ReplicaId) -> tuple[int, bool]:
        """Pid of a replica's engine (0: none), and whether it may be taking steps."""
        life, engine = self._machine.replicas[replica].life, self._engines.get(replica)
        return (engine.pid, life.phase is Phase.RUNNING) if engine else (0, False)

    def _usable(self, replica: ReplicaId) -> int:
        memory = self._machine.replicas[replica].memory
        return memory.usable_blocks if memory else 0

    def look(self, now_ns: int) -> None:
        """Fetch what was logged, judge it, decide."""
        self._fetch(now_ns)
        self._note_lost()
        self._book(self.lender.judge(now_ns))
        self._decide(now_ns)
        if self._tails and self.lender.drill_due(now_ns):
            replica = self._rng.choice(sorted(self._tails))
            if blocks := self.lender.take_back.blocks(self._usable(replica)):
                self._emit(DrillRequested(replica, blocks))
        if now_ns - self._minute.began_ns >= _MINUTE_NS:
            self._close_minute(now_ns)
        self._audit.flush()

    def _fetch(self, now_ns: int) -> None:
        for replica, tail in self._tails.items():
            steps, gap = tail.fetch(now_ns, *self._engine(replica))
            self.lender.steps(steps)
            if gap is not None:
                self.lender.gap(gap)
        for ring in self._served:
            self.lender.served(ring.fetch(), now_ns)

    def _note_lost(self) -> None:
        lost = sum(ring.dropped + ring.torn for ring in self._served)
        if lost > self._requests_lost:
            text = "requests were served that are not judged: they came faster than they were read"
            log.warning(text, code="requests_not_judged", requests=lost - self._requests_lost)
        self._requests_lost = lost

    def _book(self, judged: Sequence[Judged]) -> None:
        self._minute.counts = self._minute.counts.plus(Counts.of(judged))
        for each in judged:
            if each.blame is not None:
                self._write(_late_line(each, time.time()))

    def _decide(self, now_ns: int) -> None:
        self._occupied = any(self._engine(replica)[1] for replica in self._tails)
        decision, windows = self.lender.decide(
            now_ns, minute_of_week(time.localtime()), occupied=self._occupied
        )
        for window in windows:
            self._write(
                audit.Compared(at_s=time.time(), off=window.off, requests=window.requests, late=window.late)
            )
        told = self._told
        if told is None or (decision.closed, decision.reserve_bytes) != (told.closed, told.reserve_bytes):
            self._emit(LendingDecided(decision.closed, decision.text, decision.reserve_bytes))
            self._told = decision
        if decision.closed not in {self._stopped_for, GateReason.ROLLOUT_OFF_WINDOW}:
            self._stopped_for = decision.closed
            self._write(audit.Decided(at_s=time.time(), closed=_name(decision.closed), text=decision.text))

    def _close_minute(self, now_ns: int) -> None:
        minute, self._minute = self._minute, _Minute(now_ns)
        counts = minute.counts
        self._write(
            audit.Minute(
                at_s=time.time(),
                requests=counts.requests,
                late_by_rollout=counts.rollout,
                late_by_unknown=counts.unknown,
                late_by_serving=counts.serving,
                closed=_name(self._stopped_for) or ("" if self._occupied else audit.NO_REPLICA),
                idle_share=minute.idle_share(),
                spare_bytes=minute.spare_bytes,
            )
        )

    def _write(self, line: audit.AnyLine) -> None:
        self._audit.append(line)

    def reconfigure(self, config: Config) -> None:
        """Follow `[lending]` of settings that were read again.

        A host that began by observing has no replicas to lend to, and goes on observing until rosed restarts.
        """
        settings = lender_settings(config)
        if self.lender.settings.mode is Mode.OBSERVE and not self._tails:
            settings = msgspec.structs.replace(settings, mode=Mode.OBSERVE)
        self.lender.reconfigure(settings)
        self.look(time.monotonic_ns())

    # ---- the operator ---------------------------------------------------------------------------

    def switch(self, *, off: bool, reset: bool) -> None:
        """Lend nothing from now on, or lend again; `reset` refills the error budget.

        Lending stops even where the switch cannot be kept over a restart.  Raises RoseError then, and where
        it could not be switched on.
        """
        if off:
            self.lender.switched_off = True
            self.look(time.monotonic_ns())
        try:
            switch.put(self._state_dir, off=off)
        except OSError as error:
            state = "lending is off, but" if off else "lending stays as it was:"
            raise RoseError(
                f"{state} {self._state_dir / switch.NAME} cannot be written: {error.strerror}",
                "see node.state_dir",
            ) from None
        self.lender.switched_off = off
        if reset:
            self.lender.reset()
            self._minute.counts = Counts()
            self._write(audit.Reset(at_s=time.time()))
        self.look(time.monotonic_ns())

    def _read_switch(self) -> bool:
        try:
            return switch.is_off(self._state_dir)
        except (msgspec.DecodeError, OSError) as error:
            text = "the switch of lending cannot be read, so that it counts as off"
            path = str(self._state_dir / switch.NAME)
            log.warning(text, code="lending_switch_unreadable", path=path, error=str(error))
            return True

    def view(self) -> dict[str, Any]:
        """`lending` of `rose status --json`."""
        fields: dict[str, Any] = msgspec.to_builtins(self.lender.view())
        return {**fields, "switched_off": self.lender.switched_off}


def lender_settings(config: Config) -> LenderSettings:
    """The lender's settings, from `rose.toml`."""
    lending = config.lending
    return LenderSettings(
        mode=Mode(lending.mode),
        hours=tuple(Hours.parse(text) for text in lending.hours),
        budget=BudgetSettings(
            share_max=lending.harm_share_max,
            requests_min=lending.harm_requests_min,
            window_ns=s_to_ns(lending.harm_window_s),
        ),
        switchback=SwitchbackSettings(
            off_share=lending.switchback_share, window_ns=s_to_ns(lending.switchback_window_s)
        ),
        drill=DrillSettings(period_ns=s_to_ns(lending.drill_period_s), share_max=lending.drill_share_max),
    )


def without_lent(config: Config) -> Config:
    """What rosed runs where it only observes: no opportunistic replica."""
    if config.lending.mode == "lend":
        return config
    own = tuple(section for section in config.replicas if section.kind != "opportunistic")
    return msgspec.structs.replace(config, replicas=own)


def minute_of_week(at: time.struct_time) -> int:
    """Minutes since Monday, 00:00."""
    return at.tm_wday * DAY_MINUTES + at.tm_hour * 60 + at.tm_min


def _name(closed: GateReason | None) -> str:
    return "" if closed is None else closed.name.lower()


def _late_line(judged: Judged, wall_s: float) -> audit.Late:
    request, blame = judged.request, judged.blame
    assert blame is not None
    return audit.Late(
        at_s=wall_s,
        number=request.number,
        cause=blame.cause.value,
        budget=judged.budget,
        overshoot_ms=judged.overshoot_ns / NS_PER_MS,
        rollout_ms=blame.rollout_ns / NS_PER_MS,
        wait_ms=(request.last_ns - request.arrival_ns) / NS_PER_MS,
        tokens=request.tokens,
    )
