"""Shards on a device: the bytes are those of the same shards on the host, whatever the bits.

The kernels are the GPU's own, compiled for the host; NumPy stands in for CuPy.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import HostDevice, host_device
from delta_cases import SPARSE_DTYPES, Words, all_kernels, history_of, pairs, updated, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_kernels.delta import FORMATS, GroupTables, Mode, Settings, Shard, ShardReader, encode_group
from rose_kernels.delta.choice import choose_plan
from rose_kernels.delta.device import DeviceShard
from rose_kernels.delta.kernel import Changes, Kernels
from rose_kernels.delta.plan import Plan
from rose_kernels.delta.reference import ReferenceKernels, contexts_of, steps

CASES = {name: (dtype, base, target) for name, dtype, base, target in pairs()}
SMALL = Settings(chunk_log2=10)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    return host_device(tmp_path_factory.mktemp("changes"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    return all_kernels(tmp_path_factory.mktemp("kernels"))


def listed(plan: Plan, base: Words, target: Words, history: Words | None, chunk_elements: int) -> Changes:
    """What the kernels are to list, from the words of the format."""
    places, directed, ends = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint16)], []
    for start in range(0, base.size, chunk_elements):
        part = slice(start, start + chunk_elements)
        position, value, flips = contexts_of(plan, base[part], None if history is None else history[part])
        ranks = np.zeros(position.size, np.uint32)
        for context in range(plan.contexts):
            ranks[position == context] = np.arange(np.count_nonzero(position == context))
        at = np.flatnonzero(base[part] != target[part])
        places.append(ranks[at] | position[at].astype(np.uint32) << 18 | value[at].astype(np.uint32) << 23)
        directed.append(steps(base[part][at], target[part][at], plan.element).astype(np.uint16) ^ flips[at])
        ends.append(at.size)
    return Changes(np.concatenate(places), np.concatenate(directed), np.cumsum(ends, dtype=np.int64))


def require_same(one: object, other: object, fields: tuple[str, ...]) -> None:
    for name in fields:
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype, name
        assert np.array_equal(left, right), name


@pytest.mark.parametrize(
    ("name", "stateful"),
    [
        (name, stateful)
        for name in CASES
        for stateful in (False, True)
        if not (stateful and "elements" in name)
    ],
)
def test_a_device_lists_what_the_format_says_and_the_bytes_are_the_same(
    name: str, stateful: bool, device: HostDevice
) -> None:
    dtype, base, target = CASES[name]
    history = history_of(np.random.default_rng(1), base.size) if stateful else None
    shard = DeviceShard(dtype, base, target, device, history)
    plan = choose_plan(shard.element, [shard], 8, 8)
    expected = listed(plan, base, target, history, 1700)
    require_same(shard.changes(plan, 1700), expected, ("places", "steps", "ends"))
    assert encode_group([shard], SMALL) == encode_group([Shard(dtype, base, target, history)], SMALL)


@pytest.mark.parametrize("threads", [1, 3])
def test_shards_of_a_group_may_lie_anywhere(threads: int, device: HostDevice) -> None:
    rng = np.random.default_rng(3)
    how = Settings(chunk_log2=9, threads=threads)
    old = [weights(rng, "BF16", n) for n in (20_000, 0, 511, 513)]
    new = [updated(rng, "BF16", base, density) for base, density in zip(old, (0.01, 0, 0.02, 0), strict=True)]
    there = [DeviceShard("BF16", *pair, device) for pair in zip(old, new, strict=True)]
    here = [Shard("BF16", *pair) for pair in zip(old, new, strict=True)]
    anchor = Shard("BF16", None, new[0])
    expected = encode_group([*here, anchor], how)
    assert encode_group([*there, anchor], how) == expected
    assert encode_group([here[0], *there[1:], anchor], how) == expected
    shard = expected.shards[0]
    assert shard.mode == Mode.SPARSE
    indices, values = ShardReader(shard.data, GroupTables.read(expected.tables)).decode(old[0])
    assert np.array_equal(values, new[0][indices])


@pytest.mark.parametrize("dtype", ["F32", "F64", "I8", "I32"])
def test_what_is_always_dense_is_fetched_and_not_listed(dtype: str, device: HostDevice) -> None:
    rng = np.random.default_rng(5)
    word = FORMATS[dtype].word
    base = rng.integers(0, 1 << 8 * word.itemsize, 3000, dtype=np.uint64).astype(word)
    target = np.where(rng.random(3000) < 0.02, base + word.type(1), base).astype(word)
    device.runs.clear()
    assert encode_group([DeviceShard(dtype, base, target, device)], SMALL) == encode_group(
        [Shard(dtype, base, target)], SMALL
    )
    assert device.runs == []


def test_nothing_changed_and_nothing_at_all(device: HostDevice) -> None:
    base = np.arange(5000).astype(np.uint16)
    empty = base[:0]
    for old in (base, empty):
        there = encode_group([DeviceShard("BF16", old, old.copy(), device)], SMALL)
        assert there == encode_group([Shard("BF16", old, old.copy())], SMALL)
        assert there.shards[0].changed == 0


def test_device_shards_are_checked(device: HostDevice) -> None:
    words = np.zeros(8, np.uint16)
    for base, target, history in (
        (words, words[:4], None),
        (words.view(np.uint8), words, None),
        (words.reshape(2, 4), words.reshape(2, 4), None),
        (words[::2], words[::2], None),
        (words, words, np.zeros(7, np.uint8)),
        (words, words, words),
    ):
        with pytest.raises(ValueError, match=r"equal sizes|contiguous|one byte"):
            DeviceShard("BF16", base, target, device, history)
    with pytest.raises(ValueError, match="history"):
        encode_group(
            [
                DeviceShard("BF16", words, words, device),
                DeviceShard("BF16", words, words, device, np.zeros(8, np.uint8)),
            ]
        )


# ---- lists to symbols ---------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(SPARSE_DTYPES),
    n=st.integers(1, 4000),
    density=st.sampled_from([0.0, 0.002, 0.02, 0.52, 1.0]),
    anything=st.booleans(),
    stateful=st.booleans(),
    chunk_elements=st.sampled_from([1, 64, 1000, 4096]),
    classes=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_symbols_of_a_list_are_those_of_a_scan(
    seed: int, dtype: str, n: int, density: float, anything: bool, stateful: bool, chunk_elements: int,
    classes: int, kernels: dict[str, Kernels],
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    word = FORMATS[dtype].word
    n = min(n, 200 * chunk_elements)
    if anything:  # NaN, infinities, -0 and denormals among them
        base = rng.integers(0, 1 << 8 * word.itemsize, n).astype(word)
        target = np.where(rng.random(n) < density, rng.permutation(base), base).astype(word)
    else:
        base = weights(rng, dtype, n)
        target = updated(rng, dtype, base, density)
    shard = Shard(dtype, base, target, history_of(rng, n) if stateful else None)
    plan = choose_plan(shard.element, [shard], classes, classes)
    changes = listed(plan, base, target, shard.history, chunk_elements)
    scanned, counted = ReferenceKernels().scan(plan, base, target, shard.history, chunk_elements)
    for some in kernels.values():
        symbols, histograms = some.symbolise(plan, changes)
        require_same(
            symbols,
            scanned,
            ("counts", "gap_symbols", "value_symbols", "value_contexts", "raw", "raw_ends"),
        )
        require_same(histograms, counted, ("gaps", "values"))


def _changes(places: list[int], steps: list[int], ends: list[int]) -> Changes:
    return Changes(np.array(places, np.uint32), np.array(steps, np.uint16), np.array(ends, np.int64))


@pytest.mark.parametrize(
    ("places", "steps", "ends"),
    [
        ([1, 1], [0, 0], [2]),
        ([2, 1], [0, 0], [2]),
        ([1 << 18], [0], [1]),
        ([1 << 23], [0], [1]),
        ([1 << 31], [0], [1]),
        ([0], [256], [1]),
        ([0], [0], [2]),
        ([0, 1], [0, 0], [2, 1]),
        ([0], [0, 0], [1]),
        ([0], [0], []),
    ],
)
def test_lists_that_no_elements_have_are_refused(
    places: list[int], steps: list[int], ends: list[int], kernels: dict[str, Kernels]
) -> None:
    for some in kernels.values():
        with pytest.raises(ValueError, match=r"no elements have such|belong together"):
            some.symbolise(
                Plan(FORMATS["F8_E4M3"]),
                Changes(np.array(places, np.uint32), np.array(steps, np.uint16), np.array(ends, np.int64)),
            )


# ---- CuPy ---------------------------------------------------------------------------------------


def test_without_cupy_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['cupy'] = None; import rose_kernels.delta.cuda"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: rose_kernels.delta.cuda needs CuPy" in done.stderr
    assert "pip install cupy-cuda13x" in done.stderr


class FakeCupy(ModuleType):
    """CuPy as far as it is used: NumPy's arrays on GPU 0 (or that of `gpus`), and the kernels on the host."""

    class ndarray(np.ndarray[Any, Any]):  # noqa: N801 - CuPy's name
        number = 0

        def __array_finalize__(self, other: Any) -> None:
            self.number = getattr(other, "number", 0)

        @property
        def device(self) -> Any:
            return SimpleNamespace(id=self.number)

    def __init__(self, device: HostDevice) -> None:
        super().__init__("cupy")
        for name in ("empty", "zeros", "cumsum"):
            setattr(self, name, getattr(np, name))
        self.cuda = SimpleNamespace(Device=lambda number: device.current())
        self.launched: list[Any] = []
        fake = self

        class RawModule:
            def __init__(self, code: str, options: tuple[str, ...]) -> None:
                assert "__global__" in code

            def get_function(self, name: str) -> Any:
                def launch(grid: tuple[int], block: tuple[int], given: tuple[Any, ...]) -> None:
                    # What CuPy would hand to the driver with another width than the kernel's.
                    assert all(isinstance(item, np.ndarray | np.int64) for item in given)
                    fake.launched.append(name)
                    device.run(name, *grid, *block, *given)

                return launch

        self.RawModule = RawModule

    def asarray(self, array: Any) -> Any:
        return np.asarray(array).view(FakeCupy.ndarray)

    def asnumpy(self, array: Any) -> Any:
        return np.array(array)


