"""The format stays as documented: test vectors that any implementation can check itself against.

Written anew by `ROSE_UPDATE_GOLDEN=1 pytest tests/unit/test_delta_golden.py`, for a new version of the format
only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_cases import Words, all_kernels
from rose_kernels.delta import FORMATS, GroupTables, Kernels, Settings, Shard, ShardReader, encode_group

VECTORS = Path(__file__).parent.parent / "golden" / "delta" / "vectors.json"


def numbers(seed: int, count: int, top: int) -> Words:
    """A 64-bit linear congruential generator, its upper bits modulo `top`: easy to repeat in any language."""
    state, out = seed, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out.append((state >> 33) % top)
    return np.array(out, np.int64)


def cases() -> Iterator[dict[str, Any]]:
    for name, dtype, n, one_in, classes, chunk_log2, stateful in (
        ("bf16-k8", "BF16", 600, 12, 8, 8, False),
        ("bf16-k4", "BF16", 600, 12, 4, 8, False),
        ("bf16-k1", "BF16", 100, 12, 1, 18, False),
        ("bf16-history", "BF16", 600, 12, 4, 8, True),
        ("bf16-random-bits", "BF16", 64, 1, 8, 18, False),
        ("bf16-unchanged", "BF16", 70, 0, 8, 6, False),
        ("f16-k8", "F16", 300, 12, 8, 8, False),
        ("f8-e4m3", "F8_E4M3", 300, 12, 4, 8, False),
        ("f8-e5m2", "F8_E5M2", 300, 12, 4, 8, False),
        ("f32-steps", "F32", 200, 12, 8, 7, False),
        ("u8-steps", "U8", 200, 12, 8, 7, False),
        ("bf16-anchor", "BF16", 400, -1, 8, 8, False),
    ):
        element = FORMATS[dtype]
        top = 1 << 8 * element.itemsize
        spread = top // 16 if one_in != 1 else top
        base = (numbers(1, n, spread) + numbers(2, n, spread)) % top
        if one_in > 0:
            hit = numbers(3, n, one_in) == 0
            step = (numbers(4, n, 3) + numbers(5, n, 40) // 39 * 700) % 127 + 1
            target = np.where(hit, base + np.where(numbers(6, n, 2) == 0, step, -step), base) % top
        else:
            target = base
        yield {
            "name": name, "dtype": dtype, "classes": classes, "chunk_log2": chunk_log2,
            "base": None if one_in < 0 else base.astype(element.word).tobytes().hex(),
            "target": target.astype(element.word).tobytes().hex(),
            "history": numbers(7, n, 15).astype(np.uint8).tobytes().hex() if stateful else None,
        }  # fmt: skip


def array(text: str | None, dtype: np.dtype[Any]) -> Words | None:
    return None if text is None else np.frombuffer(bytes.fromhex(text), dtype)


def shard_of(case: dict[str, Any]) -> Shard:
    word = FORMATS[case["dtype"]].word
    target = array(case["target"], word)
    assert target is not None
    return Shard(case["dtype"], array(case["base"], word), target, array(case["history"], np.dtype("u1")))


def encoded(case: dict[str, Any], kernels: Kernels) -> dict[str, Any]:
    settings = Settings(classes=case["classes"], chunk_log2=case["chunk_log2"])
    group = encode_group([shard_of(case)], settings, kernels=kernels)
    return {**case, "tables": group.tables.hex(), "shard": group.shards[0].data.hex()}


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    return all_kernels(tmp_path_factory.mktemp("kernels"))


def test_vectors_are_as_they_were(kernels: dict[str, Kernels]) -> None:
    for some in kernels.values():
        made = [encoded(case, some) for case in cases()]
        if os.environ.get("ROSE_UPDATE_GOLDEN"):
            VECTORS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        assert made == json.loads(VECTORS.read_text(encoding="utf-8")), some.name


def test_vectors_decode(kernels: dict[str, Kernels]) -> None:
    for case in json.loads(VECTORS.read_text(encoding="utf-8")):
        shard = shard_of(case)
        tables = GroupTables.read(bytes.fromhex(case["tables"])) if case["tables"] else None
        for some in kernels.values():
            reader = ShardReader(bytes.fromhex(case["shard"]), tables, kernels=some)
            indices, values = reader.decode(shard.base, shard.history)
            if indices is not None:
                assert shard.base is not None
                result = shard.base.copy()
                result[indices] = values
                values = result
            assert np.array_equal(values, shard.target), (case["name"], some.name)
