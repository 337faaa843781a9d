"""`rose replay`: what another policy would have decided on what a rosed recorded in its journal.

The journal holds every observation: slack boards, memory, RL steps.  They are given to the real AdmissionGate
and MemoryPolicy under each policy in turn.  Readings stay as they were recorded: how serving would have fared
under another policy, or what memory another cut would have freed, is not in them; `rose sim` answers that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rose.core.admission import AdmissionGate
from rose.core.effects import PublishGate
from rose.core.events import (
    MemoryObserved,
    NodeEvent,
    ReclaimRequested,
    ReplicaObserved,
    ServingObserved,
    StepBegan,
)
from rose.core.memory import MemoryPolicy, MemoryReading, MemorySettings
from rose.core.readings import GateMode, GatePolicy, GateReason, ReplicaReading, SlackReading, Unknown
from rose.errors import ConfigError
from rose.journals import GATES, Entry, read, read_gates
from rose.units import NS_PER_S, ReplicaId, ms_to_ns

SCHEMA = 1
STEP_TOKENS_MAX = 512
HOLD_NS_MAX = NS_PER_S
"""A reading stands in for the time until the next one, for this long at most: a gap is not known."""
RECORDED = "recorded"
_GATE_KEYS = {"token_cap", "margin_ms", "ttft_ms"}
_MEMORY_KEYS = {"headroom_share", "cut_share"}
_KEYS = sorted(_GATE_KEYS | _MEMORY_KEYS)
_HINT = f"write recorded, strict, slack, open or closed, then any of ,KEY=VALUE with {', '.join(_KEYS)}"


class Counterfactual(msgspec.Struct, frozen=True):
    """A policy to try."""

    name: str
    mode: str
    settings: dict[str, float]

    def gate(self, recorded: GatePolicy) -> GatePolicy:
        """The recorded policy as this one would have it; what else closed the gate still does."""
        changed = {
            "margin_ns": ms_to_ns(self.settings.get("margin_ms", recorded.margin_ns / 1e6)),
            "ttft_slo_ns": ms_to_ns(self.settings.get("ttft_ms", recorded.ttft_slo_ns / 1e6)),
            "token_cap": int(self.settings.get("token_cap", recorded.token_cap)),
        }
        forced = recorded.mode == GateMode.CLOSED and recorded.closed_reason != GateReason.CLOSED_BY_OPERATOR
        mode = recorded.mode if self.mode == RECORDED or forced else int(GateMode[self.mode.upper()])
        return recorded._replace(mode=mode, **changed)

    def memory(self) -> MemorySettings:
        """Its memory policy; the defaults where it says nothing."""
        chosen = {key: self.settings[key] for key in _MEMORY_KEYS & self.settings.keys()}
        return msgspec.structs.replace(MemorySettings(), **chosen)


def parse(text: str) -> Counterfactual:
    """A policy from `MODE[,KEY=VALUE]...`.  Raises ConfigError."""
    mode, *parts = text.split(",")
    if mode != RECORDED and mode.upper() not in GateMode.__members__:
        raise ConfigError(f"--policy {text!r}: {mode!r} is no mode", _HINT)
    settings: dict[str, float] = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            settings[key] = float(value)
        except ValueError:
            raise ConfigError(f"--policy {text!r}: {part!r} is not KEY=NUMBER", _HINT) from None
        if key not in _KEYS or settings[key] < 0:
            raise ConfigError(f"--policy {text!r}: {part!r} cannot be set", _HINT)
    policy = Counterfactual(text, mode, settings)
    try:
        policy.memory()
    except ValueError as error:
        raise ConfigError(f"--policy {text!r}: {error}", _HINT) from None
    return policy


class Trial:
    """One policy for one replica, over a whole journal."""

    def __init__(self, policy: Counterfactual, latency: Sequence[tuple[int, int]]) -> None:
        self.policy = policy
        self.open_ns = self.known_ns = 0
        self.transitions = 0
        self.cuts = 0
        self._token_ns = 0
        self._was_open = False
        self._gate = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX)
        for tokens, duration_ns in latency:
            self._gate.observe_step(tokens, duration_ns)
        self._memory = MemoryPolicy(policy.memory())
        self._blocks_min: int | None = None

    def served(
        self, slack: SlackReading | Unknown, recorded: GatePolicy | Unknown, now_ns: int, next_ns: int
    ) -> None:
        """Serving was seen at `now_ns`, and next at `next_ns`."""
        policy = recorded
        if not isinstance(recorded, Unknown):
            # The journal has a policy as it was published; rosed renewed its lease ever after.
            policy = self.policy.gate(recorded)._replace(alive_until_ns=next_ns + NS_PER_S)
        answer = self._gate.decide(slack, policy, now_ns)
        span_ns = next_ns - now_ns
        self.known_ns += span_ns
        if answer.open is not self._was_open:
            self.transitions += 1
            self._was_open = answer.open
        if answer.open:
            open_ns = min(span_ns, max(0, answer.valid_until_ns - now_ns))
            self.open_ns += open_ns
            self._token_ns += answer.tokens * open_ns

    def observed(self, event: NodeEvent, now_ns: int) -> None:
        """Anything else that the memory policy goes by."""
        memory = self._memory
        cut = None
        match event:
            case ReplicaObserved(reading=ReplicaReading() as board):
                memory.sized(board.kv_total_blocks)
            case MemoryObserved():
                reading = MemoryReading(
                    event.serving_bytes, event.free_bytes, event.total_bytes, event.attributed
                )
                cut = memory.observed(reading, now_ns)
            case ReclaimRequested():
                cut = memory.reclaim(event.reason)
            case StepBegan():
                memory.step_began()
        if cut is not None:
            self.cuts += 1
            self._blocks_min = min(cut.after_blocks, self._blocks_min or cut.after_blocks)
            memory.applied(now_ns)

    def report(self) -> dict[str, Any]:
        """What came of it."""
        known_ns = max(1, self.known_ns)
        return {
            "policy": self.policy.name,
            "open_share": self.open_ns / known_ns,
            "tokens_mean": self._token_ns / self.open_ns if self.open_ns else 0.0,
            "transitions": self.transitions,
            "cuts": self.cuts,
            "kv_blocks_min": self._blocks_min,
        }


def replay(path: Path, policies: Sequence[Counterfactual]) -> dict[str, Any]:
    """Try the policies on a journal.  Raises ConfigError."""
    entries, damaged = _read(path)
    names = list(
        dict.fromkeys(
            effect.replica for entry in entries for effect in entry.effects if isinstance(effect, PublishGate)
        )
    )
    if not names:
        raise ConfigError(
            f"{path}: no gate policy was ever published", "name the journal of a rosed with replicas"
        )
    replicas = {}
    for name in names:
        latency = _latency(path.with_name(GATES), name)
        trials = [Trial(policy, latency) for policy in policies]
        seen_open = _play(entries, name, trials)
        replicas[str(name)] = {
            "gate_open_share_seen": seen_open,
            "latency_known": bool(latency),
            "policies": [trial.report() for trial in trials],
        }
    return {
        "schema": SCHEMA,
        "command": "replay",
        "journal": str(path),
        "entries": len(entries),
        "lines_damaged": len(damaged),
        "span_s": (entries[-1].now_ns - entries[0].now_ns) / NS_PER_S,
        "replicas": replicas,
    }


def _play(entries: Sequence[Entry], replica: ReplicaId, trials: Sequence[Trial]) -> float | None:
    """Give all trials the journal; answers the share of time for which the gate was seen open."""
    policy: GatePolicy | Unknown = Unknown("no_policy_yet")
    served = [index for index, entry in enumerate(entries) if isinstance(entry.event, ServingObserved)]
    following = dict(pairwise(served))
    open_ns = seen_ns = 0
    seen: tuple[int, bool] | None = None
    gone = False
    """The replica's board is unknown: its engine starts or is gone, and no gate is asked."""
    for index, entry in enumerate(entries):
        event, now_ns = entry.event, entry.now_ns
        for effect in entry.effects:
            if isinstance(effect, PublishGate) and effect.replica == replica:
                policy = effect.policy
        if isinstance(event, ServingObserved) and not gone:
            next_ns = entries[following[index]].now_ns if index in following else now_ns
            for trial in trials:
                trial.served(event.slack, policy, now_ns, min(next_ns, now_ns + HOLD_NS_MAX))
        elif not isinstance(event, ReplicaObserved) or event.replica == replica:
            for trial in trials:
                trial.observed(event, now_ns)
        if isinstance(event, ReplicaObserved) and event.replica == replica:
            if seen is not None and now_ns - seen[0] <= HOLD_NS_MAX:
                seen_ns += now_ns - seen[0]
                open_ns += (now_ns - seen[0]) * seen[1]
            reading = event.reading
            gone = isinstance(reading, Unknown)
            seen = None if isinstance(reading, Unknown) else (now_ns, bool(reading.gate_open))
    return open_ns / seen_ns if seen_ns else None


def _latency(path: Path, replica: ReplicaId) -> list[tuple[int, int]]:
    """The last T_rollout that the gates' journal tells of, as steps to learn it from; nothing if none is."""
    if not path.is_file():
        return []
    known: list[tuple[int, int]] = []
    try:
        transitions = [entry.transition for entry in read_gates(path, replica)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for found in transitions:
        one, many = found.get("step_ns", 0), found.get("step_512_ns", 0)
        if one > 0 and many > 0:
            known = [(1, one), (512, many)]
    return known * 4


def _read(path: Path) -> tuple[list[Entry], list[int]]:
    """All entries, and the numbers of lines that are none: a full disk leaves such.  Raises ConfigError."""
    try:
        entries, damaged = read(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not entries and damaged:
        raise ConfigError(
            f"{path}:{damaged[0]}: not an entry of rosed's journal",
            "journal.jsonl lies in the state directory of rosed",
        )
    if not entries:
        raise ConfigError(f"{path}: no entry")
    return entries, damaged
