"""Weights through the real processes: trainer, relay, rosed, and light engines with real parameters.

A rollback needs no network, an engine that restarts needs no download, and whoever is killed, every engine
runs exactly one version that the trainer published, by digests of its live parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_rosed_process import until
from weights_site import JOB, Site

from rose import wire
from rose.cli.control import ask
from rose.errors import Exit, RoseError
from rose.units import JobId, WeightVersion


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


def test_rollback_follow_and_restart_without_the_network(site: Site) -> None:
    site.start("applier")
    for _ in range(6):
        site.check(site.publish())
    until(lambda: site.copy_version() == 6, site.explain)
    staged = site.base / "state" / "weights" / JOB
    until(lambda: sorted(path.name for path in staged.glob("v*")) == ["v3", "v4", "v5", "v6"], site.explain)
    site.stop_relay()

    site.pin(5)  # once there is a way back there are all
    site.check(5)
    done = site.rose("rollback", JOB, 4)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^2 replica\(s\) at version 4 after \d+ ms$", done.stdout, re.MULTILINE), done.stdout
    site.check(4)
    assert site.status()["job"]["pinned_version"] == 4  # type: ignore[index]
    until(lambda: site.copy_version() == 4, site.explain)

    pid = site.get("ded-0", "/rose/v1/engine")["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: site.replica("ded-0")["state"] != "ready", site.explain)
    site.check(4)
    assert site.get("ded-0", "/rose/v1/engine")["started_from"] == 4, "started from the host's copy"

    with pytest.raises(RoseError, match="no version 9"):
        ask(site.socket, wire.PinRequest(JOB, WeightVersion(9)))
    with pytest.raises(RoseError, match="does not work for job other"):
        ask(site.socket, wire.PinRequest(JobId("other"), WeightVersion(1)))
    assert site.rose("follow", JOB).returncode == 0
    site.check(6)
    assert site.rose("verify", JOB).returncode == Exit.OK


def test_a_rollback_outlives_rosed_and_holds_back_what_is_new(site: Site) -> None:
    site.start("applier")
    for _ in range(2):
        site.check(site.publish())
    until(lambda: site.copy_version() == 2, site.explain)
    site.pin(1)
    site.check(1)
    until(lambda: site.copy_version() == 1, site.explain)
    assert site.process is not None
    site.process.kill()
    site.process.wait()
    site.publish()
    site.start("applier")
    site.check(1)
    assert site.get("ded-1", "/rose/v1/engine")["started_from"] == 1
    time.sleep(0.5)
    site.check(1)
    ask(site.socket, wire.PinRequest(JOB, None))
    site.check(3)


def test_an_engine_that_hangs_holds_the_others_at_its_version(tmp_path: Path) -> None:
    """All engines of a host stage a version before one of them writes it."""
    site = Site(tmp_path, keys="weights_timeout_s = 3")
    try:
        site.start("applier")
        site.check(site.publish())
        pid = site.get("ded-1", "/rose/v1/engine")["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            version = site.publish()
            until(lambda: "weights_held_back" in site.errors.read_text(), site.explain)
            assert site.get("ded-0", "/rose/v1/weights/digests")["version"] == version - 1
        finally:
            os.kill(pid, signal.SIGCONT)
        site.check(version)
        site.check(site.publish())
    finally:
        site.end()


def test_a_late_host_takes_squashed_deltas_instead_of_the_chain(tmp_path: Path) -> None:
    site = Site(tmp_path, squash_every=4)
    try:
        for _ in range(9):
            site.publish()
        site.start("applier")
        site.check(9)
        staged = site.base / "state" / "weights" / JOB
        bases = {
            int(path.parent.name[1:]): json.loads(path.read_text())["base_version"]
            for path in staged.glob("v*/manifest.json")
        }
        assert bases == {4: 0, 8: 4, 9: 8}
        site.check(site.publish())
        until(lambda: site.copy_version() == 10, site.explain)
        pid = site.get("ded-0", "/rose/v1/engine")["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: site.replica("ded-0")["state"] != "ready", site.explain)
        site.check(10)
    finally:
        site.end()


def kill_rosed(site: Site) -> None:
    assert site.process is not None
    site.process.kill()
    site.process.wait()
    site.start("applier")


def kill_engine(site: Site) -> None:
    with contextlib.suppress(OSError):  # it may be between two lives
        os.kill(site.get("ded-1", "/rose/v1/engine")["pid"], signal.SIGKILL)


def kill_relay(site: Site) -> None:
    site.stop_relay()
    site.start_relay()


@pytest.mark.parametrize("victim", [kill_rosed, kill_engine, kill_relay])
def test_whoever_is_killed_during_an_update_engines_end_on_the_trainers_bytes(
    site: Site, victim: Callable[[Site], None]
) -> None:
    chance = np.random.default_rng(1)
    site.start("applier")
    site.check(site.publish())
    for _ in range(2):
        version = site.publish()
        time.sleep(chance.uniform(0, 0.15))
        victim(site)
        site.publisher.heal()
        site.check(version)
    site.check(site.publish())