@pytest.fixture
def cupy(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy(device)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "rose_kernels.delta.cuda", raising=False)
    yield fake
    sys.modules.pop("rose_kernels.delta.cuda", None)


def test_cupy_is_called_as_it_takes_it(cupy: FakeCupy) -> None:
    cuda = importlib.import_module("rose_kernels.delta.cuda")
    dtype, base, target = CASES["BF16-0.05"]
    history = history_of(np.random.default_rng(1), base.size)
    old, new = cupy.asarray(base), cupy.asarray(target.view(np.int16).reshape(50, 100))
    for past in (None, history):
        there = cuda.device_shard(dtype, old, new, None if past is None else cupy.asarray(past))
        assert encode_group([there], SMALL) == encode_group([Shard(dtype, base, target, past)], SMALL)
    assert cupy.launched == ["rose_count_u16", "rose_list_u16"] * 2
    elsewhere = cupy.asarray(base.copy())
    elsewhere.number = 1
    with pytest.raises(ValueError, match="different GPUs"):
        cuda.device_shard(dtype, elsewhere, new)
    with pytest.raises(ValueError, match="not as wide"):
        cuda.device_shard("F8_E4M3", old, new)


def test_the_check_for_gpus_compares_and_measures(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = importlib.import_module("rose_kernels.delta.cuda")
    for name in ("_CHECK_ELEMENTS", "_CHECK_IDENTITY_ELEMENTS", "_CHECK_BITS_ELEMENTS"):
        monkeypatch.setattr(cuda, name, 3000)
    rng = np.random.default_rng(2)
    base = weights(rng, "BF16", 3000)
    pair = cupy.asarray(base), cupy.asarray(updated(rng, "BF16", base, 0.01))
    monkeypatch.setattr(cuda, "_pair", lambda elements: pair)
    figures = cuda.gpu_check()
    assert figures["identical bytes"] == "BF16, F16, F8_E4M3, F8_E5M2"
    assert all(value > 0 for value in figures.values() if not isinstance(value, str))
    changes = DeviceShard.changes

    def damaged(shard: DeviceShard, plan: Plan, chunk_elements: int) -> Changes:
        found = changes(shard, plan, chunk_elements)
        return Changes(found.places, found.steps ^ np.uint16(1), found.ends)

    monkeypatch.setattr(DeviceShard, "changes", damaged)
    with pytest.raises(AssertionError, match="different bytes"):
        cuda.gpu_check()
