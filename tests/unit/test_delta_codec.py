"""The delta codec: exact at any density and bit pattern, the same bytes from all kernels."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from delta_cases import SPARSE_DTYPES, Words, all_kernels, history_of, pairs, updated, weights
from rose_kernels.delta import (
    FORMATS,
    CorruptDelta,
    EncodedGroup,
    GroupTables,
    Kernels,
    Mode,
    Settings,
    Shard,
    ShardReader,
    advance,
    encode_group,
    new_history,
    read_header,
)
from rose_kernels.delta.native import library_path

CASES = {name: (dtype, base, target) for name, dtype, base, target in pairs()}
SMALL = Settings(chunk_log2=10)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    return all_kernels(tmp_path_factory.mktemp("kernels"))


def read(group: EncodedGroup, which: int, kernels: Kernels) -> ShardReader:
    tables = GroupTables.read(group.tables) if group.tables else None
    return ShardReader(group.shards[which].data, tables, kernels=kernels)


def decoded(reader: ShardReader, base: Words, history: Words | None = None, threads: int = 1) -> Words:
    before = base.copy()
    indices, values = reader.decode(base, history, threads=threads)
    assert np.array_equal(base, before), "decoding wrote into the base"
    if indices is None:
        return values
    assert np.all(np.diff(indices) > 0)
    assert indices.size == reader.header.changed
    target = base.copy()
    target[indices] = values
    return target


def test_the_c_library_was_built() -> None:
    assert library_path() is not None, "install with a C compiler: pip install -e . --no-build-isolation"


@pytest.mark.parametrize("name", CASES)
def test_all_kernels_give_the_same_bytes_and_the_target_back(name: str, kernels: dict[str, Kernels]) -> None:
    dtype, base, target = CASES[name]
    groups = {key: encode_group([Shard(dtype, base, target)], SMALL, kernels=k) for key, k in kernels.items()}
    first = groups["numpy"]
    assert all(group == first for group in groups.values())
    for some in kernels.values():
        assert np.array_equal(decoded(read(first, 0, some), base), target)
        applied = base.copy()
        assert read(first, 0, some).apply(applied) == int(np.count_nonzero(base != target))
        assert np.array_equal(applied, target)


@pytest.mark.parametrize("classes", range(1, 9))
def test_any_number_of_classes(classes: int, kernels: dict[str, Kernels]) -> None:
    _, base, target = CASES["BF16-0.05"]
    settings = Settings(classes=classes, chunk_log2=12)
    groups = [encode_group([Shard("BF16", base, target)], settings, kernels=k) for k in kernels.values()]
    assert all(group == groups[0] for group in groups)
    assert all(np.array_equal(decoded(read(groups[0], 0, k), base), target) for k in kernels.values())


@pytest.mark.parametrize("dtype", SPARSE_DTYPES)
def test_with_a_history(dtype: str, kernels: dict[str, Kernels]) -> None:
    rng = np.random.default_rng(3)
    base = weights(rng, dtype, 6000)
    target, history = updated(rng, dtype, base, 0.05), history_of(rng, 6000)
    shard = Shard(dtype, base, target, history)
    groups = [encode_group([shard], SMALL, kernels=k) for k in kernels.values()]
    assert all(group == groups[0] for group in groups)
    for some in kernels.values():
        assert np.array_equal(decoded(read(groups[0], 0, some), base, history), target)
        with pytest.raises(CorruptDelta, match="history"):
            read(groups[0], 0, some).decode(base)


def test_history_remembers_direction_and_age() -> None:
    element = FORMATS["BF16"]
    history = new_history(4)
    up, down = np.array([0x3C01], np.uint16), np.array([0x3C00], np.uint16)
    advance(history, element, np.array([1]), down, up)
    assert history.tolist() == [0, 1, 0, 0]
    advance(history, element, np.array([2]), up, down)
    assert history.tolist() == [0, 3, 2, 0]
    for _ in range(20):
        advance(history, element, np.zeros(0, np.int64), up[:0], up[:0])
    assert history.tolist() == [0, 13, 14, 0]
    negative = np.array([0xBC01], np.uint16), np.array([0xBC00], np.uint16)
    advance(history, element, np.array([1]), *negative)
    assert history.tolist() == [0, 1, 14, 0], "towards zero from below is a step up"


def test_a_group_shares_tables_and_shards_decode_alone(kernels: dict[str, Kernels]) -> None:
    rng = np.random.default_rng(5)
    bases = [weights(rng, "BF16", n) for n in (3000, 1, 0, 70)]
    targets = [updated(rng, "BF16", base, 0.05) for base in bases]
    shards = [Shard("BF16", base, target) for base, target in zip(bases, targets, strict=True)]
    for some in kernels.values():
        group = encode_group(shards, SMALL, kernels=some)
        for i in reversed(range(len(shards))):
            assert np.array_equal(decoded(read(group, i, some), bases[i]), targets[i])


def test_threads_do_not_change_the_outcome(kernels: dict[str, Kernels]) -> None:
    rng = np.random.default_rng(6)
    base = weights(rng, "BF16", 100_000)
    target = updated(rng, "BF16", base, 0.02)
    some = kernels.get("avx2", kernels["numpy"])
    one = encode_group([Shard("BF16", base, target)], SMALL, kernels=some)
    three = encode_group([Shard("BF16", base, target)], Settings(chunk_log2=10, threads=3), kernels=some)
    assert one == three
    assert np.array_equal(decoded(read(one, 0, some), base, threads=3), target)


@pytest.mark.parametrize("dtype", ["F32", "F64", "I8", "U16", "I32", "I64", "BOOL"])
def test_other_dtypes_are_dense(dtype: str, kernels: dict[str, Kernels]) -> None:
    rng = np.random.default_rng(8)
    word = FORMATS[dtype].word
    base = rng.integers(0, 1 << 8 * word.itemsize, 2500, dtype=word)
    target = np.where(rng.random(2500) < 0.02, base + word.type(1), base).astype(word)
    for anchor in (True, False):
        shard = Shard(dtype, None if anchor else base, target)
        groups = [encode_group([shard], SMALL, kernels=k) for k in kernels.values()]
        assert all(group == groups[0] for group in groups)
        assert not groups[0].tables
        mode = groups[0].shards[0].mode
        assert mode == (Mode.WHOLE if anchor else Mode.STEPS)
        for some in kernels.values():
            assert np.array_equal(decoded(read(groups[0], 0, some), base), target)


def test_an_anchor_needs_no_base(kernels: dict[str, Kernels]) -> None:
    target = weights(np.random.default_rng(9), "BF16", 5000)
    for some in kernels.values():
        group = encode_group([Shard("BF16", None, target)], SMALL, kernels=some)
        indices, values = read(group, 0, some).decode(None)
        assert indices is None
        assert np.array_equal(values, target)
        assert group.nbytes < 0.8 * target.nbytes, "exponents of weights are worth coding"


@pytest.mark.parametrize("dtype", SPARSE_DTYPES)
def test_never_much_larger_than_dense(dtype: str, kernels: dict[str, Kernels]) -> None:
    rng = np.random.default_rng(10)
    some = kernels.get("avx2", kernels["numpy"])
    word = FORMATS[dtype].word
    n = 400_000 if some.name != "numpy" else 20_000
    base, other = rng.integers(0, 1 << 8 * word.itemsize, (2, n)).astype(word)
    normal = weights(rng, dtype, n)
    half = updated(rng, dtype, normal, 0.52)
    for before, after in ((base, other), (normal, half), (normal, other)):
        group = encode_group([Shard(dtype, before, after)], kernels=some)
        assert group.nbytes <= 1.001 * after.nbytes
        assert np.array_equal(decoded(read(group, 0, some), before), after)


def test_a_wrong_base_of_the_right_size_is_never_a_crash(kernels: dict[str, Kernels]) -> None:
    _, base, target = CASES["BF16-0.05"]
    rng = np.random.default_rng(11)
    for some in kernels.values():
        reader = read(encode_group([Shard("BF16", base, target)], SMALL, kernels=some), 0, some)
        for _ in range(20):
            try:
                indices, _ = reader.decode(rng.integers(0, 1 << 16, base.size).astype(np.uint16))
            except CorruptDelta:
                continue
            assert indices is not None
            assert 0 <= int(indices[0]) <= int(indices[-1]) < base.size
        with pytest.raises(CorruptDelta, match="a base of"):
            reader.decode(base[:-1])


def test_a_shard_wants_its_own_tables(kernels: dict[str, Kernels]) -> None:
    _, base, target = CASES["BF16-0.05"]
    group = encode_group([Shard("BF16", base, target)])
    other = encode_group([Shard("BF16", target, base)])
    with pytest.raises(CorruptDelta, match="other tables"):
        ShardReader(group.shards[0].data, GroupTables.read(other.tables))
    with pytest.raises(CorruptDelta, match="other tables"):
        ShardReader(group.shards[0].data, None)


def test_digests_travel_along() -> None:
    _, base, target = CASES["BF16-0.05"]
    group = encode_group([Shard("BF16", base, target, digests=(b"b" * 16, None))])
    header = read_header(group.shards[0].data)
    assert (header.base_digest, header.target_digest) == (b"b" * 16, None)


def test_scatter_writes_all_or_nothing(kernels: dict[str, Kernels]) -> None:
    for some in kernels.values():
        words = np.zeros(10, np.uint16)
        some.scatter(words, np.array([1, 9]), np.array([5, 6], np.uint16))
        assert words.tolist() == [0, 5, 0, 0, 0, 0, 0, 0, 0, 6]
        for bad in (10, -1, 1 << 62):
            with pytest.raises(IndexError):
                some.scatter(words, np.array([0, bad]), np.array([7, 7], np.uint16))
        assert words[0] == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_exchange_answers_what_was_there(
    kernels: dict[str, Kernels], dtype: type[np.unsignedinteger]
) -> None:
    rng = np.random.default_rng(4)
    start = rng.integers(0, 100, 20_000).astype(dtype)
    at = np.flatnonzero(rng.random(start.size) < 0.6)
    values = rng.integers(100, 200, at.size).astype(dtype)
    for some in kernels.values():
        words = start.copy()
        before, same = some.exchange(words, at, values)
        assert same
        assert np.array_equal(before, start[at])
        assert np.array_equal(words[at], values)
        some.exchange(words, at, before)
        assert np.array_equal(words, start)
        for bad in (start.size, -1, 1 << 62):
            with pytest.raises(IndexError):
                some.exchange(words, np.array([0, bad]), values[:2])
            with pytest.raises(IndexError):
                some.exchange(words, np.append(at, bad), np.append(values, values[0]))
        assert np.array_equal(words, start)
        assert some.exchange(words, at[:0], values[:0])[1]


def test_exchange_says_when_a_word_reads_back_otherwise(kernels: dict[str, Kernels]) -> None:
    """Two values for one index: only the second can be there."""
    for some in kernels.values():
        words = np.zeros(4, np.uint16)
        assert not some.exchange(words, np.array([2, 2]), np.array([5, 6], np.uint16))[1]


def test_arguments_that_cannot_be(kernels: dict[str, Kernels]) -> None:
    words = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="flat"):
        Shard("BF16", words.astype(np.uint32), words)
    with pytest.raises(ValueError, match="flat"):
        Shard("BF16", words[:3], words)
    with pytest.raises(ValueError, match="classes"):
        Settings(classes=9)
    with pytest.raises(ValueError, match="chunks"):
        Settings(chunk_log2=19)
    with pytest.raises(ValueError, match="group"):
        encode_group([Shard("BF16", words, words), Shard("F16", words, words)])


def test_without_a_compiler_numpy_is_used_and_says_so_once() -> None:
    script = (
        "import warnings; warnings.simplefilter('always')\n"
        "import rose_kernels.delta.native as native; native.library_path = lambda: None\n"
        "from rose_kernels.delta import kernels; print(kernels().name, kernels().name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numpy", "numpy"]
    assert done.stderr.count("RuntimeWarning") == 1
