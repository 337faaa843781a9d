"""The host's end for formats of others in `rose bench link`: pulls a change and writes it over the weights.

    python -m rose_daemon.bench.update_puller CONFIG MODEL_DIRECTORY ELEMENTS

Reads `FORMAT STEP` from standard input.  It checks nothing while the time runs, writes no file and has no
engine: what it takes is the least that these formats can take.
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
from rose.errors import CorruptDelta
from rose.units import WeightVersion
from rose.weights import container
from rose.weights.bits import State
from rose.weights.relay.connecting import connect
from rose_daemon.bench.delta_peers import LINKED
from rose_daemon.bench.transfer import JOB, Puller
from rose_daemon.bench.update_model import SyntheticModel
from rose_daemon.bench.update_trainer import TIMEOUT_S
from rose_daemon.bench.worker import say


async def pull(config: RelayConfig, model: SyntheticModel, name: str, step: int) -> dict[str, Any]:
    """Milliseconds of the pull and of writing.  Raises CorruptDelta if that gives other weights."""
    held = model.state(step - 1)
    async with connect(config, timeout_s=TIMEOUT_S) as relay:
        manifest = (await relay.manifest(JOB, WeightVersion(step))).manifest
        puller = Puller(relay, manifest)
        pull_s = await puller.pull()
    buckets = {bucket: np.frombuffer(view, np.uint8) for bucket, view in puller.memory.items()}
    blobs = {patch.name: patch.values for patch in container.decode_patches(manifest, buckets)}
    format_ = LINKED[name]()
    coded = {key: _blobs_of(key, blobs) for key in held}
    began_s = time.monotonic()
    for key, parts in coded.items():
        if parts:
            format_.decode(parts, held[key].words)
    decode_ms = (time.monotonic() - began_s) * 1e3
    _check(held, model.state(step))
    return {"pull_ms": pull_s * 1e3, "decode_ms": decode_ms}


def _blobs_of(key: str, blobs: dict[str, Any]) -> list[Any]:
    return [blobs[name] for number in (0, 1) if (name := f"{key}#{number}") in blobs]


def _check(held: State, target: State) -> None:
    for name, bits in target.items():
        if not np.array_equal(held[name].words, bits.words):
            raise CorruptDelta(f"{name}: other weights than the trainer's")


def main(config: str, directory: str, elements: str) -> None:
    """Serve until the end of the input."""
    relay = configuration.load(Path(config)).relay
    model = SyntheticModel.open(Path(directory), int(elements))
    say("ready")
    for line in sys.stdin:
        name, step = line.split()
        say(asyncio.run(pull(relay, model, name, int(step))))


if __name__ == "__main__":
    main(*sys.argv[1:])
