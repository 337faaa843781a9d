"""The host's machine, scenario by scenario."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from rose.core.effects import (
    ApplyVersion,
    Effect,
    NodeEffect,
    PublishGate,
    PullVersion,
    ReportNow,
    Say,
    StartEngine,
    StopEngine,
)
from rose.core.events import (
    DeviceObserved,
    DrainRequested,
    EngineExited,
    EngineReady,
    EngineStarted,
    GateOverridden,
    MemoryObserved,
    NodeEvent,
    PinRequested,
    ReclaimRequested,
    ReplicaObserved,
    SchedulerConnected,
    SchedulerLost,
    ServingObserved,
    ShutdownRequested,
    StepBegan,
    Tick,
    UndoReady,
    VersionAvailable,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.core.memory import MemorySettings
from rose.core.node import NodeMachine, NodeSettings, NodeView
from rose.core.nodeview import ReplicaSettings, ReplicaView
from rose.core.readings import (
    NEVER,
    GateMode,
    GatePolicy,
    GateReason,
    LimitStatus,
    ReplicaReading,
    SlackReading,
    Unknown,
)
from rose.units import NS_PER_MS, NS_PER_S, JobId, NodeId, ReplicaId, WeightVersion

JOB = JobId("job-0")
OPP, DED = ReplicaId("opp"), ReplicaId("ded")
SLACK = SlackReading(**dict.fromkeys(SlackReading._fields, 0))._replace(
    ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER, kv_total_blocks=10, kv_used_blocks=4
)
BOARD = ReplicaReading(**dict.fromkeys(ReplicaReading._fields, 0))._replace(kv_total_blocks=100)

EffectT = TypeVar("EffectT", bound=Effect)


def node_settings(**changes: object) -> NodeSettings:
    common = {"url": "http://127.0.0.1:1", "model": "rollout", "block_tokens": 32, "context_tokens_max": 2048}
    fields = {
        "node": NodeId("node-0"),
        "job": JOB,
        "replicas": (
            ReplicaSettings(replica=OPP, kind="opportunistic", block_bytes=10, device="cpu-0", **common),
            ReplicaSettings(replica=DED, kind="dedicated", **common),
        ),
        "serving": "serving",
        "ttft_slo_ns": 250 * NS_PER_MS,
        "tpot_slo_ns": 60 * NS_PER_MS,
        "memory": MemorySettings(settle_ns=NS_PER_S),
        "memory_stale_ns": 1000 * NS_PER_S,
    }
    return NodeSettings(**{**fields, **changes})


class Bench:
    """A machine, a clock that moves one second an event, and what came out."""

    def __init__(self, **changes: object) -> None:
        self.machine = NodeMachine(node_settings(**changes))
        self.now_ns = 0
        self.out: list[NodeEffect] = []

    def __call__(self, *events: NodeEvent) -> list[NodeEffect]:
        self.out = []
        for event in events:
            self.now_ns += NS_PER_S
            self.out += self.machine.step(event, self.now_ns)
        return self.out

    def all(self, kind: type[EffectT]) -> list[EffectT]:
        """Effects of one kind from the latest call."""
        return [effect for effect in self.out if isinstance(effect, kind)]

    def said(self) -> list[str]:
        return [effect.code for effect in self.all(Say)]

    def policy(self, replica: ReplicaId) -> GatePolicy:
        """The one policy published for a replica in the latest call."""
        (effect,) = [each for each in self.all(PublishGate) if each.replica == replica]
        return effect.policy

    def board(self, **fields: int) -> ReplicaObserved:
        """The opportunistic engine obeying the latest policy, unless told otherwise."""
        return ReplicaObserved(
            OPP, BOARD._replace(**{"policy_revision": self.machine.replicas[OPP].revision, **fields})
        )

    @property
    def view(self) -> NodeView:
        return self.machine.view()

    def replica(self, replica: ReplicaId) -> ReplicaView:
        return next(each for each in self.view.replicas if each.id == replica)


def up(**changes: object) -> Bench:
    """A node whose two engines are ready, on version 0."""
    bench = Bench(**changes)
    bench(
        ServingObserved(SLACK, True),
        Tick(),
        EngineStarted(OPP, 11),
        EngineReady(OPP, WeightVersion(0)),
        EngineStarted(DED, 12),
        EngineReady(DED, WeightVersion(0)),
    )
    bench(bench.board(), MemoryObserved(300, 500, 1000))
    return bench


def staged(version: int, base: int | None) -> VersionStaged:
    base_version = None if base is None else WeightVersion(base)
    return VersionStaged(JOB, WeightVersion(version), base_version, f"/store/v{version}")


# ---- processes ------------------------------------------------------------------------------------


def test_the_first_tick_starts_every_replica_after_its_gate_board_was_written() -> None:
    bench = Bench()
    assert not [e for e in bench(ServingObserved(SLACK, True)) if isinstance(e, StartEngine)]
    bench = Bench()
    kinds = [type(effect) for effect in bench(Tick())]
    assert kinds == [PublishGate, PublishGate, StartEngine, StartEngine, ReportNow]
    assert bench(Tick()) == []


def test_an_engine_found_alive_is_adopted_and_not_started_again() -> None:
    bench = Bench()
    bench(EngineReady(OPP, WeightVersion(3), adopted=True), Tick())
    assert [effect.replica for effect in bench.all(StartEngine)] == [DED]
    assert bench.replica(OPP).state == "ready"
    assert bench.replica(OPP).weight_version == 3


def test_a_crashed_engine_is_started_again_and_reported_at_once() -> None:
    bench = up()
    bench(EngineExited(OPP, 139, "SIGSEGV"))
    assert bench.said() == ["engine_exited"]
    assert bench.all(ReportNow)
    assert bench.replica(OPP).state == "backoff"
    assert not bench.view.healthy
    bench(Tick(), Tick())
    assert bench.all(StartEngine) == [StartEngine(OPP, 2)]


def test_shutdown_stops_our_engines_and_starts_none() -> None:
    bench = up()
    bench(ShutdownRequested())
    assert [effect.replica for effect in bench.all(StopEngine)] == [OPP, DED]
    assert bench.policy(OPP).mode == GateMode.CLOSED
    bench(EngineExited(OPP, 0, "asked"), EngineExited(DED, 0, "asked"), *[Tick()] * 100)
    assert not bench.all(StartEngine)
    assert {each.state for each in bench.view.replicas} == {"stopped"}


def test_an_engine_that_shows_up_during_shutdown_is_stopped_too() -> None:
    bench = Bench()
    bench(ShutdownRequested(), EngineReady(OPP, WeightVersion(0), adopted=True))
    assert [effect.replica for effect in bench.all(StopEngine)] == [OPP]


def test_news_about_replicas_and_jobs_of_others_is_said_once_and_changes_nothing() -> None:
    bench, stranger = up(), ReplicaId("stranger")
    before = bench.view
    bench(
        EngineReady(stranger, WeightVersion(9)),
        ReplicaObserved(stranger, BOARD),
        WeightsApplied(stranger, WeightVersion(9)),
        DrainRequested(stranger, True),
        VersionAvailable(JobId("other"), WeightVersion(9)),
        StepBegan(JobId("other"), 5, WeightVersion(9)),
    )
    assert bench.said() == ["replica_unknown", "foreign_job"]
    assert (bench.view.replicas, bench.view.rl_step, bench.view.newest_version) == (before.replicas, 0, 0)


def test_one_engine_at_a_time_starts_on_the_shared_device() -> None:
    common = node_settings().replicas[0]
    names = [ReplicaId(name) for name in "abc"]
    lent = tuple(msgspec.structs.replace(common, replica=name) for name in names)
    bench = Bench(replicas=(*lent, node_settings().replicas[1]))
    bench(Tick())
    assert [effect.replica for effect in bench.all(StartEngine)] == [names[0], DED]
    bench(Tick(), EngineStarted(names[0], 1), Tick())
    assert not bench.all(StartEngine)
    bench(EngineExited(names[0], 1, "initial free memory, current free memory"))
    assert [effect.replica for effect in bench.all(StartEngine)] == [names[1]]
    bench(EngineStarted(names[1], 2), EngineReady(names[1], WeightVersion(0)))
    assert [effect.replica for effect in bench.all(StartEngine)] == [names[0]], (
        "its turn came after its pause"
    )
    bench(EngineStarted(names[0], 3), EngineReady(names[0], WeightVersion(0)))
    assert [effect.replica for effect in bench.all(StartEngine)] == [names[2]]


# ---- gate -----------------------------------------------------------------------------------------


def test_policies_differ_by_kind_and_are_published_only_when_they_change() -> None:
    bench = Bench()
    bench(MemoryObserved(300, 500, 1000))
    assert bench.policy(OPP).mode == GateMode.STRICT
    assert bench.policy(DED).mode == GateMode.OPEN
    assert bench.policy(OPP).alive_until_ns == bench.now_ns + NS_PER_S
    assert bench.policy(OPP)[:4] == (1, GateMode.STRICT, 512, 0)
    bench(*[Tick()] * 5, ServingObserved(SLACK._replace(waiting=3), True))
    assert not bench.all(PublishGate)


def test_the_operator_overrides_a_gate_and_takes_it_back() -> None:
    bench = up()
    bench(GateOverridden(OPP, GateMode.CLOSED))
    closed = bench.policy(OPP)
    assert closed.mode == GateMode.CLOSED
    bench(GateOverridden(OPP, None))
    assert bench.policy(OPP).mode == GateMode.STRICT
    assert bench.policy(OPP).revision == closed.revision + 1
    bench(GateOverridden(DED, GateMode.CLOSED))
    assert bench.policy(DED).mode == GateMode.CLOSED
    bench(GateOverridden(OPP, 99))
    assert bench.said() == ["gate_mode_unknown"]


def test_an_override_may_cap_steps_and_takes_the_cap_along() -> None:
    bench = up()
    bench(GateOverridden(OPP, GateMode.OPEN, 64))
    assert bench.policy(OPP)[1:3] == (GateMode.OPEN, 64)
    bench(GateOverridden(OPP, GateMode.SLACK))
    assert bench.policy(OPP)[1:3] == (GateMode.SLACK, 512)
    bench(GateOverridden(OPP, GateMode.OPEN, 64))
    bench(GateOverridden(OPP, None, 64))
    assert bench.policy(OPP)[1:3] == (GateMode.STRICT, 512)


def test_a_draining_replica_finishes_its_turns_before_its_gate_closes() -> None:
    bench = up()
    bench(bench.board(running=2), DrainRequested(OPP, True))
    assert bench.replica(OPP).state == "draining"
    assert bench.all(ReportNow)
    assert not bench.all(PublishGate)
    bench(ReplicaObserved(OPP, Unknown("board_torn")))
    assert not bench.all(PublishGate), "unknown is not idle"
    bench(bench.board(running=0))
    assert bench.policy(OPP).mode == GateMode.CLOSED
    bench(DrainRequested(OPP, False))
    assert bench.policy(OPP).mode == GateMode.STRICT
    assert bench.replica(OPP).state == "ready"


def test_a_drained_dedicated_replica_is_not_gated() -> None:
    bench = up()
    bench(DrainRequested(DED, True), ReplicaObserved(DED, BOARD))
    assert not bench.all(PublishGate)


@pytest.mark.parametrize(
    "seen",
    [
        {"policy_revision": 70},
        {"policy_revision": 70, "limit_status": LimitStatus.STALE},
        {"limit_status": LimitStatus.CONFLICT},
    ],
)
def test_an_engine_that_obeys_a_former_rosed_is_given_a_higher_revision(seen: dict[str, int]) -> None:
    bench = up()
    bench(bench.board(**seen))
    revision = bench.policy(OPP).revision
    assert revision == bench.machine.replicas[OPP].revision
    assert revision > seen.get("policy_revision", 0)
    bench(
        ReplicaObserved(
            OPP, BOARD._replace(policy_revision=revision - 1, limit_status=seen.get("limit_status", 0))
        )
    )
    assert not bench.all(PublishGate), "an old answer is not a new refusal"


# ---- memory ---------------------------------------------------------------------------------------


def test_a_reclaim_cuts_freezes_and_the_next_rl_step_thaws() -> None:
    bench = up()
    bench(ReclaimRequested(OPP, "drill"))
    assert "kv_budget_cut" in bench.said()
    assert bench.policy(OPP).kv_budget_blocks == 50
    assert bench.all(ReportNow)
    assert bench.view.memory is not None
    assert bench.view.memory.state == "pressure"
    bench(bench.board(limit_status=LimitStatus.DEFERRED))
    assert bench.view.memory.state == "pressure"
    bench(bench.board())
    assert bench.view.memory.state == "frozen"
    assert bench.view.memory.budget_bytes == 500
    bench(ReclaimRequested(OPP, "drill"))
    assert bench.said() == ["reclaim_ignored"]
    bench(MemoryObserved(300, 1000, 1000))
    assert not bench.all(PublishGate), "frozen"
    bench(StepBegan(JOB, 1, WeightVersion(0)))
    assert bench.policy(OPP).rl_step == 1
    bench(MemoryObserved(300, Unknown("nvml_missing"), 1000))
    assert bench.view.memory.budget_blocks == 50
    bench(MemoryObserved(300, 1000, 1000))
    assert bench.policy(OPP).kv_budget_blocks == 0


def test_the_same_rl_step_told_again_does_not_thaw() -> None:
    bench = up()
    bench(StepBegan(JOB, 1, WeightVersion(0)), MemoryObserved(300, 1000, 1000))
    bench(ReclaimRequested(OPP, "drill"))
    bench(bench.board(), StepBegan(JOB, 1, WeightVersion(0)), MemoryObserved(300, 1000, 1000))
    assert bench.view.memory is not None
    assert bench.view.memory.state == "frozen"


def test_an_answer_to_an_older_policy_does_not_confirm_a_cut() -> None:
    bench = up()
    before = bench.board()
    bench(ReclaimRequested(OPP, "drill"), before)
    assert bench.view.memory is not None
    assert bench.view.memory.state == "pressure"


def test_serving_in_its_headroom_cuts_the_opportunistic_replica_alone() -> None:
    bench = up()
    bench(MemoryObserved(900, 100, 1000))
    assert [(effect.replica, effect.policy.kv_budget_blocks) for effect in bench.all(PublishGate)] == [
        (OPP, 50)
    ]


def test_a_dedicated_replica_lends_no_memory() -> None:
    bench = up()
    bench(ReclaimRequested(DED, "drill"))
    assert bench.said() == ["reclaim_ignored"]
    assert not bench.all(PublishGate)
    assert bench.replica(DED).memory is None


# ---- weights --------------------------------------------------------------------------------------


def alone() -> Bench:
    """A host with one replica."""
    return up(replicas=(node_settings().replicas[0],))


def test_a_version_goes_from_the_relay_into_every_ready_engine() -> None:
    bench = up()
    bench(VersionAvailable(JOB, WeightVersion(1)))
    assert bench.all(PullVersion) == [PullVersion(JOB, WeightVersion(1), WeightVersion(0))]
    bench(VersionAvailable(JOB, WeightVersion(1)), Tick())
    assert not bench.all(PullVersion), "on its way"
    bench(staged(1, 0))
    assert bench.all(ApplyVersion) == [
        ApplyVersion(each, WeightVersion(1), WeightVersion(0), "/store/v1", True, (OPP, DED))
        for each in (OPP, DED)
    ]
    assert bench.replica(OPP).state == "updating"
    assert all(report.updating for report in bench.machine.reports())
    bench(WeightsApplied(OPP, WeightVersion(1)))
    assert bench.all(ReportNow)
    seen = bench.replica(OPP)
    assert (seen.state, seen.weight_version) == ("ready", 1)
    assert seen.last_update is not None
    assert seen.last_update.duration_ms == 1000
    assert bench.replica(DED).weight_version == 0


def test_versions_are_applied_strictly_in_order_one_at_a_time() -> None:
    bench = up()
    bench(staged(2, 1), staged(3, 2))
    assert not bench.all(ApplyVersion)
    bench(staged(1, 0))
    assert {effect.version for effect in bench.all(ApplyVersion)} == {1}
    for version in (1, 2):
        bench(WeightsApplied(OPP, WeightVersion(version)))
        assert [(e.replica, e.version, e.base_version) for e in bench.all(ApplyVersion)] == [
            (OPP, version + 1, version)
        ]


def test_an_engine_that_restarted_on_version_0_catches_up_through_the_chain() -> None:
    bench = up()
    bench(staged(1, 0), WeightsApplied(OPP, WeightVersion(1)), WeightsApplied(DED, WeightVersion(1)))
    bench(EngineExited(OPP, 1, "crashed"), Tick(), Tick(), EngineReady(OPP, WeightVersion(0)))
    assert [(e.replica, e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(OPP, 1, 0)]


def test_an_engine_that_restarted_on_version_0_catches_up_through_an_anchor() -> None:
    bench = up()
    bench(staged(7, None))
    assert [(e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(7, 0), (7, 0)]


def test_an_update_told_twice_or_by_an_engine_that_is_gone_changes_nothing() -> None:
    bench = up()
    bench(WeightsApplied(OPP, WeightVersion(5)))
    assert bench.replica(OPP).weight_version == 0
    bench(staged(1, 0), EngineExited(OPP, 1, "crashed"), WeightsApplied(OPP, WeightVersion(1)))
    assert bench.replica(OPP).state == "backoff"
    assert bench.replica(OPP).weight_version == 0


def test_refused_files_are_fetched_again_and_the_replica_fails_after_three_refusals() -> None:
    bench = up(replicas=(node_settings().replicas[0],))
    refusal = WeightsRefused(OPP, WeightVersion(1), WeightVersion(0), "corrupt_delta")
    bench(staged(1, 0))
    for _ in range(2):
        bench(refusal)
        assert bench.said() == ["weights_refused"]
        assert bench.all(PullVersion), "the files are fetched and verified again"
        bench(staged(1, 0), *[Tick()] * 4)
        assert len(bench.all(ApplyVersion)) == 1
    bench(refusal)
    assert bench.said() == ["weights_refused", "replica_failed"]
    assert bench.replica(OPP).state == "failed"
    assert bench.replica(OPP).reason == "weights_refused: corrupt_delta"
    assert bench.policy(OPP).mode == GateMode.CLOSED
    assert not bench.view.healthy
    bench(staged(1, 0), *[Tick()] * 50)
    assert not bench.all(ApplyVersion)
    bench(DrainRequested(OPP, False))
    assert len(bench.all(ApplyVersion)) == 1, "the operator put it back in use"


def test_what_the_engine_says_it_holds_counts() -> None:
    bench = alone()
    bench(staged(1, 0), staged(2, 1), WeightsApplied(OPP, WeightVersion(1)))
    assert bench.replica(OPP).weight_version == 1
    bench(WeightsRefused(OPP, WeightVersion(2), WeightVersion(0), "wrong_base"))
    assert bench.replica(OPP).weight_version == 0
    bench(*[Tick()] * 3)
    assert [(e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(1, 0)]


def test_an_engine_that_did_not_answer_gets_no_turns_and_is_asked_the_same_again() -> None:
    bench = alone()
    bench(staged(1, 0))
    silence = WeightsRefused(OPP, WeightVersion(1), None, "timeout")
    bench(silence)
    assert bench.replica(OPP).state == "updating", "nobody knows which weights it runs"
    bench(*[Tick()] * 3)
    assert [(e.replica, e.version) for e in bench.all(ApplyVersion)] == [(OPP, 1)]
    assert not bench.all(PullVersion), "nothing is wrong with the files, as far as is known"
    bench(silence)
    assert bench.all(PullVersion), "or is there?"
    bench(staged(1, 0), *[Tick()] * 4, WeightsApplied(OPP, WeightVersion(1)))
    assert bench.replica(OPP).state == "ready"


def test_learning_where_a_silent_engine_had_got_to_is_no_failure() -> None:
    """Found by the world test (seed 414684): two lost answers, then an anchor tried from the wrong base."""
    bench = alone()
    bench(staged(1, 0))
    for _ in range(2):
        bench(WeightsRefused(OPP, WeightVersion(1), None, "timeout"), *[Tick()] * 5)
    bench(staged(2, None))
    assert [(e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(2, 0)]
    bench(WeightsRefused(OPP, WeightVersion(2), WeightVersion(1), "wrong_base"), *[Tick()] * 5)
    assert [(e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(2, 1)]
    assert bench.replica(OPP).state == "updating"


def test_an_engine_on_weights_that_nobody_vouches_for_is_restarted() -> None:
    """Digests differed after the update; asked again, the engine says that it has the version already."""
    bench = alone()
    bench(staged(1, 0))
    bench(WeightsRefused(OPP, WeightVersion(1), None, "digest_mismatch"), *[Tick()] * 3)
    bench(WeightsRefused(OPP, WeightVersion(1), WeightVersion(1), "wrong_base"))
    assert bench.all(StopEngine) == [StopEngine(OPP, 10 * NS_PER_S, "weights_unverified")]
    bench(EngineExited(OPP, 0, "asked"), Tick(), Tick(), EngineReady(OPP, WeightVersion(0)))
    assert [(e.version, e.base_version) for e in bench.all(ApplyVersion)] == [(1, 0)]


def test_replicas_on_one_version_go_to_the_next_together_or_not_at_all() -> None:
    bench = up()
    bench(staged(1, 0))
    assert {effect.together for effect in bench.all(ApplyVersion)} == {(OPP, DED)}
    bench(
        WeightsRefused(OPP, WeightVersion(1), WeightVersion(0), "corrupt_delta"),
        WeightsRefused(DED, WeightVersion(1), WeightVersion(0), "another cannot", held_back=True),
    )
    assert bench.said() == ["weights_refused", "weights_held_back"]
    assert bench.replica(DED).state == "ready", "it was held back by no fault of its own"
    assert not bench.all(ApplyVersion), "it waits for the one that has to wait before it is asked again"
    bench(staged(1, 0), *[Tick()] * 4)
    assert {(effect.replica, effect.together) for effect in bench.all(ApplyVersion)} == {
        (OPP, (OPP, DED)),
        (DED, (OPP, DED)),
    }


def test_a_replica_that_never_follows_is_given_up_and_the_others_go_on() -> None:
    bench = up()
    bench(staged(1, 0))
    for _ in range(3):
        bench(WeightsRefused(OPP, WeightVersion(1), WeightVersion(0), "corrupt_delta"))
        bench(WeightsRefused(DED, WeightVersion(1), WeightVersion(0), "another cannot", held_back=True))
        bench(staged(1, 0), *[Tick()] * 20)
    assert bench.replica(OPP).state == "failed"
    assert {(effect.replica, effect.together) for effect in bench.all(ApplyVersion)} == {(DED, ())}


def test_a_replica_whose_engine_is_gone_holds_nobody_back() -> None:
    bench = up()
    bench(staged(1, 0))
    bench(EngineExited(OPP, 1, "crashed"))
    bench(WeightsRefused(DED, WeightVersion(1), WeightVersion(0), "another cannot", held_back=True))
    assert {(effect.replica, effect.together) for effect in bench.all(ApplyVersion)} == {(DED, ())}
    bench(WeightsApplied(DED, WeightVersion(1)), Tick(), Tick(), EngineReady(OPP, WeightVersion(0)))
    assert {(effect.replica, effect.together) for effect in bench.all(ApplyVersion)} == {(OPP, ())}


def test_an_engine_on_a_mixture_of_weights_is_restarted() -> None:
    bench = up()
    bench(staged(1, 0))
    bench(WeightsRefused(OPP, WeightVersion(1), None, "weights_mixed", mixed=True))
    assert [(e.replica, e.reason) for e in bench.all(StopEngine)] == [(OPP, "weights_mixed")]
    bench(EngineExited(OPP, 0, "asked"), Tick(), Tick(), EngineReady(OPP, WeightVersion(0)))
    bench(WeightsRefused(DED, WeightVersion(1), WeightVersion(0), "another cannot", held_back=True))
    assert {effect.together for effect in bench.all(ApplyVersion)} == {(OPP, DED)}


def test_the_way_is_chosen_once_all_versions_are_known() -> None:
    """Or a host that comes late would begin with the chain, however much shorter another way is."""
    bench = up()
    versions = [
        VersionAvailable(JOB, WeightVersion(each), WeightVersion(each - 1), nbytes=100, more=True)
        for each in range(1, 5)
    ]
    squashed = VersionAvailable(JOB, WeightVersion(4), WeightVersion(0), nbytes=150, squashed=True)
    bench(*versions, squashed)
    assert bench.all(PullVersion) == [PullVersion(JOB, WeightVersion(4), WeightVersion(0), squashed=True)]


def test_versions_are_fetched_even_if_no_more_is_told_after_all() -> None:
    bench = up()
    bench(VersionAvailable(JOB, WeightVersion(1), WeightVersion(0), more=True))
    assert not bench.all(PullVersion)
    bench(Tick())
    assert bench.all(PullVersion) == [PullVersion(JOB, WeightVersion(1), WeightVersion(0))]


def test_a_version_that_cannot_be_staged_is_tried_again() -> None:
    bench = up()
    bench(VersionAvailable(JOB, WeightVersion(1)))
    bench(VersionStageFailed(JOB, WeightVersion(1), "relay_gone"))
    assert bench.said() == ["stage_failed"]
    assert not bench.all(PullVersion)
    bench(Tick())
    assert bench.all(PullVersion)


def test_versions_that_lead_nowhere_are_said_once() -> None:
    bench = up()
    bench(staged(3, 2), *[Tick()] * 5)
    assert bench.said() == ["weights_no_path", "weights_no_path"]
    bench(staged(4, 4))
    assert bench.said() == ["version_implausible"]


def test_requests_in_flight_are_kept_where_staleness_allows() -> None:
    bench = up(abort_in_flight=False)
    bench(staged(1, 0))
    assert not any(effect.abort_in_flight for effect in bench.all(ApplyVersion))


# ---- what others see ------------------------------------------------------------------------------


def test_trouble_with_serving_is_said_at_its_edges() -> None:
    bench = up()
    gone = ServingObserved(Unknown("owner_gone", 5 * NS_PER_S), True)
    bench(gone, gone, gone)
    assert bench.said() == ["serving_unknown"]
    assert bench.view.serving.state == "unknown"
    assert bench.view.serving.reason == "owner_gone age=5.0s"
    assert not bench.view.healthy
    assert [(s.signal, s.reason, s.age_ms) for s in bench.view.unknown if "slack" in s.signal] == [
        ("serving.slack", "owner_gone", 5000)
    ]
    bench(ServingObserved(SLACK, False))
    assert bench.said() == ["serving_unhealthy"]
    bench(ServingObserved(SLACK, Unknown("probe_pending")))
    assert bench.view.serving.state == "unknown"
    bench(ServingObserved(SLACK, True), ServingObserved(SLACK._replace(running=1), True))
    assert bench.said() == ["serving_seen"]
    assert bench.view.serving.state == "busy"


def test_a_node_without_serving_is_healthy_without_it() -> None:
    bench = Bench(serving="", replicas=(node_settings().replicas[1],))
    bench(Tick(), EngineReady(DED, WeightVersion(0)))
    assert bench.view.healthy
    assert bench.view.serving.state == "none"
    assert bench.view.gate is None
    assert bench.view.memory is None


def test_unknown_memory_is_said_once() -> None:
    bench = up()
    unknown = MemoryObserved(Unknown("nvml_missing"), Unknown("nvml_missing"), Unknown("nvml_missing"))
    bench(unknown, unknown)
    assert bench.said() == ["memory_unknown"]
    assert {signal.reason for signal in bench.view.unknown if "memory" in signal.signal} == {"nvml_missing"}
    bench(MemoryObserved(300, 500, 1000))
    assert bench.said() == ["memory_seen"]


@pytest.mark.parametrize("part", ["free_bytes", "total_bytes", "both"])
@pytest.mark.parametrize("mode", list(GateMode))
def test_unknown_memory_closes_the_gate_whatever_its_mode(part: str, mode: GateMode) -> None:
    bench = up(gate_mode=mode)
    bench(GateOverridden(OPP, int(mode)))
    why = Unknown("nvml_not_supported")
    free: int | Unknown = why if part in {"free_bytes", "both"} else 500
    total: int | Unknown = why if part in {"total_bytes", "both"} else 1000
    bench(MemoryObserved(300, free, total))
    published = bench.machine.replicas[OPP].published
    assert published is not None
    assert (published.mode, published.closed_reason) == (GateMode.CLOSED, GateReason.MEMORY_UNKNOWN)
    assert "admission" in next(each.blocks for each in bench.view.unknown if "memory" in each.signal)
    assert bench.machine.replicas[DED].gate_mode is GateMode.OPEN, "nobody else's memory"
    bench(MemoryObserved(300, 500, 1000))
    assert bench.machine.replicas[OPP].gate_mode is mode


def test_a_gate_is_closed_before_the_memory_was_ever_read() -> None:
    bench = Bench()
    bench(ServingObserved(SLACK, True), Tick())
    assert bench.policy(OPP).closed_reason == GateReason.MEMORY_UNKNOWN
    assert bench.said() == [], "starting up is no fault"


def test_a_memory_reader_that_hangs_closes_the_gate() -> None:
    bench = up(memory_stale_ns=5 * NS_PER_S)
    bench(*[Tick()] * 5)
    assert not bench.all(PublishGate)
    bench(Tick())
    assert bench.policy(OPP).closed_reason == GateReason.MEMORY_UNKNOWN
    assert bench.said() == ["memory_unknown"]
    (signal, *_) = [each for each in bench.view.unknown if each.signal == "memory.free_bytes"]
    assert (signal.reason, signal.age_ms) == ("memory_stale", 6000)
    bench(MemoryObserved(300, 500, 1000))
    assert bench.policy(OPP).mode == GateMode.STRICT


def test_a_budget_does_not_grow_while_nobody_knows_whose_the_memory_is() -> None:
    bench = up()
    bench(ReclaimRequested(OPP, "drill"), bench.board())
    bench(bench.board(), StepBegan(JOB, 1, WeightVersion(0)))
    for _ in range(3):
        bench(MemoryObserved(700, 1000, 1000, attributed=False))
        assert bench.view.memory is not None
        assert bench.view.memory.budget_blocks == 50
    assert bench.machine.replicas[OPP].gate_mode is GateMode.STRICT, "what is free is known"
    assert [each.reason for each in bench.view.unknown if each.signal == "memory.attribution"]
    bench(MemoryObserved(300, 1000, 1000))
    assert bench.view.memory.budget_blocks == 100


def test_trouble_of_the_device_closes_the_gate_and_is_said_once() -> None:
    bench = up()
    trouble = DeviceObserved("gpu_access_lost", advice="recreate the container")
    bench(trouble, trouble)
    assert bench.said() == ["gpu_access_lost"]
    assert bench.policy(OPP).closed_reason == GateReason.DEVICE_TROUBLE
    assert (bench.view.device_trouble, bench.view.healthy) == ("gpu_access_lost", False)
    assert bench.replica(OPP).state == "ready", "it may come back"
    bench(DeviceObserved(""))
    assert bench.said() == ["device_well"]
    assert bench.policy(OPP).mode == GateMode.STRICT


def test_a_lost_device_drains_what_runs_on_it() -> None:
    bench = up()
    bench(DeviceObserved("gpu_lost", drains=True, advice="reboot"))
    assert (bench.replica(OPP).state, bench.replica(DED).state) == ("draining", "ready")
    assert bench.all(ReportNow), "the scheduler is told at once"
    bench(DrainRequested(OPP, False), DeviceObserved("gpu_lost", drains=True))
    assert bench.replica(OPP).state == "ready", "the operator's word stands"
    assert bench.machine.replicas[OPP].gate_mode is GateMode.CLOSED


def test_reports_carry_what_the_scheduler_routes_by() -> None:
    bench = up()
    bench(bench.board(gate_open=1, kv_used_blocks=3))
    opp, ded = bench.machine.reports()
    assert (opp.state, opp.kind, opp.gate_open, opp.device) == ("ready", "opportunistic", True, "cpu-0")
    assert (opp.kv_budget_tokens, opp.kv_used_tokens) == (3200, 96)
    assert opp.serving_kv_used_share == 0.4
    assert (ded.kind, ded.gate_open, ded.serving_kv_used_share) == ("dedicated", None, None)
    bench(ReplicaObserved(OPP, Unknown("board_torn")))
    assert bench.machine.reports()[0].gate_open is None


def test_the_gate_is_shown_as_the_engine_reports_it() -> None:
    bench = up()
    bench(bench.board(gate_reason=GateReason.SERVING_RUNNING))
    assert bench.view.gate is not None
    assert (bench.view.gate.open, bench.view.gate.reason) == (False, "serving_running")
    bench(bench.board(gate_reason=77))
    assert bench.view.gate.reason == "unknown: foreign_reason"
    bench(ReplicaObserved(OPP, Unknown("board_missing")))
    assert (bench.view.gate.open, bench.view.gate.reason) == (False, "unknown: board_missing")


def test_slack_is_shown_as_time_left() -> None:
    bench = up()
    bench(ServingObserved(SLACK._replace(running=1, ttft_deadline_ns=bench.now_ns + 2 * NS_PER_S), True))
    assert bench.view.serving.ttft_slack_ms == 1000
    assert bench.view.serving.tpot_slack_ms is None


def test_drift_of_the_latency_models_is_shown() -> None:
    bench = up()
    assert bench.view.serving.drift is None
    bench(ServingObserved(SLACK._replace(drift_permille=1300), True))
    bench(bench.board(drift_permille=750, margin_ns=4 * NS_PER_MS))
    assert bench.view.serving.drift == 1.3
    gate = next(replica.gate for replica in bench.view.replicas if replica.id == OPP)
    assert (gate.drift, gate.margin_ms) == (0.75, 4)


def test_the_scheduler_comes_and_goes_and_replicas_stay() -> None:
    bench = up()
    bench(SchedulerLost())
    assert bench.said() == [], "it was not there"
    bench(SchedulerConnected("s1"), SchedulerLost(), SchedulerLost())
    assert bench.said() == ["scheduler_connected", "scheduler_lost"]
    assert bench.view.scheduler_session is None
    assert bench.view.healthy


def test_a_clock_that_runs_backwards_stands_still() -> None:
    bench = up()
    bench.machine.step(Tick(), 0)
    assert bench.view.now_ns == bench.now_ns


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_attempts_max": 0},
        {"gate_lease_ns": 0},
        {"replicas": (node_settings().replicas[0], node_settings().replicas[0])},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|unique"):
        node_settings(**changes)


# ---- versions taken back ---------------------------------------------------------------------------


def on_version_2() -> Bench:
    """Both engines on version 2, with the ways back to 0."""
    bench = up()
    for version in (1, 2):
        bench(staged(version, version - 1))
        bench(*(WeightsApplied(replica, WeightVersion(version)) for replica in (OPP, DED)))
        bench(UndoReady(JOB, WeightVersion(version - 1), WeightVersion(version), f"/undo/v{version}"))
    return bench


def test_a_pin_takes_engines_back_step_by_step_and_holds_them_there() -> None:
    bench = on_version_2()
    bench(PinRequested(JOB, WeightVersion(0)))
    assert bench.said() == ["weights_pinned"]
    assert bench.all(ApplyVersion) == [
        ApplyVersion(replica, WeightVersion(1), WeightVersion(2), "/undo/v2", True, (OPP, DED))
        for replica in (OPP, DED)
    ]
    assert bench.replica(OPP).state == "updating"
    bench(WeightsApplied(OPP, WeightVersion(1)), WeightsApplied(DED, WeightVersion(1)))
    assert {effect.path for effect in bench.all(ApplyVersion)} == {"/undo/v1"}
    bench(WeightsApplied(OPP, WeightVersion(0)), WeightsApplied(DED, WeightVersion(0)))
    bench(VersionAvailable(JOB, WeightVersion(3)), *[Tick()] * 5)
    assert not bench.all(ApplyVersion)
    assert not bench.all(PullVersion)
    assert [replica.weight_version for replica in bench.view.replicas] == [0, 0]
    assert (bench.view.pinned_version, bench.view.newest_version) == (0, 3)
    assert bench.view.healthy
    bench(PinRequested(JOB, None))
    assert bench.said() == ["weights_follow"]
    assert {effect.path for effect in bench.all(ApplyVersion)} == {"/store/v1"}


def test_an_update_under_way_when_the_pin_comes_is_taken_back_too() -> None:
    bench = on_version_2()
    bench(staged(3, 2))
    assert bench.all(ApplyVersion)
    bench(PinRequested(JOB, WeightVersion(2)), UndoReady(JOB, WeightVersion(2), WeightVersion(3), "/undo/v3"))
    assert not bench.all(ApplyVersion)
    bench(WeightsApplied(OPP, WeightVersion(3)))
    assert bench.all(ApplyVersion) == [
        ApplyVersion(OPP, WeightVersion(2), WeightVersion(3), "/undo/v3", True)
    ]


def test_an_engine_with_no_way_back_is_started_afresh() -> None:
    bench = up()
    bench(staged(1, 0), WeightsApplied(OPP, WeightVersion(1)), WeightsApplied(DED, WeightVersion(1)))
    bench(PinRequested(JOB, WeightVersion(0)))
    assert {effect.reason for effect in bench.all(StopEngine)} == {"no_way_back"}


def test_a_refused_way_back_is_not_tried_again() -> None:
    bench = on_version_2()
    bench(PinRequested(JOB, WeightVersion(1)))
    bench(WeightsRefused(OPP, WeightVersion(1), WeightVersion(2), "wrong_base"))
    bench(WeightsRefused(DED, WeightVersion(1), WeightVersion(2), "another cannot", held_back=True))
    bench(*[Tick()] * 200)
    assert OPP in {effect.replica for effect in bench.all(StopEngine)}
    bench(EngineExited(OPP, 0, "asked"), *[Tick()] * 200)
    bench(EngineReady(OPP, WeightVersion(0)))
    assert {effect.path for effect in bench.all(ApplyVersion)} == {"/store/v1"}


def test_pins_that_make_no_sense_change_nothing() -> None:
    bench = on_version_2()
    bench(
        PinRequested(JOB, WeightVersion(-1)),
        PinRequested(JobId("other"), WeightVersion(0)),
        UndoReady(JOB, WeightVersion(3), WeightVersion(3), "/undo"),
    )
    assert bench.said() == ["version_implausible", "foreign_job", "version_implausible"]
    assert bench.view.pinned_version is None
