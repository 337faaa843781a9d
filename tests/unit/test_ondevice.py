"""Weights on a device: the same versions, byte for byte, and only what changed leaves it.

The GPU's kernels are compiled for the host, and NumPy stands in for CuPy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_on_host import HostDevice, host_device
from weight_states import JOB, MemoryRelay, fail_once, same, stepped, tensor

from rose.errors import ConfigError, RoseError
from rose.units import WeightVersion
from rose.weights import Publisher, coding, ondevice
from rose.weights import publisher as publishing
from rose.weights.bits import Bits, State
from rose.weights.coding import Coding
from rose.weights.ondevice import Laid
from rose.weights.relay.blocking import BlockingRelay

CODING = Coding(slice_bytes_max=1 << 14)
"""Two slices of the largest parameter."""


def weights() -> dict[str, Bits]:
    rng = np.random.default_rng(5)
    plain = rng.normal(0, 0.02, 1 << 13).astype(np.float32).view(np.uint32) >> 16
    return {
        "experts": Bits("BF16", (4, 32, 64), plain.astype("<u2")),
        "frozen": tensor("BF16", (64, 64), 1),
        "norm": tensor("F32", (32,), 3),
        "quantised": tensor("F8_E4M3", (33, 64), 4),
    }


STATES: list[State] = [weights()]
for _version in range(1, 4):
    STATES.append(stepped(STATES[-1], _version) | {"frozen": STATES[0]["frozen"]})


@dataclass
class OnDevice:
    """A tensor that the host cannot read."""

    bits: Bits


class CountingDevice:
    """Counts what leaves it."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self.arrays, self.current, self.run = device.arrays, device.current, device.run
        self.left_bytes = 0

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        self.left_bytes += array.nbytes
        return self._device.to_host(array)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    return host_device(tmp_path_factory.mktemp("changes"))


