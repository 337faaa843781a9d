"""What the node machine watches: the serving engine, and which signals cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from rose.core.effects import NodeEffect, Say
from rose.core.events import DeviceObserved, MemoryObserved
from rose.core.memory import MemoryReading
from rose.core.nodeview import NodeSettings, ServingState, ServingView, UnknownSignal
from rose.core.readings import NEVER, GateReason, SlackReading, Unknown
from rose.units import NS_PER_MS

_NOT_OBSERVED = Unknown("not_observed")
_NOTHING_READ = MemoryReading(_NOT_OBSERVED, _NOT_OBSERVED, _NOT_OBSERVED)


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
            if isinstance(self._slack, Unknown) and reason == self._slack.reason:
                reason = str(self._slack)  # with its age, which is no reason to say it again
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


class DeviceWatch:
    """The shared device, as last observed: its memory, and whether anything is wrong with it."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._memory = _NOTHING_READ
        self._read_ns = 0
        self._said = Edges()
        self.trouble = ""

    def memory_observed(self, event: MemoryObserved, now_ns: int) -> None:
        """Its memory was read."""
        self._memory = MemoryReading(
            event.serving_bytes, event.free_bytes, event.total_bytes, event.attributed
        )
        self._read_ns = now_ns

    def memory(self, now_ns: int) -> MemoryReading:
        """The last reading; unknown once it is too old, as a reader that hangs says nothing."""
        age_ns = now_ns - self._read_ns
        if self._memory is _NOTHING_READ or age_ns <= self._settings.memory_stale_ns:
            return self._memory
        stale = Unknown("memory_stale", age_ns)
        return MemoryReading(stale, stale, stale)

    def observed(self, event: DeviceObserved) -> bool:
        """Its health was judged; whether it is lost from now on, for good."""
        before, self.trouble = self.trouble, event.trouble
        return event.drains and event.trouble != before

    def closes(self, now_ns: int) -> GateReason | None:
        """Why rollout may not use it, or None."""
        if self.trouble:
            return GateReason.DEVICE_TROUBLE
        spare = self.memory(now_ns).spare_bytes(self._settings.memory.headroom_share)
        return GateReason.MEMORY_UNKNOWN if isinstance(spare, Unknown) else None

    def say(self, advice: str, now_ns: int) -> list[NodeEffect]:
        """What changed since it was last asked."""
        node = self._settings.node
        said: list[NodeEffect] = []
        if self._said.changed("trouble", "", self.trouble or None):
            text = f"the shared device is in trouble ({self.trouble}); gates are closed. {advice}".rstrip()
            said.append(
                Say("error", self.trouble, text, node)
                if self.trouble
                else Say("info", "device_well", "the shared device is well again", node)
            )
        spare = self.memory(now_ns).spare_bytes(self._settings.memory.headroom_share)
        reason = spare.reason if isinstance(spare, Unknown) and spare != _NOT_OBSERVED else None
        if self._said.changed("memory", "", reason):
            text = f"device memory is unknown ({reason}); gates are closed and KV budgets do not grow"
            said.append(
                Say("warning", "memory_unknown", text, node)
                if reason
                else Say("info", "memory_seen", "device memory can be read again", node)
            )
        return said

    def unknown_signals(self, now_ns: int) -> Iterable[UnknownSignal]:
        """Parts of its memory that cannot be read."""
        memory, blocked = self.memory(now_ns), "admission, growth of KV budgets"
        yield from unknown_signal("memory.serving_bytes", memory.serving_bytes, "nothing; shown only")
        yield from unknown_signal("memory.free_bytes", memory.free_bytes, blocked)
        yield from unknown_signal("memory.total_bytes", memory.total_bytes, blocked)
        if not memory.attributed:
            unattributed = Unknown("attribution_unknown")
            yield from unknown_signal("memory.attribution", unattributed, "growth of KV budgets")


def unknown_signal(signal: str, value: object, blocks: str) -> Iterable[UnknownSignal]:
    """One entry if `value` is Unknown, none otherwise."""
    if isinstance(value, Unknown):
        age_ms = None if value.age_ns is None else value.age_ns / NS_PER_MS
        yield UnknownSignal(signal, value.reason, age_ms, blocks)


def _left_ms(deadline_ns: int, now_ns: int) -> float | None:
    return None if deadline_ns >= NEVER else (deadline_ns - now_ns) / NS_PER_MS
