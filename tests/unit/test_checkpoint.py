"""Checkpoints written from a base and deltas: the trainer's bits, in files that load like the base's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from weight_states import JOB, model, same, stepped

from rose.errors import CorruptDelta, NotFound, WrongBase
from rose.units import WeightVersion
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import materialise, open_checkpoint
from rose.weights.container import write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint in two files, with what lies beside them."""
    directory = tmp_path / "base"
    directory.mkdir()
    state = model()
    names = sorted(state)
    for number, part in enumerate((names[:3], names[3:])):
        data = tensorfile.encode({name: state[name] for name in part}, {"format": "pt"})
        (directory / f"model-{number}.safetensors").write_bytes(data)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


def versions(tmp_path: Path, *steps: int) -> tuple[list[Path], dict[str, Bits]]:
    """Directories of a chain of deltas on the base, and the state they lead to."""
    directories, state = [], model()
    for number, step in enumerate(steps):
        target = stepped(state, step)
        encoded = encode_version(JOB, WeightVersion(number + 1), WeightVersion(number), state, target)
        directories.append(tmp_path / f"v{number + 1}")
        write_version(directories[-1], encoded)
        state = target
    return directories, state


def test_the_checkpoint_has_the_trainers_bits_and_the_bases_files(tmp_path: Path, base: Path) -> None:
    directories, target = versions(tmp_path, 1, 2)
    digests = materialise(base, directories, tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert same(written.state, target)
    assert digests == digest_state(target)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}
    assert written.files["model-0.safetensors"].metadata == {"format": "pt"}
    assert written.files["model-0.safetensors"].tensors.keys() == (
        open_checkpoint(base).files["model-0.safetensors"].tensors.keys()
    )
    assert same(open_checkpoint(base).state, model())


def test_transformers_can_read_what_is_written(tmp_path: Path, base: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    pytest.importorskip("torch")
    directories, target = versions(tmp_path, 1)
    materialise(base, directories, tmp_path / "out")
    loaded = torch_files.load_file(tmp_path / "out" / "model-0.safetensors")
    assert all(loaded[name].shape == target[name].shape for name in loaded)


def test_versions_that_do_not_follow_are_refused(tmp_path: Path, base: Path) -> None:
    directories, _ = versions(tmp_path, 1, 2)
    with pytest.raises(WrongBase):
        materialise(base, directories[1:], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_version_writes_nothing(tmp_path: Path, base: Path) -> None:
    directories, _ = versions(tmp_path, 1)
    bucket = directories[0] / "bucket-00000.safetensors"
    bucket.write_bytes(bucket.read_bytes()[:-1])
    with pytest.raises(CorruptDelta):
        materialise(base, directories, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_left_alone(tmp_path: Path, base: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        materialise(base, [], tmp_path / "out")


def test_what_is_no_checkpoint_is_named(tmp_path: Path, base: Path) -> None:
    with pytest.raises(NotFound):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound):
        open_checkpoint(tmp_path / "empty")
    shutil.copy(base / "model-0.safetensors", base / "model-2.safetensors")
    with pytest.raises(CorruptDelta, match="another file"):
        open_checkpoint(base)
    (base / "model-2.safetensors").write_bytes(b"")
    with pytest.raises(CorruptDelta, match=r"model-2\.safetensors"):
        open_checkpoint(base)
