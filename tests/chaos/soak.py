"""`make soak`: work for long, undisturbed; memory, descriptors and threads of the daemons must stay flat.

    python tests/chaos/soak.py [--minutes 30] [--hosts 2] [--agents 8]

Compares the middle third with the last: the first is warming up.  Exits with 1 if one of them grew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from world import Agents, World

_PERIOD_S = 5.0
_SAMPLES_MIN = 9
_GROWTH_MAX = 0.05
_MEMORY_SLACK = 4 << 20
_COUNT_SLACK = 4


class Sample(NamedTuple):
    """What a process holds."""

    memory_bytes: int
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    """Of a process, now.  Raises OSError when it is gone."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return Sample(
        int(status["VmRSS"].split()[0]) << 10,
        sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        int(status["Threads"]),
    )


def growth(samples: list[Sample]) -> list[str]:
    """What grew from the middle third to the last."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    grown = []
    for name in Sample._fields:
        before, after = (statistics.median(getattr(each, name) for each in part) for part in (middle, last))
        slack = max(_GROWTH_MAX * before, _MEMORY_SLACK) if name == "memory_bytes" else _COUNT_SLACK
        if after > before + slack:
            grown.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return grown


def main() -> int:
    """Run, print a table, and judge it."""
    parser = argparse.ArgumentParser(description="Are memory, descriptors and threads flat?")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--agents", type=int, default=8)
    arguments = parser.parse_args()
    samples: dict[str, list[Sample]] = {}
    with World(arguments.hosts) as world:
        work = Agents(world, arguments.agents)
        end_s = time.monotonic() + 60 * arguments.minutes
        period_s = min(_PERIOD_S, 60 * arguments.minutes / _SAMPLES_MIN)
        while time.monotonic() < end_s:
            time.sleep(period_s)
            for daemon in world.daemons:
                samples.setdefault(daemon.name, []).append(sample(daemon.pid))
        work.finish()
        print(f"{arguments.minutes:g} minutes, {work.done} turns, {work.resent} times resent")
    bad = False
    for name, found in samples.items():
        third = len(found) // 3
        mib, count, threads = (
            [
                statistics.median(getattr(each, field) for each in part)
                for part in (found[third : 2 * third], found[2 * third :])
            ]
            for field in Sample._fields
        )
        print(
            f"{name:10} memory {mib[0] / (1 << 20):.1f} -> {mib[1] / (1 << 20):.1f} MiB, "
            f"descriptors {count[0]:.0f} -> {count[1]:.0f}, threads {threads[0]:.0f} -> {threads[1]:.0f}"
        )
        for text in growth(found):
            bad = True
            print(f"{name}: {text}", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
