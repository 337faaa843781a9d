"""Stateful deltas through the real processes: taken while rosed remembers, done without when it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_rosed_process import until
from weights_site import JOB, Site

from rose import wire
from rose.cli.control import ask


class SteadySite(Site):
    """A trainer that moves the same weights again and again, so that what changed before tells most."""

    def step(self) -> int:
        moved = {name: bits.copy() for name, bits in self.states[-1].items()}
        rng = np.random.default_rng(0)
        for bits in moved.values():
            bits.words[rng.random(bits.words.size) < 0.02] ^= 1
        self.states.append(moved)
        return len(self.states) - 1

    def came_as(self, version: int) -> str:
        """The job under which a staged version travelled."""
        path = self.base / "state" / "weights" / JOB / f"v{version}" / "manifest.json"
        return str(json.loads(path.read_text())["job"])

    def kill_rosed(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.start("applier")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SteadySite]:
    made = SteadySite(tmp_path, keys="weights_stateful = true", stateful=True)
    yield made
    made.end()


def test_engines_follow_by_stateful_deltas_through_a_rollback_and_a_kill(site: SteadySite) -> None:
    site.start("applier")
    for version in (1, 2, 3):
        assert site.publish() == version
        site.check(version)
        assert site.came_as(version) == (JOB if version == 1 else f"{JOB}.stateful")
    until(lambda: site.copy_version() == 3, site.explain)
    site.pin(2)
    site.check(2)
    ask(site.socket, wire.PinRequest(JOB, None))
    site.check(3)
    site.check(site.publish())
    assert site.came_as(4) == f"{JOB}.stateful", "a rollback forgets nothing"
    site.kill_rosed()
    site.check(site.publish())
    assert site.came_as(5) == JOB, "what version 4 changed is not known any more"
    site.check(site.publish())
