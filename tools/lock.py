#!/usr/bin/env python3
"""Write requirements/*.txt from requirements/*.in: the same pins, with the hash of every file they may mean.

Asks pip which wheel it would take for each supported Python on Linux x86-64 (a dry run: nothing is
installed), and writes down the sha256 of each.  The package index itself is left to pip's settings; no index
or path of this machine reaches the files.  Run it with the Python that has pip, through `make lock`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FOLDER = Path(__file__).resolve().parent.parent / "requirements"
LISTS = {"cpu": PYTHONS, "dev": PYTHONS, "docs": PYTHONS, "audit": PYTHONS, "mooncake": PYTHONS[:3]}
"""Each list, and the Pythons it is for."""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)$")


def normal(name: str) -> str:
    """The name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_for(source: Path, python: str) -> dict[str, str]:
    """sha256 of the wheel that pip takes for each pin of `source`, by normal name."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed",
                   "--no-deps", "--only-binary=:all:", "--python-version", python, "--target", scratch,
                   "--report", str(report), "-r", str(source)]  # fmt: skip
        # pip's configuration files may add local folders, whose copies of a wheel could differ.
        subprocess.run(command, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
        entries = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        normal(entry["metadata"]["name"]): entry["download_info"]["archive_info"]["hashes"]["sha256"]
        for entry in entries
    }


def locked(source: Path, pythons: tuple[str, ...]) -> str:
    """The text of the locked file that belongs to `source`; raises SystemExit for a line that is no pin."""
    found = [hashes_for(source, python) for python in pythons]
    lines = [f"# Written by tools/lock.py from {source.name}; edit that, then `make lock`."]
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        pin = _PIN.match(text)
        if pin is None:
            raise SystemExit(f"{source.name}:{number}: expected NAME==VERSION, got {text!r}")
        digests = sorted({by_name[normal(pin["name"])] for by_name in found})
        lines.append(" \\\n".join([text, *(f"    --hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Lock every list."""
    for name, pythons in LISTS.items():
        target = FOLDER / f"{name}.txt"
        target.write_text(locked(FOLDER / f"{name}.in", pythons), encoding="utf-8")
        print(f"wrote {target.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
