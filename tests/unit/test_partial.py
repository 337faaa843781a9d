"""Parts of large parameters: only chunks that hold some of them are fetched, and every one is checked."""

from __future__ import annotations

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay

from rose.errors import CorruptDelta, WrongBase
from rose.units import WeightVersion
from rose.weights import boxes, partial
from rose.weights.bits import Bits
from rose.weights.boxes import Box
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion
from rose.weights.encoding import encode_coded
from rose.weights.partial import fetch_part, part_bytes
from rose.weights.patches import apply_to_state

NAME, SHAPE = "model.w.weight", (1024, 1024)
V1 = WeightVersion(1)
RNG = np.random.default_rng(5)
BASE = {NAME: Bits("BF16", SHAPE, RNG.integers(0x3C00, 0x3F80, 1 << 20).astype("<u2"))}
TARGET = {NAME: BASE[NAME].copy()}
TARGET[NAME].words[RNG.random(1 << 20) < 0.02] ^= 1
DENSE = {NAME: Bits("BF16", SHAPE, BASE[NAME].words ^ RNG.integers(0, 4, 1 << 20).astype("<u2"))}
ROWS: Box = ((300, 500), (0, 1024))
"""Within the second of four chunks."""
COLUMNS: Box = ((0, 1024), (512, 1024))


class CountingRelay(MemoryRelay):
    """Knows how much was fetched, and may hand out other bytes."""

    fetched = 0
    flipped: int | None = None
    """Offset in the bucket of a byte that arrives wrong."""

    async def get_into(self, job, version, bucket, destination, *, offset=0, epoch=None):  # type: ignore[no-untyped-def]
        await super().get_into(job, version, bucket, destination, offset=offset, epoch=epoch)
        self.fetched += len(destination)
        if self.flipped is not None and offset <= self.flipped < offset + len(destination):
            destination[self.flipped - offset] ^= 0x40


@pytest.fixture(autouse=True)
def chunks_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_WHOLE_BYTES_MAX", 0)


def encoded(kind: str) -> EncodedVersion:
    if kind == "anchor":
        return encode_coded(JOB, V1, None, None, TARGET)
    how = Coding(slice_bytes_max=1 << 20) if kind == "sliced" else Coding()
    return encode_coded(JOB, V1, WeightVersion(0), BASE, DENSE if kind == "dense" else TARGET, how=how)


@pytest.mark.parametrize("kind", ["sparse", "dense", "anchor", "sliced"])
@pytest.mark.parametrize("box", [ROWS, COLUMNS, ((255, 257), (0, 1024)), ((0, 1024), (0, 1024))])
async def test_a_part_is_exact_and_the_rest_untouched(kind: str, box: Box) -> None:
    relay = CountingRelay()
    relay.publish(encoded(kind))
    committed = await relay.manifest(JOB, V1)
    patches = await fetch_part(relay, committed, {NAME: box}, BASE)
    state = apply_to_state(BASE, patches)
    target = (DENSE if kind == "dense" else TARGET)[NAME]
    assert np.array_equal(boxes.take(state[NAME].words, SHAPE, box), boxes.take(target.words, SHAPE, box))
    outside = np.ones(SHAPE, bool)
    outside[tuple(slice(*edge) for edge in box)] = False
    flat = outside.reshape(-1)
    assert np.array_equal(state[NAME].words[flat], BASE[NAME].words[flat])
    assert relay.fetched <= part_bytes(committed.manifest, {NAME: box})


@pytest.mark.parametrize("kind", ["sparse", "dense", "anchor"])
async def test_rows_of_one_chunk_cost_a_quarter_of_four(kind: str) -> None:
    relay = CountingRelay()
    relay.publish(encoded(kind))
    committed = await relay.manifest(JOB, V1)
    await fetch_part(relay, committed, {NAME: ROWS}, BASE)
    assert relay.fetched < 0.4 * part_bytes(committed.manifest, {NAME: ROWS})


@pytest.mark.parametrize(
    ("where", "wrong"), [("head", True), ("directory", True), ("first", False), ("second", True)]
)
async def test_damage_is_found_where_it_matters(where: str, wrong: bool) -> None:
    relay = CountingRelay()
    version = encoded("sparse")
    relay.publish(version)
    committed = await relay.manifest(JOB, V1)
    (part,) = committed.manifest.parameters[0].slices
    quarter = part.length // 4
    relay.flipped = part.offset + {"head": 2, "directory": 40, "first": 2000, "second": quarter + 2000}[where]
    if not wrong:
        await fetch_part(relay, committed, {NAME: ROWS}, BASE)
        return
    with pytest.raises(CorruptDelta):
        await fetch_part(relay, committed, {NAME: ROWS}, BASE)


async def test_chunks_on_another_base_are_refused() -> None:
    relay = CountingRelay()
    relay.publish(encoded("sparse"))
    committed = await relay.manifest(JOB, V1)
    other = {NAME: BASE[NAME].copy()}
    other[NAME].words[-1] ^= 1  # far from the rows that are wanted
    with pytest.raises(WrongBase):
        await fetch_part(relay, committed, {NAME: ROWS}, other)
