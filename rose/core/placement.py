"""Which replicas a job may use: leases.

A job asks for `n_rl` dedicated replicas and at most `n_serving_max` borrowed ones.  Borrowed ones are taken
in order of the serving engine's recent KV use, lowest first (paper, placement); a device whose use is not
known is not borrowed at all.  A serving device is lent to at most one job, and once.

Leases are sticky: a lease that works is not moved because another device became idler.  It ends when the job
ends or shrinks, when the replica leaves, or when the replica has been unfit (not ready, silent, drained) for
`lease_grace_ns`, runs nothing, and a fit one could take its place.  Jobs are served in order of submission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rose.core.events import JobSubmitted
from rose.core.membership import DEDICATED, OPPORTUNISTIC, Replica
from rose.core.readings import NEVER
from rose.units import JobId, NodeId, ReplicaId

Device = tuple[NodeId, str]
"""A serving device; ids such as `cpu-0` are unique on a host only."""


class Lease(NamedTuple):
    """A replica promised to a job."""

    lease: int
    job: JobId
    replica: ReplicaId
    node: NodeId
    kind: str
    device: Device | None
    """None for a dedicated replica."""


@dataclass(slots=True)
class Plan:
    """What changed; revocations are to be carried out first."""

    revoked: list[tuple[Lease, str]] = field(default_factory=list)
    granted: list[Lease] = field(default_factory=list)


class Placement:
    """The ledger of leases."""

    def __init__(self, lease_grace_ns: int) -> None:
        self._lease_grace_ns = lease_grace_ns
        self.leases: dict[ReplicaId, Lease] = {}
        self._devices: dict[Device, ReplicaId] = {}
        self._held: dict[tuple[JobId, str], dict[ReplicaId, None]] = {}
        self._next_lease = 1
        self._due_ns = NEVER

    def next_deadline_ns(self) -> int:
        """When the passing of time alone may change the plan, or NEVER."""
        return self._due_ns

    def held_by(self, job: JobId) -> list[ReplicaId]:
        """The job's replicas, dedicated first, in order of their leases."""
        return [replica for kind in (DEDICATED, OPPORTUNISTIC) for replica in self._held.get((job, kind), ())]

    def release(self, replica: ReplicaId) -> Lease | None:
        """End the replica's lease, if it has one."""
        lease = self.leases.pop(replica, None)
        if lease is None:
            return None
        del self._held[lease.job, lease.kind][replica]
        if not self._held[lease.job, lease.kind]:
            del self._held[lease.job, lease.kind]
        if lease.device is not None:
            del self._devices[lease.device]
        return lease

    def plan(
        self,
        jobs: Mapping[JobId, JobSubmitted],
        replicas: Mapping[ReplicaId, Replica],
        count_on: Callable[[ReplicaId], int],
        now_ns: int,
    ) -> Plan:
        """Bring the leases in line with demand and offer; `count_on` tells turns in flight on a replica."""
        plan = Plan()
        self._due_ns = NEVER
        for job, quota in jobs.items():
            for kind, wanted in ((DEDICATED, quota.n_rl), (OPPORTUNISTIC, quota.n_serving_max)):
                holders = [replicas[replica] for replica in self._held.get((job, kind), ())]
                holders = self._shed(holders, quota.model, wanted, plan)
                replaceable = self._replaceable(holders, count_on, now_ns)
                if len(holders) - len(replaceable) < wanted:
                    missing = wanted - len(holders)
                    candidates = self._candidates(kind, quota.model, replicas.values())
                    self._fill(job, candidates, missing, replaceable, plan)
        return plan

    def _shed(self, holders: list[Replica], model: str, wanted: int, plan: Plan) -> list[Replica]:
        """Revoke leases that the job's present terms do not cover; answers the others."""
        kept: list[Replica] = []
        for holder in sorted(holders, key=_best_first):
            if holder.report.model != model:
                self._revoke(holder.id, "model_changed", plan)
            elif len(kept) == wanted:
                self._revoke(holder.id, "job_shrank", plan)
            else:
                kept.append(holder)
        return kept

    def _replaceable(
        self, holders: Iterable[Replica], count_on: Callable[[ReplicaId], int], now_ns: int
    ) -> list[Replica]:
        """Holders that may give way now; notes when to look again."""
        found = []
        for holder in holders:
            if holder.unfit_since_ns is None:
                continue
            due_ns = holder.unfit_since_ns + self._lease_grace_ns
            if now_ns >= due_ns and count_on(holder.id) == 0:
                found.append(holder)
            self._due_ns = min(self._due_ns, max(due_ns, now_ns + self._lease_grace_ns // 4))
        return found

    def _fill(
        self, job: JobId, candidates: Iterable[Replica], missing: int, replaceable: list[Replica], plan: Plan
    ) -> None:
        """Grant what is missing, then replace."""
        for candidate in candidates:
            if candidate.serving and _device(candidate) in self._devices:
                continue
            if missing > 0:
                missing -= 1
            elif replaceable:
                self._revoke(replaceable.pop().id, "replaced", plan)
            else:
                return
            self._grant(job, candidate, plan)

    def _candidates(self, kind: str, model: str, replicas: Iterable[Replica]) -> list[Replica]:
        fit = [
            replica
            for replica in replicas
            if replica.report.kind == kind
            and replica.report.model == model
            and replica.fit
            and replica.id not in self.leases
            and not (replica.serving and replica.report.serving_kv_used_share is None)
        ]
        return sorted(fit, key=lambda replica: (_kv_use(replica), replica.id))

    def _grant(self, job: JobId, replica: Replica, plan: Plan) -> None:
        device = _device(replica) if replica.serving else None
        lease = Lease(self._next_lease, job, replica.id, replica.node, replica.report.kind, device)
        self._next_lease += 1
        self.leases[replica.id] = lease
        self._held.setdefault((job, lease.kind), {})[replica.id] = None
        if device is not None:
            self._devices[device] = replica.id
        plan.granted.append(lease)

    def _revoke(self, replica: ReplicaId, reason: str, plan: Plan) -> None:
        lease = self.release(replica)
        assert lease is not None, f"{replica} holds no lease"
        plan.revoked.append((lease, reason))


def _device(replica: Replica) -> Device:
    """The device it borrows; a replica that names none is taken to have one of its own."""
    return (replica.node, replica.report.device or f"replica:{replica.id}")


def _kv_use(replica: Replica) -> float:
    share = replica.report.serving_kv_used_share
    return 0.0 if share is None else share


def _best_first(replica: Replica) -> tuple[bool, float, ReplicaId]:
    """Order in which a shrinking job keeps replicas: fit ones, then idle serving devices."""
    return (not replica.fit, _kv_use(replica), replica.id)
