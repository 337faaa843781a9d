"""The host's copy of a checkpoint: follows versions, goes back without a download, survives a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay, model, same, stepped

from rose.errors import CorruptDelta, NotFound, NotReady, RoseError, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import files, hostcopy, patches, tensorfile
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import EncodedVersion, read_manifest, read_patches, write_version
from rose.weights.decoding import manifest_digest
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.hostcopy import HostCopy
from rose.weights.patches import apply_to_state
from rose.weights.receiver import pull

ANCHOR = 3
NEWEST = 4


class Chain:
    """A job's versions 0 to 4 on disk; version 3 is an anchor."""

    def __init__(self, root: Path) -> None:
        self.states = [model()]
        self.directories = [root / "checkpoint"]
        self.directories[0].mkdir()
        names = sorted(self.states[0])
        for number, part in enumerate((names[:3], names[3:])):
            data = tensorfile.encode({name: self.states[0][name] for name in part}, {"format": "pt"})
            (self.directories[0] / f"model-{number}.safetensors").write_bytes(data)
        (self.directories[0] / "config.json").write_text("{}")
        for version in range(1, NEWEST + 1):
            before, after = self.states[-1], stepped(self.states[-1], version)
            anchor = version == ANCHOR
            encoded = encode_version(
                JOB,
                WeightVersion(version),
                None if anchor else WeightVersion(version - 1),
                None if anchor else before,
                after,
            )
            self.states.append(after)
            self.directories.append(root / f"v{version}")
            write_version(self.directories[-1], encoded)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def copy(home: Path, chain: Chain) -> Iterator[HostCopy]:
    made = HostCopy.create(home, JOB, chain.directories[0])
    yield made
    made.close()


def check(copy: HostCopy, chain: Chain, version: int) -> None:
    """The copy is exactly this version, in its files and in its record."""
    assert copy.version == version
    assert same(copy.state, chain.states[version])
    assert copy.digests == digest_state(chain.states[version])
    assert same(open_checkpoint(copy.checkpoint).state, chain.states[version])
    copy.verify()


def test_it_follows_deltas_and_anchors_and_goes_all_the_way_back(copy: HostCopy, chain: Chain) -> None:
    check(copy, chain, 0)
    for version in range(1, NEWEST + 1):
        undo = copy.advance(chain.directories[version])
        assert (undo.version, undo.base) == (version - 1, version)
        check(copy, chain, version)
        assert copy.origin == manifest_digest(read_manifest(chain.directories[version]))
    for version in range(NEWEST - 1, -1, -1):
        assert copy.rewind() == version
        check(copy, chain, version)
    assert copy.origin is None
    with pytest.raises(NotFound):
        copy.rewind()
    copy.advance(chain.directories[1])
    check(copy, chain, 1)


def test_the_way_back_serves_engines_too(copy: HostCopy, chain: Chain) -> None:
    """An undo is a version directory like any other: patches between verified digests."""
    for version in range(1, NEWEST + 1):
        copy.advance(chain.directories[version])
    for undo in copy.undos():
        manifest = read_manifest(undo.path)
        patches.check_base(manifest, digest_state(chain.states[undo.base]))
        state = apply_to_state(chain.states[undo.base], read_patches(undo.path))
        assert same(state, chain.states[undo.version])
        assert manifest.target_digests == digest_state(state)
        assert manifest.delta_bytes < manifest.dense_bytes  # of an anchor too: only what it changed


def test_files_beside_the_tensors_are_copied(copy: HostCopy, chain: Chain) -> None:
    names = {path.name for path in chain.directories[0].iterdir()}
    assert {path.name for path in copy.checkpoint.iterdir()} == names


def test_foreign_files_with_odd_offsets_become_writable(tmp_path: Path, home: Path, chain: Chain) -> None:
    source = tmp_path / "odd"
    source.mkdir()
    data = tensorfile.encode(chain.states[0], {})
    header = int.from_bytes(data[:8], "little")
    odd = (header + 1).to_bytes(8, "little") + data[8 : 8 + header] + b" " + data[8 + header :]
    (source / "model.safetensors").write_bytes(odd)
    copy = HostCopy.create(home, JOB, source)
    copy.advance(chain.directories[1])
    check(copy, chain, 1)
    copy.close()


def test_only_so_many_steps_back(home: Path, chain: Chain) -> None:
    copy = HostCopy.create(home, JOB, chain.directories[0], undo_max=2)
    for version in range(1, NEWEST + 1):
        copy.advance(chain.directories[version])
    assert [(undo.base, undo.version) for undo in copy.undos()] == [(4, 3), (3, 2)]
    copy.rewind()
    copy.rewind()
    check(copy, chain, 2)
    with pytest.raises(NotFound):
        copy.rewind()
    copy.close()


@pytest.mark.parametrize("version", [0, 2, 4])
def test_a_version_that_does_not_follow_changes_no_byte(copy: HostCopy, chain: Chain, version: int) -> None:
    """Gap (0 -> 2), pruned chain, not a version at all."""
    with pytest.raises((WrongBase, CorruptDelta)):
        copy.advance(chain.directories[version])
    check(copy, chain, 0)


def test_another_job_or_a_way_back_is_no_version(copy: HostCopy, chain: Chain, tmp_path: Path) -> None:
    foreign = encode_version(
        JobId("other"), WeightVersion(1), WeightVersion(0), chain.states[0], chain.states[1]
    )
    write_version(tmp_path / "foreign", foreign)
    with pytest.raises(WrongBase):
        copy.advance(tmp_path / "foreign")
    undo = copy.advance(chain.directories[1])
    with pytest.raises(WrongBase):
        copy.advance(undo.path)
    check(copy, chain, 1)


