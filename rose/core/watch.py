"""What the node machine watches: the serving engine, and which signals cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from rose.core.memory import MemoryReading
from rose.core.nodeview import ServingState, ServingView, UnknownSignal
from rose.core.readings import NEVER, SlackReading, Unknown
from rose.units import NS_PER_MS

_NOT_OBSERVED = Unknown("not_observed")
NOTHING_READ = MemoryReading(_NOT_OBSERVED, _NOT_OBSERVED, _NOT_OBSERVED)
"""Device memory before the first reading."""


class Edges:
    """Remembers what was last said of each thing, so that it is said once and not at every tick.

    Its size is bounded by the number of codes times that of replicas.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], object] = {}

    def changed(self, code: str, subject: str, value: object) -> bool:
        """Whether `value` differs from the one given last (None before the first)."""
        before = self._last.get((code, subject))
        self._last[code, subject] = value
        return before != value


class ServingWatch:
    """The serving engine of this host, as last observed.  `name` empty: there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._slack: SlackReading | Unknown = _NOT_OBSERVED
        self._healthy: bool | Unknown = _NOT_OBSERVED

    def observed(self, slack: SlackReading | Unknown, healthy: bool | Unknown) -> None:
        """Its board was read, and its HTTP port probed."""
        self._slack, self._healthy = slack, healthy

    @property
    def trouble(self) -> tuple[ServingState, str] | None:
        """What is wrong with it, or with our view of it."""
        if not self._name:
            return None
        if self._healthy is False:
            return ServingState.UNHEALTHY, "its HTTP port does not answer, or answers with an error"
        if isinstance(self._slack, Unknown):
            return ServingState.UNKNOWN, self._slack.reason
        if isinstance(self._healthy, Unknown):
            return ServingState.UNKNOWN, self._healthy.reason
        return None

    def view(self, now_ns: int) -> ServingView:
        """What to show of it."""
        if not self._name:
            return ServingView(name="", state=ServingState.NONE)
        slack = None if isinstance(self._slack, Unknown) else self._slack
        if slack is None or self.trouble is not None:
            state, reason = self.trouble or (ServingState.UNKNOWN, "")
            return ServingView(name=self._name, state=state, reason=reason)
        busy = slack.waiting or slack.running or slack.in_step
        return ServingView(
            name=self._name,
            state=ServingState.BUSY if busy else ServingState.IDLE,
            waiting=slack.waiting,
            running=slack.running,
            ttft_slack_ms=_left_ms(slack.ttft_deadline_ns, now_ns),
            tpot_slack_ms=_left_ms(slack.tpot_deadline_ns, now_ns),
            drift=slack.drift_permille / 1000 if slack.drift_permille > 0 else None,
            kv_used_share=slack.kv_used_blocks / slack.kv_total_blocks if slack.kv_total_blocks > 0 else None,
        )

    def unknown_signals(self) -> Iterable[UnknownSignal]:
        """Signals of it that cannot be read."""
        if self._name:
            yield from unknown_signal("serving.slack", self._slack, "admission of opportunistic replicas")
            yield from unknown_signal("serving.health", self._healthy, "nothing; serving counts as unknown")


def unknown_signal(signal: str, value: object, blocks: str) -> Iterable[UnknownSignal]:
    """One entry if `value` is Unknown, none otherwise."""
    if isinstance(value, Unknown):
        age_ms = None if value.age_ns is None else value.age_ns / NS_PER_MS
        yield UnknownSignal(signal, value.reason, age_ms, blocks)


def _left_ms(deadline_ns: int, now_ns: int) -> float | None:
    return None if deadline_ns >= NEVER else (deadline_ns - now_ns) / NS_PER_MS
