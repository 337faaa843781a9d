"""`make fuzz`: feed damaged inputs to everything that reads what comes from outside.

    python tests/fuzz/run.py [--inputs N] [--seed S] [--target NAME]

Exits with 1, and the input, at the first that is not answered in words.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from targets import Finding, run, targets


def main() -> int:
    """Run all targets, or one."""
    parser = argparse.ArgumentParser(description="Fuzz what reads inputs from outside.")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="", help="only this one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rose-fuzz-") as directory:
        chosen = {name: each for name, each in targets(Path(directory)) if arguments.target in ("", name)}
        if not chosen:
            parser.error(f"there is no target {arguments.target!r}")
        for name, target in chosen.items():
            began_s = time.monotonic()
            try:
                accepted = run(target, arguments.inputs, arguments.seed)
            except Finding as finding:
                print(f"{name}: {finding}", file=sys.stderr)
                return 1
            took_s = time.monotonic() - began_s
            print(f"{name}: {arguments.inputs} inputs, {accepted} accepted, {took_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
