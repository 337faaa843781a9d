"""`Job`: how a trainer talks to rose-scheduler.

    with Job.create("http://127.0.0.1:7700", "grpo", model="rollout", n_rl=1, n_serving_max=1) as job:
        job.begin_step(0, required_version=0)
        job.wait_for_version(0)
        ...                         # rollouts go through the gateway, with any OpenAI client
        job.end_step(0)
        job.published(1)            # after rose.weights.Publisher committed it

Synchronous, standard library only.  All calls can be repeated safely; they are, when the connection fails.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from rose.core.forecast import Forecast
from rose.errors import ConfigError, NotFound, NotReady, RoseError, TimedOut, VersionConflict
from rose.secret import read_secret

_TIMEOUT_S = 10.0
_RETRIES = 3
_RETRY_PAUSE_S = 0.2


class JobReplica(msgspec.Struct, frozen=True):
    """One replica that the job holds."""

    replica: str
    kind: str
    """`dedicated` or `opportunistic`."""
    state: str
    weight_version: int | None
    """None: not known."""
    turns_in_flight: int
    eligible: bool
    """Takes turns of the job now."""


class JobStatus(msgspec.Struct, frozen=True):
    """A job as the scheduler sees it."""

    job: str
    model: str
    required_version: int
    rl_step: int | None
    rolling: bool
    """A step has begun and not ended."""
    turns_queued: int
    turns_in_flight: int
    replicas: tuple[JobReplica, ...]
    trajectories_stale: int = 0
    """Aborted as over-stale since the scheduler started."""

    def on_version(self, version: int) -> int:
        """How many replicas run `version` and take turns."""
        return sum(replica.eligible and replica.weight_version == version for replica in self.replicas)


class Scheduler:
    """Plain calls to the scheduler's HTTP API.

    Errors: NotFound (404), VersionConflict (409), ConfigError (any other 4xx), NotReady (unreachable, 5xx).
    """

    def __init__(self, url: str, token: str = "", *, tls_ca: str | Path = "") -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # what stands for a port is none
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"{url!r} is not the address of a scheduler", "give it as http://host:port")
        self._host, self._port = host, port
        self._tls = _trust(tls_ca) if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def url(self) -> str:
        """Where the scheduler answers."""
        return f"{'https' if self._tls else 'http'}://{self._host}:{self._port}"

    def status(self) -> dict[str, Any]:
        """The document of GET /rose/v1/status."""
        return self.call("GET", "/rose/v1/status")

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One request, sent again when the connection fails."""
        data = None if body is None else msgspec.json.encode(body)
        for attempt in range(_RETRIES):
            try:
                status, answer = self._send(method, path, data, headers or {})
                break
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(f"{self.url}: {error.verify_message}", "check tls_ca") from None
            except (OSError, http.client.HTTPException) as error:
                if attempt + 1 == _RETRIES:
                    raise NotReady(f"{self.url}: {error}", "is rose-scheduler running?") from None
                time.sleep(_RETRY_PAUSE_S * 2**attempt)
        if status >= 400:
            raise _error(status, answer, f"{method} {path}", self.url)
        return answer

    def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_TIMEOUT_S, context=self._tls
            )
        try:
            connection.request(method, path, data, {**self._headers, **headers})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        try:
            return response.status, msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            shown = text[:200].decode("utf-8", errors="replace")
            return response.status, {"error": {"message": shown, "code": "not_json"}}


def _trust(tls_ca: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(tls_ca) or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"tls_ca: {tls_ca} cannot be used: {error}") from None


