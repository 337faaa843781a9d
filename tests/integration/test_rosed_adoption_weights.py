"""Engines that outlived their rosed keep their weights only if the relay vouches for them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rosed_adoption import engines
from test_rosed_process import LIMIT_S, running, until
from weights_site import Site

KEYS = "adopt_grace_s = 240"


def over(site: Site) -> Iterator[Site]:
    yield site
    left = engines(site)
    site.end()
    for pid in running(left):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from over(Site(tmp_path, replicas=("ded-0",), keys=KEYS))


def killed_and_started(site: Site) -> tuple[int, int]:
    """Pid of the warden before and after."""
    before = int(site.replica("ded-0")["pid"])
    assert site.process
    site.process.kill()
    site.process.wait()
    site.start("applier")
    until(lambda: site.replica("ded-0")["state"] == "ready", site.explain, LIMIT_S)
    return before, int(site.replica("ded-0")["pid"])


def test_an_adopted_engine_goes_on_from_the_version_it_holds(site: Site) -> None:
    site.start("applier")
    site.check(0)
    site.check(site.publish())
    before, after = killed_and_started(site)
    assert after == before, site.explain()
    assert site.replica("ded-0")["weight_version"] == 1
    site.check(site.publish())
    assert site.replica("ded-0")["pid"] == before
    assert site.process
    site.process.terminate()
    assert site.process.wait(60) == 0
    assert running([before]) == []


def test_an_engine_whose_version_nobody_vouches_for_is_started_afresh(site: Site) -> None:
    site.start("applier")
    site.check(0)
    site.check(site.publish())
    site.stop_relay()
    before, after = killed_and_started(site)
    assert after != before
    assert "version_unknown" in site.errors.read_text()
