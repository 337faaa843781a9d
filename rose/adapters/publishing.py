"""What frameworks call weight synchronisation: a stream of named tensors becomes a version on the relay.

    weights = WeightStream.connect(load(Path("rose.toml")).relay, job, Path("/models/policy"))
    weights.send(model.named_parameters())      # after the optimiser's step

A framework sends what it trains, in its own precision and maybe without what it keeps frozen.  The engines
hold the checkpoint's tensors: a version is these, with what was sent cast to their types.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rose.client import Job
from rose.closing import Closing
from rose.config import RelayConfig
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits, State, UnsupportedTensor, as_bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.publisher import Publisher
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.connecting import connect
from rose.weights.reports import PublishReport

_TORCH_DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Types that are cast to one another."""


class WeightStream(Closing):
    """Publishes one job's weights as a framework streams them.  One thread.

    Beside the publisher's copy of the model it holds what was taken in for the next version, in host memory:
    frameworks gather a parameter from its shards, hand it over, and free it.
    """

    def __init__(self, job: Job, publisher: Publisher) -> None:
        self._job = job
        self._publisher = publisher
        self._taken: dict[str, Bits] = {}

    @classmethod
    def connect(cls, relay: RelayConfig, job: Job, checkpoint: Path, *, timeout_s: float = 60) -> Self:
        """Go on where the job's versions on the relay end; without any, at the checkpoint.

        `checkpoint` is the directory that the engines were started from.  Raises NotFound, CorruptDelta (no
        checkpoint), ConfigError (no relay), WrongBase (versions of another model).
        """
        state = open_checkpoint(checkpoint).state
        link = BlockingRelay(connect(relay, timeout_s=timeout_s))
        return cls(job, Publisher.resume(link, JobId(job.name), state))

    @property
    def job(self) -> Job:
        """Whose weights they are."""
        return self._job

    @property
    def version(self) -> WeightVersion:
        """The newest version; that of the checkpoint at first."""
        return self._publisher.version

    def send(self, tensors: Iterable[tuple[str, Any]], *, timeout_s: float | None = None) -> PublishReport:
        """`take` the tensors and `publish` them."""
        self.take(tensors)
        return self.publish(timeout_s=timeout_s)

    def take(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy tensors for the next version: torch's (any device), NumPy arrays or Bits, by checkpoint name.

        Raises UnsupportedTensor for a name or shape that the checkpoint does not have.
        """
        for name, tensor in tensors:
            self._taken[name] = _fitted(name, tensor, self._publisher.state)

    def publish(self, *, timeout_s: float | None = None) -> PublishReport:
        """Make the next version of what was taken, which turns need from now on.

        Parameters that were not taken stay as they were.  With `timeout_s` it waits until a replica takes
        turns on the version.  Raises what Publisher.publish, Job.require and Job.wait_for_version raise; it
        may then be called again, with nothing new taken.
        """
        state = self._publisher.state
        version = self._publisher.version
        if self._taken or version == 0:
            version = WeightVersion(version + 1)
        report = self._publisher.publish(version, {**state, **self._taken})
        self._taken = {}
        self._job.require(version)
        if timeout_s is not None:
            self._job.wait_for_version(version, replicas=1, timeout_s=timeout_s)
        return report

    def drop(self) -> None:
        """Forget what was taken since the last version."""
        self._taken = {}

    def close(self) -> None:
        """Close the connections to the relay."""
        self._publisher.close()


def _fitted(name: str, tensor: Any, state: State) -> Bits:
    """A copy of the tensor in the type that the checkpoint has."""
    held = state.get(name)
    if held is None:
        raise UnsupportedTensor(f"{name}: the checkpoint has no such parameter", _near(name, state))
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(tensor, torch.Tensor):
        wanted = _TORCH_DTYPES.get(held.dtype) if tensor.is_floating_point() else None
        dtype = tensor.dtype if wanted is None else getattr(torch, wanted)
        bits = as_bits(tensor.detach().to("cpu", dtype, copy=True))
    else:
        bits = as_bits(tensor).copy()
    if not bits.same_form(held):
        raise UnsupportedTensor(
            f"{name}: {bits.dtype} of shape {bits.shape}; the checkpoint has {held.dtype} of {held.shape}"
        )
    return bits


def _near(name: str, state: State) -> str:
    """A hint, where a name of the checkpoint's has something more or less in front."""
    for known in state:
        if known.endswith(f".{name}") or name.endswith(f".{known}"):
            return f"it has {known}"
    return "send the names of the checkpoint's files, not those of a wrapper"
