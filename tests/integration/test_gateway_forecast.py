"""The forecast of a job's capacity, over HTTP, in the client and on the command line."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from gateway_world import MODEL, World, world
from test_fleet_commands import rose

from rose.client import Job
from rose.core.forecast import SAMPLE_S, CapacityHistory
from rose.errors import ConfigError, NotFound
from rose.units import NS_PER_S


def watched(made: World, minutes: float) -> None:
    """As if the scheduler had watched for so long; what it saw while all this was starting is forgotten."""
    made.scheduler.forecasts._history = CapacityHistory()
    began_ns = time.monotonic_ns()
    for number in range(int(minutes * 60 / SAMPLE_S)):
        made.scheduler.forecasts.sample(began_ns + int(number * SAMPLE_S * NS_PER_S))


async def test_a_forecast_for_trainers_and_operators(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        watched(made, 12)
        job = await asyncio.to_thread(Job.create, made.url, "job-0", model=MODEL, n_rl=2)
        forecast = await asyncio.to_thread(job.forecast)
        assert forecast.slots.expected == forecast.slots.low == forecast.slots.high == 32
        assert forecast.slots.coverage == pytest.approx(0.8)
        assert forecast.borrowed_slots.expected == 0
        assert forecast.tokens_per_s.expected is None  # nothing ran: nothing is known of the pace
        assert forecast.history_s >= 700
        longer = await asyncio.to_thread(job.forecast, 1800)
        assert (longer.slots.low, longer.slots.high, longer.slots.coverage) == (0, 48, 1)

        code, text, _ = await rose("jobs", "--forecast", "60", "--url", made.url)
        assert code == 0
        assert "32 (32 to 32, 80%)" in text
        assert "unknown" in text
        code, text, _ = await rose("jobs", "--forecast", "60", "--json", "--url", made.url)
        assert json.loads(text)[0]["forecast"]["slots"]["expected"] == 32


async def test_what_cannot_be_forecast(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for horizon in ("0", "1801", "nan", "soon", "-5"):
            status, answer = await made.get(f"/rose/v1/jobs/job-0/forecast?horizon_s={horizon}")
            assert (status, answer["error"]["param"]) == (400, "horizon_s"), horizon
        status, answer = await made.get("/rose/v1/jobs/nobody/forecast")
        assert (status, answer["error"]["code"]) == (404, "job_unknown")
        job = await asyncio.to_thread(Job.create, made.url, "job-0", model=MODEL, n_rl=1)
        with pytest.raises(ConfigError, match="horizon_s"):
            await asyncio.to_thread(job.forecast, 1)
        await asyncio.to_thread(job.end)
        with pytest.raises(NotFound):
            await asyncio.to_thread(job.forecast)
