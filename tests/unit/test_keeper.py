"""The keeper of the host's copy: follows what is staged, goes back to the pin, is used only when trusted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rose_daemon.node.keeper import CopyKeeper
from waiting import until
from weight_states import JOB, MemoryRelay, model, same, stepped

from rose.config import Config, JobConfig, NodeConfig, ReplicaConfig
from rose.core.events import NodeEvent, UndoReady
from rose.core.shelf import Staged
from rose.errors import WrongBase
from rose.units import ReplicaId, WeightVersion
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import EncodedVersion, read_patches, write_version
from rose.weights.encoding import encode_coded, encode_version
from rose.weights.hostcopy import HostCopy
from rose.weights.patches import apply_to_state
from rose.weights.store import WeightStore

NEWEST = 3


def run_of_a_job(seed: int) -> tuple[list[dict[str, Bits]], list[EncodedVersion]]:
    """States 0 to NEWEST of one run (all start from the same checkpoint), and the deltas between them."""
    states, encoded = [model()], []
    for version in range(1, NEWEST + 1):
        states.append(stepped(states[-1], 100 * seed + version))
        before = WeightVersion(version - 1)
        encoded.append(encode_version(JOB, WeightVersion(version), before, states[-2], states[-1]))
    return states, encoded


STATES, ENCODED = run_of_a_job(1)
OTHER_STATES, OTHER_ENCODED = run_of_a_job(2)


class Host:
    """A host whose keeper runs, and which can be restarted."""

    def __init__(self, root: Path) -> None:
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "model.safetensors").write_bytes(tensorfile.encode(STATES[0], {}))
        self.section = ReplicaConfig(id=ReplicaId("r"), kind="dedicated", model=str(self.model))
        self.config = Config(
            node=NodeConfig(state_dir=str(root)), job=JobConfig(id=JOB), replicas=(self.section,)
        )
        self.store = WeightStore(root)
        self.relay = MemoryRelay()
        self.events: list[NodeEvent] = []
        self.keeper: CopyKeeper
        self._task: asyncio.Task[None] | None = None

    def start(self, config: Config | None = None) -> None:
        self.events.clear()
        self.keeper = CopyKeeper(config or self.config, self.relay, self.events.append)
        self._task = asyncio.create_task(self.keeper.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def stage(self, encoded: EncodedVersion) -> None:
        manifest = encoded.manifest
        path = self.store.destination(JOB, manifest.version)
        if not path.exists():
            write_version(path, encoded)
        self.keeper.staged(Staged(manifest.version, manifest.base_version, str(path)))

    async def at(self, version: int) -> None:
        await until(lambda: self.keeper.version == version)

    async def offered(self) -> int | None:
        async with self.keeper.source(self.section) as source:
            return None if source is None else source.version

    @property
    def undos(self) -> list[tuple[int, int]]:
        return [(event.base_version, event.version) for event in self.events if isinstance(event, UndoReady)]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    made.start()
    yield made
    await made.stop()


async def follow(host: Host, encoded: list[EncodedVersion] = ENCODED) -> None:
    for each in encoded:
        host.stage(each)
    await host.at(NEWEST)


async def test_it_follows_what_is_staged_and_tells_the_ways_back(host: Host) -> None:
    await follow(host)
    await until(lambda: len(host.undos) == NEWEST)
    assert host.undos == [(1, 0), (2, 1), (3, 2)]
    async with host.keeper.source(host.section) as source:
        assert source is not None
        assert source.version == NEWEST
        assert same(open_checkpoint(source.path).state, STATES[NEWEST])
        assert source.digests == ENCODED[-1].manifest.target_digests


async def test_it_goes_back_to_the_pin_and_on_again(host: Host) -> None:
    await follow(host)
    host.keeper.pin(WeightVersion(1))
    await host.at(1)
    assert await host.offered() == 1
    host.keeper.pin(None)
    await host.at(NEWEST)
    assert await host.offered() == NEWEST


async def test_the_copy_stands_still_while_an_engine_loads_it(host: Host) -> None:
    host.stage(ENCODED[0])
    await host.at(1)
    async with host.keeper.source(host.section) as source:
        assert source is not None
        host.stage(ENCODED[1])
        await asyncio.sleep(0.05)
        assert same(open_checkpoint(source.path).state, STATES[1])
    await host.at(2)


async def test_after_a_restart_it_is_used_once_the_relay_names_the_same_version(host: Host) -> None:
    await follow(host)
    await host.stop()
    host.start()
    assert await host.offered() is None, "nobody vouches for it"
    host.relay.publish(ENCODED[-1])
    assert await host.offered() == NEWEST
    assert sorted(host.undos) == [(1, 0), (2, 1), (3, 2)]


async def test_after_a_restart_it_is_recognised_when_its_version_is_staged_again(host: Host) -> None:
    await follow(host)
    await host.stop()
    host.start()
    await host.at(NEWEST)
    for each in ENCODED:
        host.stage(each)
    await until(lambda: host.undos)
    assert await host.offered() == NEWEST


async def test_a_copy_of_another_run_is_not_used_and_is_made_anew(host: Host, tmp_path: Path) -> None:
    await follow(host)
    await host.stop()
    for version in range(1, NEWEST + 1):
        host.store.path(JOB, WeightVersion(version)).rename(tmp_path / f"former-{version}")
    newer = stepped(OTHER_STATES[-1], 77)
    host.start()
    host.relay.publish(OTHER_ENCODED[-1])
    assert await host.offered() is None
    for each in OTHER_ENCODED:
        host.stage(each)
    host.stage(encode_version(JOB, WeightVersion(NEWEST + 1), WeightVersion(NEWEST), OTHER_STATES[-1], newer))
    await until(lambda: host.keeper.version == NEWEST and host.undos)
    async with host.keeper.source(host.section) as source:
        assert source is not None
        assert same(open_checkpoint(source.path).state, OTHER_STATES[NEWEST])


async def test_an_engine_that_found_other_bytes_has_it_made_anew(host: Host) -> None:
    await follow(host)
    host.keeper.distrust()
    await host.at(NEWEST)
    assert await host.offered() == NEWEST


async def test_a_damaged_copy_is_made_anew(host: Host) -> None:
    await follow(host)
    await host.stop()
    (host.store.directory(JOB) / "copy" / "record.json").write_text("{}")
    host.start()
    await host.at(0)
    assert await host.offered() is None


async def test_another_model_is_never_started_from_the_copy(host: Host, tmp_path: Path) -> None:
    await follow(host)
    other = ReplicaConfig(id=ReplicaId("o"), kind="dedicated", model=str(tmp_path / "other"))
    async with host.keeper.source(other) as source:
        assert source is None


@pytest.mark.parametrize("change", [{"undo_max": 0}, {"model": "/nowhere"}, {"locked": True}])
async def test_a_host_without_a_copy_goes_on_without_one(tmp_path: Path, change: dict[str, Any]) -> None:
    host = Host(tmp_path)
    section = ReplicaConfig(id=ReplicaId("r"), kind="dedicated", model=change.get("model", str(host.model)))
    node = NodeConfig(state_dir=str(tmp_path), weights_undo_max=change.get("undo_max", 4))
    holder = None
    if "locked" in change:
        holder = HostCopy.create(host.store.directory(JOB) / "copy", JOB, host.model)
    host.start(Config(node=node, job=JobConfig(id=JOB), replicas=(section,)))
    host.stage(ENCODED[0])
    assert await host.offered() is None
    await asyncio.sleep(0.05)
    assert host.keeper.version is None
    assert not host.undos
    await host.stop()
    if holder is not None:
        holder.close()


# ---- decode ----


def coded(version: int) -> EncodedVersion:
    before = WeightVersion(version - 1)
    return encode_coded(JOB, WeightVersion(version), before, STATES[version - 1], STATES[version])


async def decoded(host: Host, version: int) -> Path:
    path = host.store.destination(JOB, WeightVersion(version))
    if not path.exists():
        write_version(path, coded(version))
    patches = await host.keeper.decode(path)
    assert same(apply_to_state(STATES[version - 1], read_patches(patches)), STATES[version])
    return patches


async def test_coded_versions_are_decoded_ahead_of_the_copy(host: Host) -> None:
    """The first one against the checkpoint, as there is no copy yet, and all without waiting for it."""
    for version in range(1, NEWEST + 1):
        patches = await decoded(host, version)
        base = WeightVersion(version - 1)
        host.keeper.staged(Staged(WeightVersion(version), base, str(patches)))
    await host.at(NEWEST)
    async with host.keeper.source(host.section) as source:
        assert source is not None
        assert same(open_checkpoint(source.path).state, STATES[NEWEST])


async def test_a_version_is_decoded_against_a_copy_that_is_beyond_its_base(host: Host) -> None:
    await follow(host)
    path = host.store.destination(JOB, WeightVersion(2))
    shutil.rmtree(host.model)  # so that the ways back must do
    shutil.rmtree(path)
    await decoded(host, 2)


async def test_a_copy_that_an_earlier_run_left_is_no_base(host: Host) -> None:
    """Then the checkpoint is."""
    await follow(host, OTHER_ENCODED)
    await host.stop()
    shutil.rmtree(host.store.destination(JOB, WeightVersion(1)))
    host.start()
    await decoded(host, 1)


async def test_without_a_copy_the_checkpoint_and_what_is_staged_are_the_base(host: Host) -> None:
    await host.stop()
    host.start(
        msgspec.structs.replace(
            host.config, node=NodeConfig(state_dir=str(host.model.parent), weights_undo_max=0)
        )
    )
    for version in range(1, NEWEST + 1):
        await decoded(host, version)


async def test_a_version_without_its_base_is_refused(host: Host) -> None:
    with pytest.raises(WrongBase):
        await decoded(host, 3)