class Job:
    """An RL job.  As a context manager it ends the job on the way out."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self._path = f"/rose/v1/jobs/{quote(name, safe='')}"
        self.name = name

    @classmethod
    def create(
        cls,
        url: str,
        name: str,
        *,
        model: str,
        n_rl: int = 1,
        n_serving_max: int = 1,
        staleness_max: int = 0,
        trajectories_per_replica_max: int = 16,
        unknown_version_ok: bool = False,
        trajectory_staleness_max: int | None = None,
        token_file: Path | None = None,
        tls_ca: str | Path = "",
    ) -> Self:
        """Create the job, or take up the one of that name with the same settings.

        `staleness_max` bounds how many versions a turn's weights may lag behind the required ones;
        `trajectory_staleness_max` (None: no bound) those of a trajectory's oldest tokens: beyond it the
        trajectory's turns are aborted (409, `trajectory_stale`) and it is counted.

        Raises VersionConflict when a job of that name runs with other settings.
        """
        token = read_secret(token_file, "token_file") if token_file else ""
        scheduler = Scheduler(url, token, tls_ca=tls_ca)
        terms: dict[str, Any] = {
            "job": name,
            "model": model,
            "n_rl": n_rl,
            "n_serving_max": n_serving_max,
            "staleness_max": staleness_max,
            "trajectories_per_replica_max": trajectories_per_replica_max,
            "unknown_version_ok": unknown_version_ok,
        }
        if trajectory_staleness_max is not None:  # a scheduler of a former release knows no such bound
            terms["trajectory_staleness_max"] = trajectory_staleness_max
        scheduler.call("POST", "/rose/v1/jobs", terms)
        return cls(scheduler, name)

    def status(self) -> JobStatus:
        """The job now."""
        document = self._scheduler.call("GET", self._path)
        try:
            return msgspec.convert(document, JobStatus)
        except msgspec.ValidationError as error:
            raise NotReady(f"{self._scheduler.url}: not a job's status: {error}") from None

    def forecast(self, horizon_s: float = 60) -> Forecast:
        """What the job may expect, as means over the next `horizon_s` seconds (5 to 1800).

        From how its capacity came and went in the last hour, as far as the scheduler has run; each figure
        has an interval, and the share of past stretches that such an interval held.
        """
        document = self._scheduler.call("GET", f"{self._path}/forecast?{urlencode({'horizon_s': horizon_s})}")
        try:
            return msgspec.convert(document, Forecast)
        except msgspec.ValidationError as error:
            raise NotReady(f"{self._scheduler.url}: not a forecast: {error}") from None

    def begin_step(self, rl_step: int, required_version: int) -> None:
        """Begin an RL step: from now on turns run on `required_version` (within the job's staleness)."""
        self._scheduler.call(
            "POST", f"{self._path}/steps", {"rl_step": rl_step, "required_version": required_version}
        )

    def end_step(self, rl_step: int) -> None:
        """The step's rollouts are complete."""
        self._scheduler.call("POST", f"{self._path}/steps/{rl_step}/end")

    def published(self, version: int) -> None:
        """Tell the scheduler that the relay has `version`."""
        self._scheduler.call("POST", f"{self._path}/versions", {"version": version})

    def require(self, version: int) -> None:
        """From now on turns need `version`, which the relay has: for trainers that know no steps.

        It is announced, and begins the next step, if turns do not need it already.
        """
        self._scheduler.call(
            "POST", "/update_weight_version", {"new_version": str(version)}, headers={"x-rose-job": self.name}
        )

    def wait_for_replicas(
        self, replicas: int = 1, *, timeout_s: float = 120, poll_s: float = 0.1
    ) -> JobStatus:
        """Wait until so many replicas take turns of the job, on whatever version.  Raises TimedOut."""
        due_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if sum(replica.eligible for replica in status.replicas) >= replicas:
                return status
            if time.monotonic() >= due_s:
                seen = ", ".join(f"{replica.replica} is {replica.state}" for replica in status.replicas)
                raise TimedOut(
                    f"{replicas} replicas do not take turns of {self.name} after {timeout_s:g} s",
                    seen or "the job holds no replica",
                )
            time.sleep(poll_s)

    def wait_for_version(
        self, version: int, *, replicas: int | None = None, timeout_s: float = 120, poll_s: float = 0.1
    ) -> JobStatus:
        """Wait until `replicas` of the job's replicas take turns on `version` (None: all, at least one).

        Raises TimedOut, naming what each replica does instead.
        """
        due_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            wanted = max(1, len(status.replicas)) if replicas is None else replicas
            if status.on_version(version) >= wanted:
                return status
            if time.monotonic() >= due_s:
                seen = ", ".join(
                    f"{each.replica} is {each.state} on version {each.weight_version}"
                    for each in status.replicas
                )
                raise TimedOut(
                    f"version {version} is not on {wanted} replicas after {timeout_s:g} s",
                    seen or "the job holds no replica",
                )
            time.sleep(poll_s)

    def turns(self, *, trajectory: str | None = None, logprobs: bool = False) -> Iterator[dict[str, Any]]:
        """Finished turns that carried a turn id, in order of their ends, as far back as they are kept.

        Each holds `turn_id`, `trajectory`, `choices` (with `token_ids`, and the prompt's where they were
        asked for), `weight_versions` (spans `[first, last, version]`), `seed`, `request_digest`, `attempts`.
        """
        query = {"logprobs": str(int(logprobs))} | ({"trajectory": trajectory} if trajectory else {})
        after: int | None = 0
        while after is not None:
            page = self._scheduler.call("GET", f"{self._path}/answers?{urlencode(query | {'after': after})}")
            yield from page["answers"]
            after = page["next"]

    def export(self, path: Path, *, trajectory: str | None = None, logprobs: bool = False) -> int:
        """Write `turns` to a file, one JSON object a line; how many.  It appears when it is complete."""
        part = path.with_name(f"{path.name}.part")
        count = 0
        with part.open("wb") as file:
            for turn in self.turns(trajectory=trajectory, logprobs=logprobs):
                file.write(msgspec.json.encode(turn) + b"\n")
                count += 1
        part.replace(path)
        return count

    def finish_session(self, trajectory: str) -> int:
        """The trajectory is over: the scheduler forgets its prefix and its answers; how many answers."""
        answer = self._scheduler.call(
            "POST", "/finish_session", {"session_id": trajectory}, headers={"x-rose-job": self.name}
        )
        return int(answer["answers_forgotten"])

    def end(self) -> None:
        """End the job; its replicas are free for others.  No error if it has ended already."""
        try:
            self._scheduler.call("DELETE", self._path)
        except NotFound:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _error(status: int, answer: dict[str, Any], what: str, url: str) -> RoseError:
    detail = answer.get("error")
    text = str(detail.get("message", "")) if isinstance(detail, dict) else ""
    message = f"{what}: {text or f'status {status}'}"
    kinds: dict[int, type[RoseError]] = {404: NotFound, 409: VersionConflict}
    hint = ""
    if status == 401:
        hint = "name a file with it: scheduler.token_file, or ROSE_SCHEDULER__TOKEN_FILE"
    elif status == 404 and not (isinstance(detail, dict) and detail.get("type")):
        # A gateway's errors say of which type they are; what answers like this is something else.
        hint = f"{url} is no gateway of a rose-scheduler: is it the relay, or an engine?"
    return kinds.get(status, NotReady if status >= 500 else ConfigError)(message, hint)
