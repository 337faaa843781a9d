"""Processes of a benchmark that do what they are told: a line of words in, a line of JSON out."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rose.errors import RoseError


class Worker:
    """Such a process, which says first that it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready: Any = self._answer()
        """What it said of itself."""

    def ask(self, *words: object) -> Any:
        """Have it do something, and wait for what it answers.  Raises RoseError if it ends instead."""
        if self._process.stdin is None:
            raise AssertionError("its standard input is a pipe")
        try:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says it
        return self._answer()

    def _answer(self) -> Any:
        if self._process.stdout is None:
            raise AssertionError("its standard output is a pipe")
        if not (line := self._process.stdout.readline()):
            raise RoseError("a process of the benchmark has ended: see above")
        return json.loads(line)


@contextlib.contextmanager
def worker(module: str, *arguments: object, prefix: Sequence[str] = ()) -> Iterator[Worker]:
    """Run `python -m module`; `prefix` comes before it.  Killed in the end.  Raises RoseError."""
    command = [*prefix, sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


def say(answer: object) -> None:
    """In a worker: answer."""
    print(json.dumps(answer), flush=True)