def test_files_that_somebody_wrote_to_are_found_out(copy: HostCopy, chain: Chain) -> None:
    patched = read_patches(chain.directories[1])[0].name
    copy._state[patched].words[:1] ^= 1
    with pytest.raises(CorruptDelta, match=patched):
        copy.verify()
    with pytest.raises(CorruptDelta, match=patched):
        copy.advance(chain.directories[1])


def test_one_process_at_a_time(copy: HostCopy, home: Path) -> None:
    with pytest.raises(NotReady):
        HostCopy.open(home, JOB)


def test_opening_what_is_not_there_or_not_ours(copy: HostCopy, home: Path, tmp_path: Path) -> None:
    copy.close()
    with pytest.raises(NotFound):
        HostCopy.open(tmp_path / "nowhere", JOB)
    with pytest.raises(CorruptDelta):
        HostCopy.open(home, JobId("other"))
    (home / "record.json").write_text("{")
    with pytest.raises(CorruptDelta):
        HostCopy.open(home, JOB)


class Killed(BaseException):
    """The process ends here."""


class Executioner:
    """Ends the process at the n-th thing it does to the disk or to the mapped files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.reached = 0
        for module, name in (
            (files, "write_durably"),
            (files, "sync_directory"),
            (hostcopy, "_write_record"),
        ):
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name)))

        def torn_write(copy: HostCopy, patches: list[patches.Patch]) -> None:
            self._torn_write(copy, patches)

        monkeypatch.setattr(HostCopy, "_write", torn_write)

    def _step(self) -> None:
        self.reached += 1
        if self.reached == self.left:
            raise Killed

    def _wrap(self, call: object) -> object:
        def wrapped(*arguments: object) -> object:
            self._step()
            outcome = call(*arguments)  # type: ignore[operator]
            self._step()
            return outcome

        return wrapped

    def _torn_write(self, copy: HostCopy, patches: list[patches.Patch]) -> None:
        """As `HostCopy._write`, element by element where few change."""
        for patch in patches:
            words = copy._state[patch.name].words
            positions = np.arange(words.size) if patch.indices is None else patch.indices
            for part in np.array_split(np.arange(positions.size), 3):
                words[positions[part]] = patch.values[part]
                self._step()


@pytest.mark.parametrize("move", ["advance", "advance to an anchor", "rewind"])
def test_a_crash_anywhere_leaves_the_version_before_or_after(
    move: str, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"advance": 1, "advance to an anchor": ANCHOR - 1, "rewind": 2}[move]
    after = before - 1 if move == "rewind" else before + 1
    executioner = Executioner(monkeypatch)
    ends: set[int] = set()
    for moment in range(1, 400):
        executioner.left = -1
        home = tmp_path / str(moment)
        copy = HostCopy.create(home, JOB, chain.directories[0])
        for version in range(1, before + 1):
            copy.advance(chain.directories[version])
        executioner.left, executioner.reached = moment, 0
        try:
            copy.rewind() if move == "rewind" else copy.advance(chain.directories[after])
            finished = True
        except Killed:
            finished = False
        executioner.left = -1
        copy.close()
        copy = HostCopy.open(home, JOB)
        ends.add(copy.version)
        assert copy.version == after if finished else copy.version in {before, after}
        check(copy, chain, copy.version)
        if copy.version != after:
            copy.rewind() if move == "rewind" else copy.advance(chain.directories[after])
            check(copy, chain, after)
        copy.close()
        if finished:
            break
    assert finished
    assert ends == {before, after}
    assert moment > 20


def test_a_crash_while_recovering_is_recovered_from(
    chain: Chain, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executioner = Executioner(monkeypatch)
    copy = HostCopy.create(home, JOB, chain.directories[0])
    executioner.left, executioner.reached = 16, 0
    with pytest.raises(Killed):
        copy.advance(chain.directories[1])
    copy.close()
    assert hostcopy._read_record(home).undoing == "v1"
    for moment in (1, 2, 3, 5):
        executioner.left, executioner.reached = moment, 0
        with pytest.raises(Killed):
            HostCopy.open(home, JOB)
    executioner.left = -1
    copy = HostCopy.open(home, JOB)
    check(copy, chain, 0)
    copy.close()


def test_a_damaged_way_back_is_refused(copy: HostCopy, chain: Chain) -> None:
    undo = copy.advance(chain.directories[1])
    bucket = next(undo.path.glob("bucket-*"))
    data = bytearray(bucket.read_bytes())
    data[-1] ^= 1
    bucket.write_bytes(data)
    with pytest.raises(RoseError):
        copy.rewind()
    check(copy, chain, 1)


async def test_a_way_back_is_never_taken_from_a_relay(chain: Chain, copy: HostCopy, tmp_path: Path) -> None:
    copy.advance(chain.directories[1])
    undo = copy.advance(chain.directories[2])
    relay = MemoryRelay()
    manifest = read_manifest(undo.path)
    files = {bucket.name: (undo.path / bucket.name).read_bytes() for bucket in manifest.buckets}
    relay.publish(EncodedVersion(manifest, files))
    with pytest.raises(CorruptDelta, match="backwards"):
        await pull(relay, JOB, WeightVersion(1), tmp_path / "v1")
