"""The job API's rules: what may be repeated, what contradicts, what is stored before the machine hears it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from rose.core.events import (
    ClusterEvent,
    JobEnded,
    JobPaused,
    JobStepBegan,
    JobStepEnded,
    JobSubmitted,
    VersionPublished,
)
from rose.units import JobId, WeightVersion
from rose_daemon.scheduler.errors import bad_request, conflict, not_found
from rose_daemon.scheduler.store import JobRecord, Store

_LIMITS = {
    "n_rl": (0, 4096),
    "n_serving_max": (0, 4096),
    "staleness_max": (0, 1024),
    "trajectories_per_replica_max": (1, 4096),
    "trajectory_staleness_max": (0, 1024),
}


class JobDesk:
    """All jobs.  Every change is stored first, then told to the machine; each can be sent again safely."""

    def __init__(self, store: Store, feed: Callable[[ClusterEvent], None]) -> None:
        self._store = store
        self._feed = feed
        self._records = store.jobs()

    @property
    def models(self) -> dict[str, JobId]:
        """Model names in use, each with the first job that uses it."""
        return {record.spec.model: job for job, record in reversed(self._records.items())}

    def resolve(self, name: str | None, model: str | None = None) -> JobRecord:
        """The named job, or the only one there is, or the only one of that model.

        Raises Refused (404, or 400 when it must be named).
        """
        if name is not None:
            return self._get(JobId(name))
        if len(self._records) > 1:
            of_model = [record for record in self._records.values() if record.spec.model == model]
            if len(of_model) == 1:
                return of_model[0]
            names = ", ".join(self._records)
            raise bad_request(
                f"several jobs are running: name one of {names} in the header x-rose-job",
                code="job_not_named",
            )
        for record in self._records.values():
            return record
        raise not_found("no job is running; create one with POST /rose/v1/jobs", code="job_unknown")

    def submit(self, spec: JobSubmitted) -> bool:
        """Create a job; False if this very job is there already.  Raises Refused (400, 409)."""
        if not spec.job or len(spec.job) > 200:
            raise bad_request("`job` must be a name of 1 to 200 characters", param="job")
        if not spec.model:
            raise bad_request("`model` must name the model to roll out", param="model")
        for name, (low, high) in _LIMITS.items():
            if (value := getattr(spec, name)) is not None and not low <= value <= high:
                raise bad_request(f"`{name}` must lie between {low} and {high}", param=name)
        if spec.n_rl + spec.n_serving_max == 0:
            raise bad_request("a job needs `n_rl` or `n_serving_max` above 0", param="n_rl")
        known = self._records.get(spec.job)
        if known is not None:
            if known.spec == spec:
                return False
            raise conflict(f"job {spec.job!r} is running with other settings", code="job_exists")
        self._put(JobRecord(spec))
        self._feed(spec)
        return True

    def begin_step(self, job: JobId, rl_step: int, required_version: WeightVersion) -> None:
        """Begin an RL step; a repeat changes nothing.  Raises Refused (404, 409)."""
        record = self._get(job)
        if record.rl_step == rl_step:
            if record.required_version != required_version:
                text = f"step {rl_step} began on version {record.required_version}"
                raise conflict(text, code="step_conflict")
            return
        if record.rl_step is not None and rl_step < record.rl_step:
            raise conflict(f"step {record.rl_step} has begun already", code="step_past")
        published = max(record.published_version or WeightVersion(0), required_version)
        self._put(
            msgspec.structs.replace(
                record,
                rl_step=rl_step,
                required_version=required_version,
                step_open=True,
                published_version=published,
            )
        )
        self._feed(JobStepBegan(job, rl_step, required_version))

    def end_step(self, job: JobId, rl_step: int) -> None:
        """End the present RL step; a repeat changes nothing.  Raises Refused (404, 409)."""
        record = self._get(job)
        if record.rl_step is None or rl_step > record.rl_step:
            raise conflict(f"step {rl_step} has not begun", code="step_not_begun")
        if rl_step == record.rl_step and record.step_open:
            self._put(msgspec.structs.replace(record, step_open=False))
            self._feed(JobStepEnded(job, rl_step))

    def publish(self, job: JobId, version: WeightVersion) -> None:
        """Note that the trainer committed a version.  Raises Refused (404)."""
        record = self._get(job)
        if version > (record.published_version or 0):
            self._put(msgspec.structs.replace(record, published_version=version))
            self._feed(VersionPublished(job, version))

    def pause(self, job: JobId, *, stop: bool) -> None:
        """Hold its turns back; with `stop`, those in flight too, their tokens kept.  Raises Refused (404)."""
        self._put(msgspec.structs.replace(self._get(job), paused=True))
        self._feed(JobPaused(job, paused=True, stop=stop))

    def resume(self, job: JobId) -> None:
        """Let its turns go on.  Raises Refused (404)."""
        self._put(msgspec.structs.replace(self._get(job), paused=False))
        self._feed(JobPaused(job, paused=False))

    def flush(self, job: JobId) -> None:
        """No turn finds a prefix from before this call.  Raises Refused (404)."""
        self._put(msgspec.structs.replace(self._get(job), cache_salt=f"rose-{uuid.uuid4().hex}"))

    def cache_salt(self, job: JobId) -> str:
        """What sets the job's prefixes apart from those before its last flush; empty if there was none."""
        record = self._records.get(job)
        return "" if record is None else record.cache_salt

    def move_to(self, job: JobId, version: WeightVersion) -> None:
        """From now on turns need `version`: what a trainer says that knows no steps.  Raises Refused (404).

        A repeat changes nothing.
        """
        record = self._get(job)
        self.publish(job, version)
        if record.rl_step is None or record.required_version != version:
            self.begin_step(job, 0 if record.rl_step is None else record.rl_step + 1, version)

    def end(self, job: JobId) -> None:
        """End a job.  Raises Refused (404)."""
        self._get(job)
        self._store.delete_job(job)
        del self._records[job]
        self._feed(JobEnded(job))

    def _get(self, job: JobId) -> JobRecord:
        record = self._records.get(job)
        if record is None:
            raise not_found(f"no job {job!r} is running", code="job_unknown")
        return record

    def _put(self, record: JobRecord) -> None:
        self._store.put_job(record)
        self._records[record.spec.job] = record
