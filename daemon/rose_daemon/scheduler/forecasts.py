"""GET /rose/v1/jobs/{job}/forecast: what a job may expect, by what this run of the scheduler saw."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
from aiohttp import web

from rose.core.cluster import ClusterMachine
from rose.core.forecast import HORIZON_S_MAX, SAMPLE_S, CapacityHistory
from rose_daemon.scheduler.errors import Shape, bad_request
from rose_daemon.scheduler.jobs import JobDesk

_HORIZON_S = 60.0


class Forecasts:
    """Watches the capacity of all jobs."""

    def __init__(self, desk: JobDesk, machine: ClusterMachine) -> None:
        self._desk = desk
        self._machine = machine
        self._history = CapacityHistory()

    def routes(self) -> list[tuple[web.RouteDef, Shape]]:
        """For `build_app`."""
        return [(web.get("/rose/v1/jobs/{job}/forecast", self.show), Shape.OPENAI)]

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample(time.monotonic_ns())
            await asyncio.sleep(SAMPLE_S)

    def sample(self, now_ns: int) -> None:
        """Note what each job may use now."""
        looks = ((job, self._machine.capacity(job)) for job in self._machine.jobs())
        self._history.note(now_ns, [(job, capacity) for job, capacity in looks if capacity is not None])

    async def show(self, http: web.Request) -> web.Response:
        """Means over the next `horizon_s` seconds (query, default 60)."""
        spec = self._desk.resolve(http.match_info["job"]).spec
        cap = spec.trajectories_per_replica_max
        forecast = self._history.forecast(
            spec.job, _horizon_s(http), (spec.n_rl + spec.n_serving_max) * cap, spec.n_serving_max * cap
        )
        document = {"job": spec.job, **msgspec.to_builtins(forecast)}
        return web.Response(body=msgspec.json.encode(document), content_type="application/json")


def _horizon_s(http: web.Request) -> float:
    text = http.query.get("horizon_s", "")
    try:
        horizon_s = float(text) if text else _HORIZON_S
    except ValueError:
        horizon_s = math.nan
    if not SAMPLE_S <= horizon_s <= HORIZON_S_MAX:
        raise bad_request(
            f"`horizon_s` must lie between {SAMPLE_S:g} and {HORIZON_S_MAX:g} seconds", param="horizon_s"
        )
    return horizon_s
