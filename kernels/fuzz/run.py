"""Build the fuzzer with sanitizers and run it on damaged deltas.

Seeds are encoded here, so they are valid and of every format, mode and shape; `fuzz_delta.c` damages them.
Needs gcc (or CC) with libasan and libubsan.  Exits with the fuzzer's code.

For another machine, without sanitizers:

    CC="aarch64-linux-gnu-gcc -static" python kernels/fuzz/run.py --run-with qemu-aarch64 --count 2000
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rose_kernels.delta import FORMATS, GroupTables, Mode, Settings, Shard, encode_group, read_header

Words = npt.NDArray[Any]

_SOURCES = ("csrc/dispatch.c", "csrc/kernels_avx2.c", "csrc/kernels_portable.c", "fuzz/fuzz_delta.c")
_FLAGS = "-std=c11 -g -O1 -fno-omit-frame-pointer"
_SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


def seeds() -> Iterator[bytes]:
    """Valid inputs in the layout that fuzz_delta.c reads."""
    rng = np.random.default_rng(1)
    for dtype in ("BF16", "F16", "F8_E4M3", "F8_E5M2"):
        element = FORMATS[dtype]
        top = 1 << 8 * element.itemsize
        for n, density, classes, chunk_log2, stateful in (
            (700, 0.05, 8, 9, False), (64, 0.3, 4, 18, False), (1500, 0.02, 1, 10, False),
            (900, 0.05, 6, 9, True), (4200, 0.01, 8, 18, False), (300, 1.0, 2, 8, True),
        ):  # fmt: skip
            centre = 0.23 * top if element.itemsize == 2 else 0.4 * top
            base = np.abs(rng.normal(centre, 0.03 * top, n)).astype(element.word)
            steps = np.where(rng.random(n) < density, rng.geometric(0.3, n), 0)
            target = (base.astype(np.int64) + steps * rng.choice((-1, 1), n)).astype(element.word)
            history = rng.integers(0, 15, n).astype(np.uint8) if stateful else None
            settings = Settings(classes=classes, chunk_log2=chunk_log2)
            group = encode_group([Shard(dtype, base, target, history)], settings)
            if group.shards[0].mode == Mode.SPARSE:
                tables = GroupTables.read(group.tables)
                yield _seed(group.shards[0].data, tables, base, target, history)


def _seed(data: bytes, tables: GroupTables, base: Words, target: Words, history: Words | None) -> bytes:
    header = read_header(data)
    chunks = header.chunks
    payloads = data[chunks[0].offset :]
    ends = np.cumsum([chunk.length for chunk in chunks])
    sizes = (base.size, header.chunk_elements, len(chunks), len(payloads), history is not None)
    parts = (
        np.array(sizes, np.int64), tables.plan.packed, base, target,
        np.zeros(0) if history is None else history, tables.expected, tables.gaps, tables.values,
        ends.astype(np.int64),
    )  # fmt: skip
    return b"".join(part.tobytes() for part in parts) + payloads


def main() -> int:
    """Build, run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200_000, help="damaged inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="of the damage")
    parser.add_argument("--run-with", default="", help="emulator; builds without sanitizers")
    arguments = parser.parse_args()
    kernels = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        program, inputs = Path(folder, "fuzz_delta"), Path(folder, "seeds")
        compiler = shlex.split(os.environ.get("CC", "gcc"))
        sources = [str(kernels / source) for source in _SOURCES]
        emulator = shlex.split(arguments.run_with)
        flags = _FLAGS.split() + ([] if emulator else _SANITIZERS.split())
        subprocess.run([*compiler, *flags, "-o", str(program), *sources], check=True)
        inputs.write_bytes(b"".join(seeds()))
        command = [*emulator, str(program), str(inputs), str(arguments.count), str(arguments.seed)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
