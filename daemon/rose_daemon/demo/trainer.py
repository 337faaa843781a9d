"""The trainer process: `python -m rose_daemon.demo.trainer SETTINGS`, see `training` for what it is told.

It holds fp32 master weights, takes one AdamW step on a batch of turns, and publishes the bf16 copy as the
next version.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rose.config import load
from rose.errors import ConfigError, RoseError
from rose.units import JobId, WeightVersion
from rose.weights.publisher import Publisher
from rose_daemon.demo.grpo import accumulate_gradient
from rose_daemon.demo.training import (
    Failed,
    Reply,
    Sample,
    Started,
    Train,
    Trained,
    TrainerSettings,
    checkpoint_directory,
)

LEARNING_RATE = 1e-6
GRADIENT_NORM_MAX = 1.0


class Learner:
    """Master weights, their optimiser, and the bf16 copy that engines run."""

    def __init__(self, model: Any) -> None:
        self._model = model.float().train()
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)

    @classmethod
    def load(cls, directory: Path) -> Learner:
        """Start from a checkpoint.  Raises ConfigError when it is not one."""
        try:
            model = Qwen3ForCausalLM.from_pretrained(  # a folder of this host  # nosec B615
                directory, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: not a Qwen3 checkpoint: {error}") from None
        return cls(model)

    def copy(self) -> dict[str, torch.Tensor]:
        """The weights as engines hold them: bf16, by checkpoint name."""
        return {name: value.detach().to(torch.bfloat16) for name, value in self._model.named_parameters()}

    def step(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """One optimiser step; (loss, gradient norm before clipping)."""
        self._optimiser.zero_grad(set_to_none=True)
        loss = accumulate_gradient(self._model, samples)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM_MAX)
        self._optimiser.step()
        return loss, float(norm)


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """xxh3-128 of each parameter's bytes, made here and not by the library under test."""
    return {
        name: xxhash.xxh3_128_hexdigest(value.contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in state.items()
    }


def changed_elements(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> int:
    """Weights whose bits differ."""
    bits = ((before[name].view(torch.int16), value.view(torch.int16)) for name, value in after.items())
    return sum(int((old != new).sum()) for old, new in bits)


class TrainerService:
    """Carries out commands."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._learner = Learner.load(Path(settings.model))
        self._state = self._learner.copy()
        relay = load(Path(settings.config)).relay
        self._publisher = Publisher.connect(relay, JobId(settings.job), self._state)

    def start(self) -> Started:
        """Digests of version 0."""
        return Started(digests(self._state))

    def train(self, command: Train) -> Trained:
        """Make the next version and publish it.  Raises RoseError."""
        began_s = time.monotonic()
        loss, norm = self._learner.step(command.samples)
        state = self._learner.copy()
        trained_s = time.monotonic()
        report = self._publisher.publish(WeightVersion(command.version), state)
        published_s = time.monotonic()
        changed = changed_elements(self._state, state)
        self._state = state
        if self._settings.checkpoints:
            self._save(command.version)
        return Trained(
            version=command.version,
            loss=loss,
            gradient_norm=norm,
            tokens=sum(len(sample.output) for sample in command.samples),
            changed=changed,
            elements=report.elements,
            delta_bytes=report.delta_bytes,
            dense_bytes=report.dense_bytes,
            density={kind.kind: kind.density for kind in report.kinds},
            train_ms=1e3 * (trained_s - began_s),
            publish_ms=1e3 * (published_s - trained_s),
            digests=digests(state),
        )

    def _save(self, version: int) -> None:
        """A full checkpoint that an engine can be started from."""
        directory = checkpoint_directory(Path(self._settings.checkpoints), version)
        shutil.copytree(self._settings.model, directory, dirs_exist_ok=True)
        save_file(self._state, directory / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> int:
    """Load, then carry out commands from standard input until it ends."""
    # Replies get the standard output for themselves: what a library prints goes to the log.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()

    def answer(reply: Reply) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")

    commands = msgspec.json.Decoder(Train)
    try:
        service = TrainerService(msgspec.json.decode(arguments[0], type=TrainerSettings))
        answer(service.start())
        for line in sys.stdin.buffer:
            answer(service.train(commands.decode(line)))
    except RoseError as error:
        print(f"rose: {error}", file=sys.stderr)
        answer(Failed(error.what, error.hint))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
