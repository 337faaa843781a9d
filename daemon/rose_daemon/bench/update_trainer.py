"""The trainer's end of the update that `rose bench link` measures.

    python -m rose_daemon.bench.update_trainer CONFIG MODEL_DIRECTORY ELEMENTS THREADS

Reads from standard input `publish STEP`, which publishes the weights after that step as this version, and
`peer FORMAT STEP`, which pushes the same change in a format of others.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rose import config as configuration
from rose.config import RelayConfig
from rose.units import WeightVersion
from rose.weights.bits import Bits
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion
from rose.weights.encoding import encode_version
from rose.weights.publisher import Publisher
from rose.weights.relay.connecting import connect
from rose_daemon.bench.delta_peers import LINKED
from rose_daemon.bench.transfer import JOB, push
from rose_daemon.bench.update_model import SyntheticModel
from rose_daemon.bench.worker import say

TIMEOUT_S = 120


class Trainer:
    """Holds the model."""

    def __init__(self, relay: RelayConfig, model: SyntheticModel, threads: int) -> None:
        self._relay = relay
        self._model = model
        self._publisher: Publisher | None = Publisher.connect(
            relay, JOB, model.state(0), timeout_s=TIMEOUT_S, coding=Coding(threads=threads), keep=2
        )

    def publish(self, step: int) -> dict[str, Any]:
        """What `publish` took, and when it was called, by this machine's monotonic clock."""
        assert self._publisher is not None
        state = self._model.state(step)
        began_s = time.monotonic()
        report = self._publisher.publish(WeightVersion(step), state)
        ended_s = time.monotonic()
        return {
            "began_monotonic_s": began_s,
            "ended_monotonic_s": ended_s,
            "encode_ms": report.encode_ms,
            "self_check_ms": report.verify_ms,
            "push_ms": report.push_ms,
            "bytes": report.delta_bytes,
            "density": report.density,
            "bytes_per_changed": report.bytes_per_changed,
            "kinds": {kind.kind: kind.density for kind in report.kinds},
        }

    def peer(self, name: str, step: int) -> dict[str, Any]:
        """What encoding and pushing the same step in another format took."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None  # and with it a copy of the model
        base, target = self._model.state(step - 1), self._model.state(step)
        format_ = LINKED[name]()
        began_s = time.monotonic()
        coded = {key: format_.encode(bits.words, target[key].words) for key, bits in base.items()}
        encode_ms = (time.monotonic() - began_s) * 1e3
        blobs = {
            f"{key}#{number}": np.frombuffer(blob, np.uint8)
            for key, parts in coded.items()
            for number, blob in enumerate(parts)
            if len(blob)
        }
        del coded, base, target
        carried = {key: Bits("U8", blob.shape, blob) for key, blob in blobs.items()}
        version = encode_version(JOB, WeightVersion(step), None, None, carried)
        return {
            "encode_ms": encode_ms,
            "push_ms": asyncio.run(self._push(version)) * 1e3,
            "bytes": version.manifest.delta_bytes,
        }

    async def _push(self, version: EncodedVersion) -> float:
        async with connect(self._relay, timeout_s=TIMEOUT_S) as relay:
            for held in (await relay.stat(JOB)).versions:
                await relay.delete(JOB, held)
            return await push(relay, version)


def main(config: str, directory: str, elements: str, threads: str) -> None:
    """Serve until the end of the input."""
    relay = configuration.load(Path(config)).relay
    trainer = Trainer(relay, SyntheticModel.open(Path(directory), int(elements)), int(threads))
    say("ready")
    for line in sys.stdin:
        match line.split():
            case ["publish", step]:
                say(trainer.publish(int(step)))
            case ["peer", name, step]:
                say(trainer.peer(name, int(step)))
            case words:
                raise ValueError(f"{words} is no request")


if __name__ == "__main__":
    main(*sys.argv[1:])
