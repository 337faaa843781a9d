"""The control plane with CURVE: the scheduler's link and nodes', and those who must stay out."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rose_daemon import curve
from rose_daemon.node.link import SchedulerLink
from rose_daemon.scheduler import nodes as nodes_module
from rose_daemon.scheduler.nodes import NodeLink
from rose_daemon.scheduler.telemetry import Telemetry
from waiting import until

from rose.config import Config, NodeConfig, SchedulerConfig
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.events import ReplicaReport
from rose.errors import ConfigError
from rose.units import NodeId, ReplicaId, WeightVersion

REPORT = ReplicaReport(
    ReplicaId("r"), "dedicated", "ready", "http://127.0.0.1:1", "rollout", WeightVersion(0)
)


class Hosts:
    """Key directories of a scheduler and of nodes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.scheduler = base / "scheduler"
        curve.make_keys(self.scheduler, curve.SCHEDULER)

    def node(self, name: str, known_as: str | None = "") -> Path:
        """A node's directory; the scheduler knows its key as `known_as` ("": its name, None: not at all)."""
        directory = self.base / name
        public, _ = curve.make_keys(directory, curve.NODE)
        shutil.copy(self.scheduler / "scheduler.key", directory)
        if known_as is not None:
            shutil.copy(public, self.scheduler / curve.NODES_DIR / f"{known_as or name}.key")
        return directory


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


class World:
    """A scheduler's link with the machine behind it."""

    def __init__(self, curve_dir: str) -> None:
        self.machine = ClusterMachine(ClusterSettings())
        self.telemetry = Telemetry(dict)
        self.link = NodeLink(
            "tcp://127.0.0.1:0",
            "scheduler-1",
            self.machine,
            lambda event: self.machine.step(event, time.monotonic_ns()),
            telemetry=self.telemetry,
            curve_dir=curve_dir,
        )

    @property
    def allowed(self) -> set[str]:
        assert self.link._allowed is not None
        return set(self.link._allowed._ids.values())

    @property
    def nodes(self) -> set[str]:
        return {str(node.node) for node in self.machine.view(time.monotonic_ns()).nodes}

    @asynccontextmanager
    async def node(self, name: str, curve_dir: Path | None) -> AsyncIterator[SchedulerLink]:
        config = Config(
            node=NodeConfig(id=NodeId(name), heartbeat_ms=50),
            scheduler=SchedulerConfig(
                control=self.link.address, curve_dir="" if curve_dir is None else str(curve_dir)
            ),
        )
        link = SchedulerLink(config, lambda: (REPORT,), lambda _: None, time.monotonic_ns)
        task = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.close()


@asynccontextmanager
async def running(curve_dir: str) -> AsyncIterator[World]:
    world = World(curve_dir)
    task = asyncio.create_task(world.link.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        world.link.close()


async def test_a_node_with_a_known_key_is_registered(hosts: Hosts) -> None:
    directory = hosts.node("n0")
    async with running(str(hosts.scheduler)) as world, world.node("n0", directory) as link:
        await until(lambda: link.registered)
        assert world.nodes == {"n0"}


async def test_strangers_stay_out(hosts: Hosts) -> None:
    """No CURVE at all, a key nobody knows, the wrong scheduler, and a known key in another's name."""
    wrong = hosts.node("n2")
    other = Hosts(hosts.base / "other")
    shutil.copy(other.scheduler / "scheduler.key", wrong)
    hosts.node("victim")
    good_keys, other_keys = hosts.node("good"), hosts.node("n3")
    async with (
        running(str(hosts.scheduler)) as world,
        world.node("n0", None),
        world.node("n1", hosts.node("n1", known_as=None)),
        world.node("n2", wrong),
        world.node("victim", other_keys),
        world.node("good", good_keys) as good,
    ):
        await until(lambda: good.registered)
        await until(lambda: "node_impostor" in world.telemetry.exposition().decode())
        await asyncio.sleep(0.3)
        assert world.nodes == {"good"}


async def test_keys_count_without_a_restart(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "_KEYS_EVERY_S", 0.05)
    hosts.node("first")
    async with running(str(hosts.scheduler)) as world:
        late = hosts.node("late")
        async with world.node("late", late) as link:
            await until(lambda: link.registered)
        key = hosts.scheduler / curve.NODES_DIR / "late.key"
        key.unlink()
        await until(
            lambda: world.link._allowed is not None and "late" not in world.link._allowed._ids.values()
        )
        async with world.node("late", late) as link:
            await asyncio.sleep(0.3)
            assert not link.registered


def test_keys_are_made_once_and_kept_from_others(tmp_path: Path) -> None:
    public, secret = curve.make_keys(tmp_path / "keys", curve.NODE)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "secret-key" not in public.read_text()
    with pytest.raises(ConfigError, match="there already"):
        curve.make_keys(tmp_path / "keys", curve.NODE)
    with pytest.raises(ConfigError, match="cannot be written"):
        curve.make_keys(Path("/proc/nowhere"), curve.NODE)


@pytest.mark.parametrize(
    ("file", "content", "mode", "word"),
    [
        ("scheduler.key_secret", None, 0o600, "No such file"),
        ("scheduler.key_secret", "", 0o644, "read by others"),
        ("scheduler.key_secret", "", 0o600, "not a key file"),
        (
            "scheduler.key_secret",
            'curve\npublic-key = "short"\nsecret-key = "short"\n',
            0o600,
            "40 characters",
        ),
        ("nodes/n.key", "garbage", 0o644, "not a key file"),
    ],
)
async def test_keys_that_cannot_be_used(
    hosts: Hosts, file: str, content: str | None, mode: int, word: str
) -> None:
    path = hosts.scheduler / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=word):
        World(str(hosts.scheduler))


def test_a_node_without_its_keys(hosts: Hosts) -> None:
    control = SchedulerConfig(control="tcp://10.0.0.1:7701", curve_dir=str(hosts.scheduler))
    with pytest.raises(ConfigError, match=r"node\.key_secret"):
        SchedulerLink(Config(scheduler=control), tuple, lambda _: None, time.monotonic_ns)