@pytest.fixture(autouse=True)
def one_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes its time where threads come one after another."""
    monkeypatch.setattr(coding, "_FEWER_CLASSES", ())


@pytest.fixture
def device(compiled: HostDevice, monkeypatch: pytest.MonkeyPatch) -> CountingDevice:
    made = CountingDevice(compiled)

    def lay(value: object) -> Laid | None:
        if not isinstance(value, OnDevice):
            return None
        return Laid(value.bits.dtype, value.bits.shape, value.bits.words, made)

    monkeypatch.setattr(publishing, "on_gpu", lay)
    monkeypatch.setattr(publishing, "require_cupy", lambda: None)
    return made


def there(state: State) -> dict[str, object]:
    """As a trainer holds it: what has a sparse form lies on the device."""
    return {name: bits if bits.dtype == "F32" else OnDevice(bits) for name, bits in state.items()}


def publisher_of(relay: MemoryRelay, **options: Any) -> Publisher:
    return Publisher(BlockingRelay(relay), JOB, STATES[0], coding=CODING, **options)


def manifests(relay: MemoryRelay) -> Mapping[WeightVersion, bytes]:
    """With digests of every byte that was pushed."""
    return {each: relay.vault.manifest((JOB, each)) for each in relay.vault.stat(JOB).versions}


def publish(publisher: Publisher, *versions: int) -> None:
    for version in versions:
        publisher.publish(WeightVersion(version), there(STATES[version]))


@pytest.fixture
def expected() -> Mapping[WeightVersion, bytes]:
    """What a publisher makes of the same weights on the host."""
    relay = MemoryRelay()
    publisher = publisher_of(relay)
    for version, state in enumerate(STATES[1:], 1):
        publisher.publish(WeightVersion(version), state)
    publisher.close()
    return manifests(relay)


def test_versions_are_the_same_byte_for_byte(
    device: CountingDevice, expected: Mapping[WeightVersion, bytes]
) -> None:
    relay = MemoryRelay()
    publisher = publisher_of(relay, on_gpu=True)
    publish(publisher, 1, 2, 3)
    assert manifests(relay) == expected
    assert same(publisher.state, STATES[3])
    publisher.close()


def test_only_what_changed_leaves_the_device(device: CountingDevice) -> None:
    """And the sample that thresholds are chosen from."""
    large = [{"w": tensor("BF16", (1 << 10, 1 << 11), 1)}]
    words = large[0]["w"].words.copy()
    words[:: 1 << 7] ^= 1
    large.append({"w": Bits("BF16", (1 << 10, 1 << 11), words)})
    publisher = Publisher(BlockingRelay(MemoryRelay()), JOB, large[0], on_gpu=True)
    report = publisher.publish(WeightVersion(1), there(large[1]))
    assert report.changed == words.size >> 7
    assert device.left_bytes < words.nbytes / 2
    publisher.close()


def test_after_a_failure_it_is_compared_with_what_was_committed(
    device: CountingDevice, expected: Mapping[WeightVersion, bytes]
) -> None:
    relay = MemoryRelay()
    publisher = publisher_of(relay, on_gpu=True)
    publish(publisher, 1)
    relay.before = fail_once("put_bucket")
    with pytest.raises(RoseError):
        publisher.publish(WeightVersion(2), there(STATES[3]))
    publish(publisher, 2, 3)
    found = manifests(relay)
    assert found == {version: expected[version] for version in found}
    assert len(found) == 3
    publisher.close()


def test_a_version_whose_commit_was_not_answered_is_the_next_base(
    device: CountingDevice, expected: Mapping[WeightVersion, bytes]
) -> None:
    relay = MemoryRelay()
    publisher = publisher_of(relay, on_gpu=True)
    publish(publisher, 1)
    left = ["commit", "commit"]  # the first commit tells what is missing, the second makes it visible

    def lose_the_answer(call: str) -> None:
        if call == "commit" and left:
            left.pop()
            if not left:
                raise RoseError("cable pulled")

    relay.after = lose_the_answer
    with pytest.raises(RoseError, match="cable"):
        publish(publisher, 2)
    publish(publisher, 3)
    assert manifests(relay) == {version: expected[version] for version in map(WeightVersion, (1, 2, 3))}
    publisher.close()


def test_anchors_and_what_changes_all_over_come_whole(device: CountingDevice) -> None:
    relay, reference = MemoryRelay(), MemoryRelay()
    noise = STATES[0] | {"experts": tensor("BF16", (4, 32, 64), 9)}
    steps: list[State] = [noise, STATES[1]]
    for made, on_gpu in ((relay, True), (reference, False)):
        publisher = publisher_of(made, on_gpu=on_gpu, anchor_every=2)
        for version, state in enumerate(steps, 1):
            publisher.publish(WeightVersion(version), there(state) if on_gpu else state)
        publisher.close()
    assert manifests(relay) == manifests(reference)


def test_a_trainer_that_resumes_goes_on_from_the_device(
    device: CountingDevice, expected: Mapping[WeightVersion, bytes]
) -> None:
    relay = MemoryRelay()
    first = publisher_of(relay, on_gpu=True)
    publish(first, 1, 2)
    first.close()
    second = Publisher.resume(BlockingRelay(relay), JOB, STATES[0], coding=CODING, on_gpu=True)
    publish(second, 3)
    assert manifests(relay) == expected
    second.close()


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "rose_kernels.delta.cuda", raising=False)
    with pytest.raises(ConfigError, match="CuPy"):
        publisher_of(MemoryRelay(), on_gpu=True)


class FakeTensor:
    """torch's, as far as it is looked at."""

    def __init__(self, dtype: str, *, cuda: bool = True, contiguous: bool = True) -> None:
        self.dtype, self.shape, self.is_cuda, self._contiguous = f"torch.{dtype}", (4, 8), cuda, contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (FakeTensor("bfloat16"), "BF16"),
        (FakeTensor("float8_e4m3fn"), "F8_E4M3"),
        (FakeTensor("bfloat16", cuda=False), None),
        (FakeTensor("bfloat16", contiguous=False), None),
        (FakeTensor("float32"), None),
        (FakeTensor("complex64"), None),
        (np.zeros(4, np.float16), None),
    ],
)
def test_which_tensors_are_compared_on_the_gpu(
    value: object, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = SimpleNamespace(device=SimpleNamespace(id=3))
    cuda = SimpleNamespace(words=lambda dtype, each: words, gpu=lambda number: ("gpu", number))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=FakeTensor))
    monkeypatch.setitem(sys.modules, "rose_kernels.delta.cuda", cuda)
    laid = ondevice.on_gpu(value)
    assert (None if laid is None else laid.dtype) == taken
    if laid is not None:
        assert (laid.shape, laid.words, laid.device) == ((4, 8), words, ("gpu", 3))
