"""The demo's side of the trainer process: what they tell each other, one JSON message a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rose.errors import EngineFailed, RoseError
from rose_daemon.harness.processes import Child

LINE_BYTES_MAX = 1 << 24


class Sample(msgspec.Struct, frozen=True):
    """One turn: the policy is credited for `output`, given `prompt`."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    advantage: float


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of the process, as JSON."""

    model: str
    """Checkpoint directory of version 0."""
    config: str
    """The rose.toml that names the relay."""
    job: str
    checkpoints: str = ""
    """Directory for a full checkpoint of each version; empty for none."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take a step on the samples and publish the result as `version`."""

    version: int
    samples: tuple[Sample, ...]


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; digests of version 0."""

    digests: dict[str, str]


class Trained(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A version is committed to the relay."""

    version: int
    loss: float
    gradient_norm: float
    tokens: int
    """Output tokens trained on."""
    changed: int
    """Weights whose bf16 bits changed, counted by the trainer."""
    elements: int
    delta_bytes: int
    dense_bytes: int
    density: dict[str, float]
    """Share of changed elements by kind of tensor."""
    train_ms: float
    publish_ms: float
    digests: dict[str, str]
    """xxh3-128 of each parameter's bytes, by checkpoint name."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What was asked could not be done."""

    error: str
    hint: str = ""


Reply = Started | Trained | Failed
_replies = msgspec.json.Decoder(Reply)


def trainer_command(settings: TrainerSettings) -> list[str]:
    """The command line of the process."""
    return [sys.executable, "-m", "rose_daemon.demo.trainer", msgspec.json.encode(settings).decode()]


class Trainer:
    """The running trainer process; its streams are pipes."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def started(self) -> Started:
        """Wait until the model is loaded.  Raises EngineFailed or the trainer's own error."""
        reply = await self._receive()
        assert isinstance(reply, Started), reply
        return reply

    async def train(self, version: int, samples: Sequence[Sample]) -> Trained:
        """Have the next version made and published.  Raises EngineFailed or the trainer's own error."""
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(msgspec.json.encode(Train(version, tuple(samples))) + b"\n")
        await self._child.process.stdin.drain()
        reply = await self._receive()
        assert isinstance(reply, Trained), reply
        return reply

    async def stop(self, grace_s: float) -> None:
        """End the process."""
        await self._child.stop(grace_s)

    async def _receive(self) -> Started | Trained:
        assert self._child.process.stdout is not None
        line = await self._child.process.stdout.readline()
        if not line:
            await self._child.process.wait()
            raise self._child.failure()
        try:
            reply = _replies.decode(line)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"the trainer wrote garbage: {error}", f"see {self._child.log}") from None
        if isinstance(reply, Failed):
            raise RoseError(f"trainer: {reply.error}", reply.hint)
        return reply


def checkpoint_directory(root: Path, version: int) -> Path:
    """Where the trainer keeps the full checkpoint of a version."""
    return root / f"v{version:06d}"
