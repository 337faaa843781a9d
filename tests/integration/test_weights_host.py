"""Weights through the real processes: trainer, relay, rosed, and light engines with real parameters.

A rollback needs no network, an engine that restarts needs no download, and whoever is killed, every engine
runs exactly one version that the trainer published, by digests of its live parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from rose_daemon.node.engines import free_port
from test_rosed_process import Host, until

from rose import wire
from rose.cli.control import ask
from rose.config import RelayConfig
from rose.errors import Exit, RoseError
from rose.units import JobId, WeightVersion
from rose.weights import Publisher, tensorfile
from rose.weights.bits import Bits
from rose.weights.digests import digest_state

JOB = JobId("job-0")
REPLICAS = ("ded-0", "ded-1")
State = dict[str, Bits]


def first_state() -> State:
    """A checkpoint large enough that an update takes a few milliseconds."""
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (512, 64),
        "model.layers.0.mlp.up_proj.weight": (256, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.norm.weight": (64,),
    }
    return {
        name: Bits("BF16", shape, rng.integers(0x3C00, 0x3F80, int(np.prod(shape))).astype("<u2"))
        for name, shape in shapes.items()
    }


def stepped(state: State, seed: int) -> State:
    rng = np.random.default_rng(seed)
    moved = {name: bits.copy() for name, bits in state.items()}
    for bits in moved.values():
        bits.words[rng.random(bits.words.size) < 0.02] ^= 1
    return moved


class Site(Host):
    """A host with two light engines, a relay, and a trainer that keeps all states it published."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.relay_port = free_port("127.0.0.1")
        self.states = [first_state()]
        (self.model / "model.safetensors").write_bytes(tensorfile.encode(self.states[0], {"format": "pt"}))
        replicas = "".join(
            f'[[replicas]]\nid = "{replica}"\nkind = "dedicated"\nmodel = "{self.model}"\n'
            for replica in REPLICAS
        )
        self.write("restart_backoff_max_s = 0.5", replicas=replicas)
        text = self.config.read_text().splitlines()
        text[text.index("[relay]") + 1] = f'url = "http://127.0.0.1:{self.relay_port}"'
        self.config.write_text("\n".join(text))
        self.relay: subprocess.Popen[bytes] | None = None
        self.start_relay()
        relay = RelayConfig(url=f"http://127.0.0.1:{self.relay_port}")
        self.publisher = Publisher.connect(relay, JOB, self.states[0], keep=2)

    def start_relay(self) -> None:
        command = [sys.executable, "-m", "rose.cli.main", "relay", "--config", str(self.config)]
        self.relay = subprocess.Popen(
            [*command, "--port", str(self.relay_port)], stderr=subprocess.DEVNULL, env=self.environ
        )

    def stop_relay(self) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
            self.relay = None

    def publish(self) -> int:
        version = len(self.states)
        self.states.append(stepped(self.states[-1], version))
        self.publisher.publish(WeightVersion(version), self.states[version])
        return version

    def get(self, replica: str, path: str) -> dict[str, Any]:
        token = (self.base / "state" / "engine.token").read_text().strip()
        url = self.replica(replica)["url"] + path
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def all_at(self, version: int) -> Callable[[], bool]:
        def reached() -> bool:
            status = self.status()
            return status is not None and all(
                each["weight_version"] == version and each["state"] == "ready" for each in status["replicas"]
            )

        return reached

    def check(self, version: int) -> None:
        """Live parameters of every engine come to be the trainer's of this version, and never a mixture."""

        def reached() -> bool:
            if not self.all_at(version)():
                return False
            versions = set()
            for replica in REPLICAS:
                try:
                    live = self.get(replica, "/rose/v1/weights/digests")
                except OSError:
                    return False  # killed, and nobody has noticed yet
                assert live["digests"] == digest_state(self.states[live["version"]]), replica
                versions.add(live["version"])
            return versions == {version}

        until(reached, self.explain)

    def copy_version(self) -> int | None:
        try:
            record = json.loads((self.base / "state" / "weights" / JOB / "copy" / "record.json").read_text())
        except FileNotFoundError:
            return None
        return None if record["undoing"] else int(record["version"])

    def rose(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rose.cli.main", "weights", *map(str, arguments)]
        return subprocess.run(
            [*command, "--config", str(self.config)], capture_output=True, text=True, check=False, timeout=60
        )

    def end(self) -> None:
        super().end()
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        self.publisher.close()


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

    began = time.monotonic()
    done = site.rose("rollback", JOB, 4)
    assert done.returncode == 0, done.stderr
    print(f"{done.stdout.strip()} ({(time.monotonic() - began) * 1e3:.0f} ms with the command)")
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
    ask(site.socket, wire.PinRequest(JOB, WeightVersion(1)))
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
