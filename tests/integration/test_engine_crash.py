"""SIGKILL at seeded moments around a real vLLM engine: each time it ends on exactly one version.

The victims are the real processes: the trainer's publisher, the relay, rosed (which pulls, decodes and moves
the host's copy), and one of the engine's own processes (which verify and write).  Live parameters are asked
for their digests all the while, and must always be those of a version that the trainer made.
`make crash` kills twelve times; the usual run three times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from victims import timed, victim
from weights_site import JOB, Site

from rose.units import WeightVersion
from rose.weights import Publisher
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.local import RelayClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

POINTS = int(os.environ.get("ROSE_ENGINE_CRASH_POINTS", "3"))
"""Kills in all."""
REPLICA = "ded-0"
START_S = 300
"""An engine that was killed is up again within this time, on a busy machine."""
MOMENT_S = 0.6
"""Somewhat more than an update takes from `publish` to verified digests."""


@pytest.fixture
def site(tmp_path: Path, demo_models: Any) -> Iterator[Site]:
    made = Site(
        tmp_path,
        demo_models.rollout,
        replicas=(REPLICA,),
        keys="engine_start_timeout_s = 290",
        replica_keys="kv_blocks = 80",
        keep=4 * POINTS + 8,
    )
    yield made
    made.end()


def resumed(site: Site) -> Publisher:
    """A trainer that goes on where a former one stopped."""
    relay = BlockingRelay(RelayClient.from_config(site.relay_config, timeout_s=60))
    return Publisher.resume(relay, JOB, site.states[0], keep=site.keep)


def kill_publisher(site: Site, chance: random.Random) -> int:
    """While it publishes; what became of the version is for the relay to say."""
    version = site.step()

    def publish() -> None:
        with resumed(site) as mine:
            mine.publish(WeightVersion(version), site.states[version])

    victim(publish, chance.uniform(0, 1.1 * timed(lambda: resumed(site).close()) + 0.2))
    site.publisher.close()
    site.publisher = resumed(site)
    assert site.publisher.version in {version - 1, version}
    del site.states[site.publisher.version + 1 :]
    return site.publisher.version


def kill_relay(site: Site, chance: random.Random) -> int:
    version = site.publish()
    time.sleep(chance.uniform(0, MOMENT_S))
    site.stop_relay()
    site.start_relay()
    site.publisher.heal()
    return version


def kill_rosed(site: Site, chance: random.Random) -> int:
    version = site.publish()
    time.sleep(chance.uniform(0, MOMENT_S))
    assert site.process is not None
    site.process.kill()
    site.process.wait()
    site.start("vllm")
    return version


def kill_engine(site: Site, chance: random.Random) -> int:
    about = site.get(REPLICA, "/rose/v1/engine")
    pids = [about["api_server"]["pid"], about["core"]["pid"], *(each["pid"] for each in about["workers"])]
    version = site.publish()
    time.sleep(chance.uniform(0, MOMENT_S))
    os.kill(chance.choice(pids), signal.SIGKILL)
    return version


VICTIMS: tuple[Callable[[Site, random.Random], int], ...] = (
    kill_publisher,
    kill_engine,
    kill_relay,
    kill_rosed,
)


def test_whoever_is_killed_the_engine_ends_on_exactly_one_version(site: Site) -> None:
    chance = random.Random(20260506)
    site.start("vllm")
    site.check(0, START_S)
    site.check(site.publish(), START_S)
    for point in range(POINTS):
        kill = VICTIMS[point % len(VICTIMS)]
        before = len(site.states) - 1
        began = time.monotonic()
        version = kill(site, chance)
        assert version in {before, before + 1}
        site.check(version, START_S)
        site.check(site.publish(), START_S)
        print(f"point {point}: {kill.__name__}, whole again after {time.monotonic() - began:.1f} s")
