"""One replica as its node sees it: engine process, gate policy, KV budget and weights together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rose.core.dormancy import Dormancy
from rose.core.effects import ApplyVersion, NodeEffect, PublishGate, Say
from rose.core.events import PolicyChanged, ReplicaReport, WeightsRefused
from rose.core.lifecycle import EngineLife, Phase, ReplicaState
from rose.core.memory import Cut, MemoryPolicy, MemoryReading, MemoryState
from rose.core.nodeview import GateView, MemoryView, NodeSettings, ReplicaSettings, ReplicaView, WeightUpdate
from rose.core.readings import GateMode, GatePolicy, GateReason, LimitStatus, ReplicaReading, Unknown
from rose.core.shelf import Staged, VersionShelf
from rose.core.terms import Drill, Terms
from rose.units import NS_PER_MS, ReplicaId, WeightVersion

_INACTIVE_BLOCKS = 1
"""KV budget of an inactive replica: an engine keeps one block."""
_DISOBEYED = (LimitStatus.STALE, LimitStatus.CONFLICT)


class HostedReplica:
    """One rollout engine of this host.  `memory` is None for a dedicated replica: it lends nothing."""

    def __init__(self, node: NodeSettings, settings: ReplicaSettings) -> None:
        self.settings = settings
        self._node = node
        self.life = EngineLife(settings.replica, node.lifecycle)
        self.memory: MemoryPolicy | None = None
        if settings.kind == "opportunistic":
            self.memory = MemoryPolicy(msgspec.structs.replace(node.memory, block_bytes=settings.block_bytes))
        self.dormancy = Dormancy(follows_leases=settings.follows_leases and self.memory is not None)
        self.life.inactive = not self.dormancy.usable
        self.terms = Terms(node.kv_share_max)
        self.reading: ReplicaReading | Unknown = Unknown("not_observed")
        self.override: GateMode | None = None
        self.override_tokens = 0
        """Cap that came with the override; 0 if none did."""
        self.device_closed: GateReason | None = GateReason.MEMORY_UNKNOWN if self.memory else None
        """Why the shared device forbids rollout; nothing is known of it before the first reading."""
        self.retired = False
        """The node is shutting down."""
        self.revision = 0
        self.published: GatePolicy | None = None
        self.refusals = 0
        self.last_update: WeightUpdate | None = None
        self._retry_at_ns = 0
        self._apply_began_ns = 0

    # ---- gate and budget ------------------------------------------------------------------------

    @property
    def gate_mode(self) -> GateMode:
        """What the gate is told.

        A dedicated replica harms nobody: always open, unless the operator says otherwise.  Beside serving
        the gate is closed for a replica of no use (failed, ending, or drained with nothing left in flight),
        and, whatever the operator says, while nothing is lent, the device's memory is unknown or the device
        is in trouble.
        """
        if self.memory is None:
            return GateMode.OPEN if self.override is None else self.override
        useless = self.retired or self.life.state in {ReplicaState.FAILED, ReplicaState.STOPPING}
        useless = useless or not self.dormancy.active or self.terms.closed is not None
        if useless or (self.life.draining and self._idle) or self.device_closed is not None:
            return GateMode.CLOSED
        return self._node.gate_mode if self.override is None else self.override

    @property
    def _idle(self) -> bool:
        reading = self.reading
        return isinstance(reading, ReplicaReading) and not reading.running and not reading.waiting

    def publish_gate(self, rl_step: int, now_ns: int) -> list[NodeEffect]:
        """The policy to write on the gate board, if it differs from the one that is there."""
        policy = GatePolicy(
            revision=self.revision,
            mode=int(self.gate_mode),
            token_cap=self.override_tokens or self._node.token_cap,
            kv_budget_blocks=self._limit_blocks,
            rl_step=rl_step,
            alive_until_ns=self.published.alive_until_ns if self.published else 0,
            ttft_slo_ns=self._node.ttft_slo_ns,
            tpot_slo_ns=self._node.tpot_slo_ns,
            margin_ns=self._node.margin_ns,
            closed_reason=self._closed_reason,
        )
        if policy == self.published:
            return []
        self.revision += 1
        self.published = policy._replace(
            revision=self.revision, alive_until_ns=now_ns + self._node.gate_lease_ns
        )
        self.dormancy.told(self.revision)
        self.terms.told(self.revision)
        return [PublishGate(self.settings.replica, self.published)]

    @property
    def _limit_blocks(self) -> int:
        if self.memory is None:
            return 0
        return self.terms.limit_blocks(self.memory) if self.dormancy.active else _INACTIVE_BLOCKS

    @property
    def _closed_reason(self) -> GateReason:
        if self.terms.closed is not None:
            return self.terms.closed
        if not self.dormancy.active:
            return GateReason.INACTIVE
        return self.device_closed or GateReason.CLOSED_BY_OPERATOR

    def change_activity(self, now_ns: int, *, device_free: bool) -> list[NodeEffect]:
        """Become active or inactive if that is due and nothing else is under way on the device."""
        dormancy = self.dormancy
        if dormancy.active is dormancy.wanted or not device_free:
            return []
        dormancy.begin(now_ns)
        self.life.inactive = True
        if self.life.phase is not Phase.RUNNING:
            self._activity_over()
        text = "active: takes memory and turns" if dormancy.active else "inactive: gives its KV memory back"
        code = "activated" if dormancy.active else "deactivated"
        return [Say("info", code, text, self.settings.replica)]

    def _activity_over(self) -> None:
        self.dormancy.engine_gone()
        self.life.inactive = not self.dormancy.active

    def observed(self, reading: ReplicaReading | Unknown, now_ns: int) -> list[NodeEffect]:
        """The engine's board was read: its size, and how far it obeys."""
        self.reading = reading
        overdue = self.terms.overdue(self.settings.replica, now_ns)
        if isinstance(reading, Unknown):
            return overdue
        if self.memory:
            self.memory.sized(reading.kv_total_blocks, reading.kv_budget_blocks)
        ahead = reading.policy_revision > self.revision
        refused = reading.policy_revision == self.revision and reading.limit_status in _DISOBEYED
        if ahead or refused:  # an earlier rosed wrote to this engine: number on from there
            self.revision = reading.policy_revision
            self.published = None
            return overdue
        obeyed = reading.policy_revision == self.revision and reading.limit_status == LimitStatus.APPLIED
        if self.memory and obeyed:
            self.memory.applied(now_ns)
            self.dormancy.obeyed(reading.policy_revision, now_ns)
            self.life.inactive = not self.dormancy.usable
            overdue += self.terms.obeyed(reading.policy_revision, self.settings.replica, now_ns)
        return overdue

    def memory_observed(
        self, reading: MemoryReading, now_ns: int, *, may_grow: bool, taken_bytes: int
    ) -> tuple[list[NodeEffect], int]:
        """The shared device's memory was read; also by how many bytes the budget has grown."""
        if self.memory is None:
            return [], 0
        before_blocks = self.memory.budget_blocks
        cut = self.memory.observed(reading, now_ns, may_grow=may_grow, taken_bytes=taken_bytes)
        grown_blocks = max(0, self.memory.budget_blocks - before_blocks)
        return [self._say_cut(cut)] if cut else [], grown_blocks * self.settings.block_bytes

    def set_terms(self, closed: GateReason | None, reserve_bytes: int) -> None:
        """Whether anything is lent, and what has to stay free."""
        assert self.memory is not None
        self.terms.closed = closed
        self.dormancy.suspended = self.terms.suspended
        self.memory.reserve_bytes = reserve_bytes

    def drill(self, blocks: int, now_ns: int) -> list[NodeEffect]:
        """Take some blocks for a moment, if nothing else is under way with the replica's memory."""
        memory = self.memory
        running = self.life.phase is Phase.RUNNING and self.life.applying is None and self.dormancy.usable
        if memory is None or not running or memory.state is MemoryState.PRESSURE or self.terms.drill:
            return []
        allowed_blocks = min(memory.usable_blocks, self.terms.cap_blocks(memory)) - blocks
        if blocks > 0 and allowed_blocks >= self._node.memory.budget_blocks_min:
            self.terms.drill = Drill(blocks, allowed_blocks, now_ns)
        return []

    def reclaim(self, reason: str) -> list[NodeEffect]:
        """Somebody wants the replica's memory."""
        if self.memory is None:
            why = "a dedicated replica lends no memory"
        elif not self.dormancy.active:
            why = "it is inactive and holds none"
        elif (cut := self.memory.reclaim(reason)) is not None:
            return [self._say_cut(cut)]
        elif self.memory.state is not MemoryState.NORMAL:
            why = f"its budget was cut in this RL step already ({self.memory.state.value})"
        elif not self.memory.total_blocks:
            why = "its engine has not told how many KV blocks it has"
        else:
            why = f"its budget is at the minimum of {self.memory.budget_blocks} blocks"
        return [Say("warning", "reclaim_ignored", f"nothing to reclaim: {why}", self.settings.replica)]

    def _say_cut(self, cut: Cut) -> Say:
        text = f"KV budget cut from {cut.before_blocks} to {cut.after_blocks} blocks: {cut.reason}"
        return Say("warning", "kv_budget_cut", text, self.settings.replica)

    # ---- process --------------------------------------------------------------------------------

    def ready(self, version: WeightVersion, now_ns: int, *, adopted: bool) -> bool:
        """The engine answers and runs `version`; False if the news is out of date."""
        if not self.life.ready(version, now_ns, adopted=adopted):
            return False
        self.refusals, self._retry_at_ns = 0, 0
        return True

    def exited(self, reason: str, now_ns: int, *, restart: bool) -> bool:
        """The engine's process ended; False if there was none."""
        if not self.life.exited(reason, now_ns, restart=restart):
            return False
        self.reading = Unknown("engine_gone")
        self.terms.drill = None
        self._activity_over()
        if self.memory:
            self.memory.engine_gone(now_ns)
        return True

    def retire(self, now_ns: int) -> list[NodeEffect]:
        """The node shuts down: end the engine, whoever started it."""
        self.retired = True
        return self.life.stop("shutdown", now_ns)

    def override_gate(self, mode: int | None, token_cap: int) -> list[NodeEffect]:
        """The operator forces the gate, or gives it back to the policy (None)."""
        if mode is not None and mode not in GateMode._value2member_map_:
            return [Say("warning", "gate_mode_unknown", f"{mode} is no gate mode", self.settings.replica)]
        self.override = None if mode is None else GateMode(mode)
        self.override_tokens = 0 if mode is None else max(0, token_cap)
        name = "as configured" if mode is None else self.gate_mode.name.lower()
        return [Say("info", "gate_overridden", f"gate mode is now {name}", self.settings.replica)]

    def switch(self, active: bool) -> list[NodeEffect]:
        """The operator switches it off (out of use too) or on again."""
        if self.memory is None:
            text = "a dedicated replica lends no memory: it stays active"
            return [Say("warning", "activity_ignored", text, self.settings.replica)]
        self.dormancy.switched_off = not active
        self.drain(not active)
        return []

    def drain(self, drain: bool) -> None:
        """Out of use, or back in use with a clean slate."""
        if drain:
            self.life.draining = True
        else:
            self.life.restore()
            self.refusals, self._retry_at_ns = 0, 0

    # ---- weights --------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether the engine runs and is to go where the job's versions lead."""
        return self.life.phase is Phase.RUNNING and not self.life.failed

    def can_update(self, now_ns: int) -> bool:
        """Whether the engine can be told to go to another version now."""
        return self.follows and self.life.applying is None and now_ns >= self._retry_at_ns

    def restart(self, now_ns: int) -> list[NodeEffect]:
        """Nothing on this host takes its version back in place; a fresh engine does not have it."""
        return self.life.stop("no_way_back", now_ns) if self.can_update(now_ns) else []

    def update(self, step: Staged, together: tuple[ReplicaId, ...], now_ns: int) -> list[NodeEffect]:
        """Take a step, in lock-step with those named."""
        self._apply_began_ns = now_ns
        self.life.applying = ApplyVersion(
            replica=self.settings.replica,
            version=step.version,
            base_version=self.life.held,
            path=step.path,
            abort_in_flight=self._node.abort_in_flight,
            together=together,
        )
        return [self.life.applying]

    def applied(self, version: WeightVersion, now_ns: int) -> list[NodeEffect]:
        """The engine runs `version`."""
        applying = self.life.applying
        if applying is None or applying.version != version:
            return []  # about an engine that is gone, or told twice
        duration_ms = (now_ns - self._apply_began_ns) / NS_PER_MS
        self.last_update = WeightUpdate(version, applying.base_version, duration_ms, now_ns)
        self._settle(version)
        text = f"weights went from version {applying.base_version} to {version} in {duration_ms:.0f} ms"
        return [Say("info", "weights_applied", text, self.settings.replica)]

    def refused(self, event: WeightsRefused, shelf: VersionShelf, now_ns: int) -> list[NodeEffect]:
        """The engine was not brought to the version.  What it says it holds counts, not what we thought.

        - It holds another version than we thought: the way from there is planned anew.
        - It kept its version: the files are at fault, and are fetched and verified again.
        - It did not say: it gets no turns, and is asked the same again; the second time with new files.
        - It claims the version, yet nobody vouches for its bytes, or it holds a mixture: only a restart makes
          its weights known.
        - It was held back for another replica's sake: no fault of its own.
        """
        applying = self.life.applying
        if applying is None or applying.version != event.version:
            return []
        if event.held_back:
            self.life.applying, self.life.unsure = None, False
            text = f"stays at version {applying.base_version}: {event.reason}"
            return [Say("info", "weights_held_back", text, event.replica)]
        held = event.version_held
        elsewhere = held is not None and held != applying.base_version
        if not (elsewhere and self.life.unsure):  # to learn where a silent engine had got to is no failure
            self.refusals += 1
        self.life.applying = None
        self.life.unsure = held is None
        self._retry_at_ns = now_ns + self.life.backoff_ns(self.refusals)
        text = f"version {event.version} was refused: {event.reason}"
        effects: list[NodeEffect] = [Say("warning", "weights_refused", text, event.replica)]
        if event.mixed:
            return effects + self.life.stop("weights_mixed", now_ns)
        if held == event.version:
            return effects + self.life.stop("weights_unverified", now_ns)
        if held is not None and elsewhere:
            self.life.held = held
        elif event.version < applying.base_version:
            shelf.forget_undo(applying.base_version)
        elif held is not None or self.refusals > 1:
            shelf.distrust(event.version)
        if self.refusals >= self._node.weight_attempts_max:
            self.life.fail(f"weights_refused: {event.reason}")
            text = f"gave up after {self.refusals} refusals in a row; draining and undraining it tries again"
            effects.append(Say("error", "replica_failed", text, event.replica))
        return effects

    def _settle(self, version: WeightVersion) -> None:
        self.life.held, self.life.applying, self.life.unsure = version, None, False
        self.refusals, self._retry_at_ns = 0, 0

    # ---- what others see ------------------------------------------------------------------------

    def report(self, serving_kv_used_share: float | None) -> ReplicaReport:
        """What the scheduler is told."""
        reading = self.reading if isinstance(self.reading, ReplicaReading) else None
        budget_blocks = (
            self.memory.usable_blocks if self.memory else reading.kv_total_blocks if reading else 0
        )
        return ReplicaReport(
            replica=self.settings.replica,
            kind=self.settings.kind,
            state=self.life.state.value,
            url=self.settings.url,
            model=self.settings.model,
            weight_version=self.life.held,
            updating=self.life.state is ReplicaState.UPDATING,
            gate_open=bool(reading.gate_open) if reading else None,
            kv_budget_tokens=budget_blocks * self.settings.block_tokens,
            kv_used_tokens=reading.kv_used_blocks * self.settings.block_tokens if reading else 0,
            context_tokens_max=self.settings.context_tokens_max,
            serving_kv_used_share=serving_kv_used_share if self.memory else None,
            device=self.settings.device,
            hardware=self.settings.hardware,
        )

    def gate_view(self) -> GateView:
        """The gate as the engine last reported it."""
        mode = self.gate_mode.name.lower()
        if isinstance(self.reading, Unknown):
            return GateView(open=False, reason=f"unknown: {self.reading.reason}", mode=mode)
        known = self.reading.gate_reason in GateReason._value2member_map_
        reason = GateReason(self.reading.gate_reason).name.lower() if known else "unknown: foreign_reason"
        return GateView(
            open=bool(self.reading.gate_open),
            reason=reason,
            mode=mode,
            drift=self.reading.drift_permille / 1000 if self.reading.drift_permille > 0 else None,
            margin_ms=self.reading.margin_ns / NS_PER_MS,
        )

    def memory_view(self, device: MemoryReading) -> MemoryView | None:
        """The KV budget, beside the device's memory."""
        if self.memory is None:
            return None
        sized = bool(self.memory.total_blocks)
        block_bytes = self.settings.block_bytes
        return MemoryView(
            state=self.memory.state.value,
            budget_blocks=self.memory.budget_blocks if sized else None,
            budget_bytes=self.memory.budget_blocks * block_bytes if sized and block_bytes else None,
            cuts=self.memory.cuts,
            serving_bytes=_known(device.serving_bytes),
            free_bytes=_known(device.free_bytes),
            total_bytes=_known(device.total_bytes),
            headroom_bytes=_known(device.headroom_bytes(self._node.memory.headroom_share)),
        )

    def view(self, device: MemoryReading) -> ReplicaView:
        """Everything `rose status` shows of it."""
        reading = self.reading if isinstance(self.reading, ReplicaReading) else None
        return ReplicaView(
            id=self.settings.replica,
            kind=self.settings.kind,
            state=self.life.state.value,
            reason=self.life.reason,
            url=self.settings.url,
            pid=self.life.pid,
            attempts=self.life.attempts,
            weight_version=self.life.held,
            gate=self.gate_view(),
            memory=self.memory_view(device),
            running=reading.running if reading else None,
            waiting=reading.waiting if reading else None,
            kv_used_blocks=reading.kv_used_blocks if reading else None,
            kv_total_blocks=reading.kv_total_blocks if reading else None,
            tokens=reading.tokens if reading else None,
            aborted_requests=reading.aborted_requests if reading else None,
            last_update=self.last_update,
            active=self.dormancy.usable,
            activation_ms=self.dormancy.activation_ms,
            kv_resident_bytes=_resident_bytes(reading),
        )


def _known(value: int | Unknown) -> int | None:
    return None if isinstance(value, Unknown) else value


def _resident_bytes(reading: ReplicaReading | None) -> int | None:
    return None if reading is None or reading.kv_resident_bytes < 0 else reading.kv_resident_bytes


def follow_policy(
    event: PolicyChanged, settings: NodeSettings, hosted: Iterable[HostedReplica]
) -> tuple[NodeSettings, list[NodeEffect]]:
    """Have replicas obey another policy; answers the node's settings from now on, and what to say."""
    try:
        mode = GateMode(event.mode)
    except ValueError:
        return settings, [Say("warning", "gate_mode_unknown", f"{event.mode} is no gate mode")]
    changed = msgspec.structs.replace(
        settings, gate_mode=mode, token_cap=event.token_cap, margin_ns=event.margin_ns
    )
    if changed == settings:
        return settings, []
    for replica in hosted:
        replica._node = changed
    text = f"gate mode {mode.name.lower()}, {event.token_cap} tokens a step at most"
    return changed, [Say("info", "policy_changed", text)]
