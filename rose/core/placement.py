"""Which replicas a job may use: leases.

A job asks for `n_rl` dedicated replicas and at most `n_serving_max` borrowed ones.  Borrowed ones are taken
in order of the serving engine's recent KV use, lowest first (paper, placement); a device whose use is not
known is not borrowed at all, nor is one whose use is at or above `borrow_kv_share_max`.  A serving device is
lent to at most one job, and once.

Leases are sticky: a lease that works is not moved because another device became idler, and one that would
not be granted any more because its device became busier is kept (hysteresis; the host's own gate and memory
policy protect serving meanwhile).  It ends when the job ends or shrinks, when the replica leaves, or when the
replica has been unfit (not ready, silent, drained) for `lease_grace_ns`, runs nothing, and a fit one could
take its place.

Jobs of one model share its replicas by max-min fairness.  A job above its share gives a replica up only when
another below its own has none left to take, and only after it has had it for `lease_min_ns`.  A borrowed
replica is not granted to a job that would not gain by it any more (`rose.core.switching`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rose.core.events import JobSubmitted
from rose.core.fairness import fair_shares
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
    granted_ns: int = 0


class _Pool(NamedTuple):
    """Replicas that the same jobs may use."""

    kind: str
    model: str
    version_known: bool

    def has(self, replica: Replica) -> bool:
        """Whether the replica is one of them."""
        report = replica.report
        known = report.weight_version is not None
        return (report.kind, report.model, known) == self


@dataclass(slots=True)
class Plan:
    """What changed; revocations are to be carried out first."""

    revoked: list[tuple[Lease, str]] = field(default_factory=list)
    granted: list[Lease] = field(default_factory=list)


class Around(NamedTuple):
    """What planning goes by besides the jobs."""

    replicas: Mapping[ReplicaId, Replica]
    count_on: Callable[[ReplicaId], int]
    """Turns in flight on a replica."""
    pays: Callable[[JobId], bool]
    """Whether the job would gain by one more borrowed replica now."""
    now_ns: int


class Placement:
    """The ledger of leases."""

    def __init__(self, lease_grace_ns: int, lease_min_ns: int, borrow_kv_share_max: float) -> None:
        self._lease_grace_ns = lease_grace_ns
        self._lease_min_ns = lease_min_ns
        self._borrow_kv_share_max = borrow_kv_share_max
        self.leases: dict[ReplicaId, Lease] = {}
        self._devices: dict[Device, ReplicaId] = {}
        self._held: dict[tuple[JobId, str], dict[ReplicaId, None]] = {}
        self._next_lease = 1
        self._due_ns = NEVER

    def next_deadline_ns(self) -> int:
        """When the passing of time alone may change the plan, or NEVER."""
        return self._due_ns

    def offers(self, replica: Replica) -> tuple[bool, bool, bool]:
        """What of a replica planning goes by; a change calls for a new plan."""
        return (replica.fit, self._idle_enough(replica), replica.report.weight_version is not None)

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

    def plan(self, jobs: Mapping[JobId, JobSubmitted], around: Around) -> Plan:
        """Bring the leases in line with demand and offer."""
        plan = Plan()
        self._due_ns = NEVER
        for kind in (DEDICATED, OPPORTUNISTIC):
            wanted = {
                job: quota.n_rl if kind == DEDICATED else quota.n_serving_max for job, quota in jobs.items()
            }
            for job, quota in jobs.items():
                self._shed(job, kind, quota.model, wanted[job], around, plan)
            for model in dict.fromkeys(quota.model for quota in jobs.values()):
                rivals = {job: wanted[job] for job, quota in jobs.items() if quota.model == model}
                unknowing = {job: most for job, most in rivals.items() if jobs[job].unknown_version_ok}
                # First what only some of the jobs can use, then what all of them can.
                self._share_out(_Pool(kind, model, version_known=False), unknowing, around, plan)
                self._share_out(_Pool(kind, model, version_known=True), rivals, around, plan)
        return plan

    def _share_out(self, pool: _Pool, wanted: Mapping[JobId, int], around: Around, plan: Plan) -> None:
        """Give jobs that want replicas of a pool their shares of it."""
        kind = pool.kind
        candidates = self._candidates(pool, around.replicas.values())
        held = {job: [around.replicas[name] for name in self._held.get((job, kind), ())] for job in wanted}
        fit = sum(holder.fit for holders in held.values() for holder in holders)
        spare = len({_place(candidate) for candidate in candidates})
        shares = fair_shares(wanted, fit + spare)
        gaining = [job for job in wanted if kind == DEDICATED or around.pays(job)]
        short = sum(max(0, shares[job] - len(held[job])) for job in gaining)
        if (scarce := short - spare) > 0:
            self._take_back(pool, held, shares, scarce, around, plan)
            candidates = self._candidates(pool, around.replicas.values())
        for job in wanted:
            holders = [around.replicas[name] for name in self._held.get((job, kind), ())]
            replaceable = self._replaceable(holders, around)
            if job in gaining and len(holders) - len(replaceable) < shares[job]:
                left = (candidate for candidate in candidates if candidate.id not in self.leases)
                self._fill(job, left, shares[job] - len(holders), replaceable, around.now_ns, plan)

    def _take_back(
        self,
        pool: _Pool,
        held: Mapping[JobId, list[Replica]],
        shares: Mapping[JobId, int],
        scarce: int,
        around: Around,
        plan: Plan,
    ) -> None:
        """Revoke up to `scarce` leases of jobs above their share; those that run least go first.

        Only replicas of the pool are of use to those that get them.
        """
        over = [
            holder
            for job, holders in held.items()
            for holder in sorted(holders, key=lambda holder: (around.count_on(holder.id), holder.id))[
                : max(0, len(holders) - shares[job])
            ]
            if pool.has(holder)
        ]
        for holder in sorted(over, key=lambda holder: (around.count_on(holder.id), holder.id)):
            due_ns = self.leases[holder.id].granted_ns + self._lease_min_ns
            if around.now_ns < due_ns:
                self._due_ns = min(self._due_ns, due_ns)
            elif scarce > 0:
                scarce -= 1
                self._revoke(holder.id, "fair_share", plan)

    def _shed(self, job: JobId, kind: str, model: str, wanted: int, around: Around, plan: Plan) -> None:
        """Revoke leases that the job's present terms do not cover."""
        kept = 0
        holders = [around.replicas[replica] for replica in self._held.get((job, kind), ())]
        for holder in sorted(holders, key=_best_first):
            if holder.report.model != model:
                self._revoke(holder.id, "model_changed", plan)
            elif kept == wanted:
                self._revoke(holder.id, "job_shrank", plan)
            else:
                kept += 1

    def _replaceable(self, holders: Iterable[Replica], around: Around) -> list[Replica]:
        """Holders that may give way now; notes when to look again."""
        found = []
        for holder in holders:
            if holder.unfit_since_ns is None:
                continue
            due_ns = holder.unfit_since_ns + self._lease_grace_ns
            if around.now_ns >= due_ns and around.count_on(holder.id) == 0:
                found.append(holder)
            self._due_ns = min(self._due_ns, max(due_ns, around.now_ns + self._lease_grace_ns // 4))
        return found

    def _fill(
        self,
        job: JobId,
        candidates: Iterable[Replica],
        missing: int,
        replaceable: list[Replica],
        now_ns: int,
        plan: Plan,
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
            self._grant(job, candidate, now_ns, plan)

    def _candidates(self, pool: _Pool, replicas: Iterable[Replica]) -> list[Replica]:
        fit = [
            replica
            for replica in replicas
            if pool.has(replica)
            and replica.fit
            and replica.id not in self.leases
            and not (
                replica.serving and (not self._idle_enough(replica) or _device(replica) in self._devices)
            )
        ]
        return sorted(fit, key=lambda replica: (_kv_use(replica), replica.id))

    def _idle_enough(self, replica: Replica) -> bool:
        return replica.kv_recent is not None and replica.kv_recent < self._borrow_kv_share_max

    def _grant(self, job: JobId, replica: Replica, now_ns: int, plan: Plan) -> None:
        device = _device(replica) if replica.serving else None
        lease = Lease(self._next_lease, job, replica.id, replica.node, replica.report.kind, device, now_ns)
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


def _place(replica: Replica) -> Device | ReplicaId:
    """What counts as one in the supply: two replicas on one serving device cannot both be lent."""
    return _device(replica) if replica.serving else replica.id


def _kv_use(replica: Replica) -> float:
    return 0.0 if replica.kv_recent is None else replica.kv_recent


def _best_first(replica: Replica) -> tuple[bool, float, ReplicaId]:
    """Order in which a shrinking job keeps replicas: fit ones, then idle serving devices."""
    return (not replica.fit, _kv_use(replica), replica.id)
