"""How a check of `make gpu-check` runs: in a process of its own, within a time limit.

A check is a function that fills a dictionary of figures, raises Skipped where it cannot run here, and
CheckFailed where what it found is wrong.  A CUDA fault, a hang or a crash ends its process only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / folder) for folder in ("", "daemon", "kernels", "tests/gpu")]
GIB = 1 << 30

Figures = dict[str, float | int | str]


class Skipped(Exception):
    """The check cannot run here; the text says what is missing."""


class CheckFailed(Exception):
    """The check ran, and what it found is wrong."""


class Check(NamedTuple):
    """One line of the table."""

    name: str
    what: str
    run: Callable[[Figures], None]
    limit_s: float


class Outcome(NamedTuple):
    """What became of a check."""

    name: str
    what: str
    status: str
    """passed, failed, skipped, or timed out."""
    seconds: float
    figures: Figures
    detail: str


def need(module: str, package: str = "") -> Any:
    """A module that the check cannot do without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = f"needs {package or module}"
        raise Skipped(missing if str(error.name) == module else f"{missing} ({error})") from None


def need_cuda() -> Any:
    """torch, on a machine where it finds a GPU."""
    torch = need("torch")
    if not torch.cuda.is_available():
        raise Skipped("torch finds no usable GPU")
    return torch


def expect(holds: bool, otherwise: str) -> None:
    """Fail the check unless it holds."""
    if not holds:
        raise CheckFailed(otherwise)


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def environment() -> dict[str, str]:
    """For a child that imports this checkout."""
    paths = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


class Peer:
    """Another process of a check, asked line by line; use as a context."""

    def __init__(self, function: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        module, _, name = function.partition(":")
        code = f"import sys, {module}; {module}.{name}(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env or environment(),
        )  # fmt: skip

    def ask(self, line: str = "") -> str:
        """Send a line and wait for one; without a line, only wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise CheckFailed(f"the other process ended with {self.process.wait(30)}")
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


# ---- in the check's own process -----------------------------------------------------------------


def run_here(check: Check) -> None:
    """Run a check and print its outcome as the last line, in JSON; exceptions it did not foresee go on."""
    figures: Figures = {}
    status, detail = "failed", ""
    try:
        check.run(figures)
        status = "passed"
    except Skipped as reason:
        status, detail = "skipped", str(reason)
    except CheckFailed as reason:
        detail = str(reason)
    finally:
        print(json.dumps({"status": status, "detail": detail, "figures": figures}), flush=True)


# ---- in the process that runs them all --------------------------------------------------------------


def run_apart(check: Check, command: Sequence[str], limit_s: float) -> Outcome:
    """Run `command`, which does `run_here`, and read its outcome; kill it and all it started at the limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-gpu-check-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**environment(), "TMPDIR": scratch},
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return _outcome(check, started, "timed out", {}, f"not done within {limit_s:.0f} s")
    said = _last_json(output)
    detail = said["detail"] or _last_line(errors) if said["status"] == "failed" else said["detail"]
    return _outcome(check, started, said["status"], said["figures"], detail)


def _outcome(check: Check, started: float, status: str, figures: Figures, detail: str) -> Outcome:
    return Outcome(check.name, check.what, status, round(time.monotonic() - started, 1), figures, detail)


def _last_json(output: str) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith('{"status"'):
            return dict(json.loads(line))
    return {"status": "failed", "detail": "", "figures": {}}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def table(outcomes: Sequence[Outcome]) -> str:
    """For people."""
    lines = []
    for each in outcomes:
        detail = f"  {each.detail}" if each.detail else ""
        lines.append(f"{each.status:9}  {each.name:12} {each.seconds:6.1f} s  {each.what}{detail}")
        lines += [f"{'':24}{name:34} {_figure(value)}" for name, value in each.figures.items()]
    return "\n".join(lines)


def _figure(value: float | int | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
