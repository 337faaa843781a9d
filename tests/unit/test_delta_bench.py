"""`rose bench delta`: the peers' formats are exact, and the report says what it promises."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from delta_cases import updated, weights
from rose_daemon.bench.command import app
from rose_daemon.bench.delta_data import adam_chain, bfloat16_bits, generate, of_pair
from rose_daemon.bench.delta_peers import Peer, peers
from rose_kernels.delta import FORMATS, advance, new_history
from typer.testing import CliRunner

from rose.errors import NotFound
from rose.weights import tensorfile
from rose.weights.bits import Bits

KEYS = {
    "format", "data", "density", "bytes_per_change", "encode_vs_not_equal", "decode_vs_memcpy",
    "threads", "roundtrip",
}  # fmt: skip


@pytest.mark.parametrize("peer", peers(), ids=lambda peer: peer.name)
def test_peers_are_exact(peer: Peer) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 300_000).astype(np.uint16)
    sparse, far, first = base.copy(), base.copy(), base.copy()
    sparse[rng.integers(0, base.size, 4000)] ^= 5
    far[[65_534, 65_535, 65_536, 299_999]] ^= 9
    first[0] ^= 1
    for target in (base, sparse, far, first, ~base):
        words = base.copy()
        peer.decode(peer.encode(base, target), words)
        assert np.array_equal(words, target)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.00390637, -1.00390625], np.float32)
    assert [hex(bits) for bits in bfloat16_bits(values)] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xbf80"]


def test_the_history_is_that_of_the_steps_before() -> None:
    work = generate("chain", 1e-5, 4096, seed=3)
    steps = list(adam_chain(4096, 1e-5, seed=3))
    assert np.array_equal(work.base, steps[-2])
    assert np.array_equal(work.target, steps[-1])
    history = new_history(4096)
    for old, new in pairwise(steps[:-1]):
        at = np.flatnonzero(old != new)
        advance(history, FORMATS["BF16"], at, old[at], new[at])
    assert np.array_equal(work.history, history)


def checkpoint(path: Path, seed: int | None) -> Path:
    rng = np.random.default_rng(2)
    wide, narrow = weights(rng, "BF16", 5000), weights(rng, "F16", 100)
    if seed is not None:
        wide = updated(np.random.default_rng(seed), "BF16", wide, 0.05)
    tensors = {"b": Bits("BF16", (50, 100), wide), "a": Bits("F16", (100,), narrow)}
    path.write_bytes(tensorfile.encode(tensors, {}))
    return path


def test_a_pair_of_checkpoints(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old.safetensors", None), checkpoint(tmp_path / "new.safetensors", 4)
    work = of_pair(old, new)
    assert (work.dtype, work.base.size) == ("BF16", 5000)
    assert work.changed > 0
    with pytest.raises(NotFound):
        of_pair(old, tmp_path / "missing")


def test_the_report(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old.safetensors", None), checkpoint(tmp_path / "new.safetensors", 4)
    out = tmp_path / "report.json"
    for arguments in (["--pair", str(old), str(new)], ["--elements", "4096"]):
        done = CliRunner().invoke(
            app, ["delta", *arguments, "--rounds", "1", "--copies", "1", "--json", str(out)]
        )
        assert done.exit_code == 0, done.output
        report = json.loads(out.read_text(encoding="utf-8"))
        assert report["command"] == "bench delta"
        assert report["baseline"].keys() >= {"memcpy_gb_s", "not_equal_gb_s"}
        assert all(row.keys() >= KEYS and row["roundtrip"] for row in report["rows"])
        assert {"rose K=1", "rose K=4", "rose K=8", "coo"} <= {row["format"] for row in report["rows"]}
