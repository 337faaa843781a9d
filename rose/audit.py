"""The lending audit: what rosed measured of serving, and what it decided by it, one JSON line each.

rosed writes `audit.jsonl` in its state directory, and reads it when it starts, so that a restart neither
refills the error budget nor forgets a drill.  `rose audit` reads it too, whether rosed runs or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rose import journals
from rose.core.attribution import Cause
from rose.core.harm import Counts
from rose.core.switchback import Window
from rose.units import NS_PER_S

NAME = "audit.jsonl"
"""In the state directory; the file before it ends in `.1`."""

NO_REPLICA = "no_replica_runs"
"""Something would have been lent, and no engine was there to use it."""


class Line(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all lines."""

    at_s: float
    """Unix time."""


class Minute(Line, frozen=True, kw_only=True):
    """Requests judged in about a minute, and what could have been lent in it."""

    requests: int
    late_by_rollout: int
    late_by_unknown: int
    late_by_serving: int
    closed: str
    """Why nothing was lent at its end (NO_REPLICA or a GateReason in lower case); empty: something was."""
    idle_share: float | None = None
    """Of the serving engine's time without a step; None if not known."""
    spare_bytes: int | None = None
    """Least device memory beyond the headroom (below 0: serving was in it), and beside what is lent; None if
    not known."""

    @property
    def counts(self) -> Counts:
        """What was judged."""
        return Counts(self.requests, self.late_by_rollout, self.late_by_unknown, self.late_by_serving)


class Late(Line, frozen=True, kw_only=True):
    """One late request and the verdict on it."""

    number: int
    """As its engine counts them."""
    cause: str
    budget: str
    overshoot_ms: float
    rollout_ms: float
    """Time of rollout steps within its wait."""
    wait_ms: float
    """From arrival to its last token."""
    tokens: int

    @property
    def counts(self) -> Counts:
        """As one judged request."""
        causes = (Cause.ROLLOUT, Cause.UNKNOWN, Cause.SERVING)
        return Counts(1, *(int(self.cause == cause) for cause in causes))


class Compared(Line, frozen=True, kw_only=True):
    """A switchback window that was counted out."""

    off: bool
    requests: int
    late: int


class Drilled(Line, frozen=True, kw_only=True):
    """A reclaim drill."""

    replica: str
    blocks: int
    ms: float


class Decided(Line, frozen=True, kw_only=True):
    """Lending stopped or went on."""

    closed: str
    text: str


class Reset(Line, frozen=True, kw_only=True):
    """The operator refilled the error budget: lines before it count no more."""


AnyLine = Minute | Late | Compared | Drilled | Decided | Reset
_decoder = msgspec.json.Decoder(AnyLine)


def read(state_dir: Path, since_s: float) -> list[AnyLine]:
    """All lines from `since_s` (Unix time) on, oldest first; a line that cannot be read is left out.

    Raises OSError when a file is there and cannot be read.
    """
    path = state_dir / NAME
    return [line for line in _lines(journals.files_of(path)) if line.at_s >= since_s]


def _lines(paths: Iterable[Path]) -> Iterator[AnyLine]:
    for path in paths:
        try:
            with path.open("rb") as file:
                yield from journals.decoded(_decoder, file)
        except FileNotFoundError:
            continue


def since_reset(lines: Iterable[AnyLine]) -> list[AnyLine]:
    """Those after the latest reset."""
    kept: list[AnyLine] = []
    for line in lines:
        if isinstance(line, Reset):
            kept.clear()
        kept.append(line)
    return kept


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a stretch of the audit amounts to."""

    counts: Counts
    windows: list[Window]
    drills_ms: list[float]
    late: list[Late]
    decisions: list[Decided]
    idle_shares: list[float]
    spare_bytes: list[int]
    minutes_lent: int
    minutes: int


def summary(lines: Iterable[AnyLine]) -> Summary:
    """Count it all."""
    minutes: list[Minute] = []
    late: list[Late] = []
    decisions: list[Decided] = []
    windows: list[Window] = []
    drills: list[float] = []
    for line in lines:
        match line:
            case Minute():
                minutes.append(line)
            case Late():
                late.append(line)
            case Compared(off=off, requests=requests, late=hits):
                windows.append(Window(round(line.at_s * NS_PER_S), off, requests, hits))
            case Drilled(ms=ms):
                drills.append(ms)
            case Decided():
                decisions.append(line)
            case Reset():
                pass
    counts = Counts()
    for minute in minutes:
        counts = counts.plus(minute.counts)
    return Summary(
        counts=counts,
        windows=windows,
        drills_ms=sorted(drills),
        late=late,
        decisions=decisions,
        idle_shares=sorted(each.idle_share for each in minutes if each.idle_share is not None),
        spare_bytes=sorted(each.spare_bytes for each in minutes if each.spare_bytes is not None),
        minutes_lent=sum(not minute.closed for minute in minutes),
        minutes=len(minutes),
    )
