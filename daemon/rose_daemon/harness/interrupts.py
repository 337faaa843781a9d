"""Ctrl-C, in order: the first asks everything to end and waits for it, the second kills."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

INTERRUPTED = 130
"""Exit code of a program that was interrupted (128 + SIGINT)."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signals of this process while `run` works."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.hurry: Callable[[], None] = lambda: None
        """Called at the second signal; set by what is running."""
        self._say = say
        self._count = 0

    def run(
        self,
        work: Coroutine[Any, Any, ResultT],
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> ResultT | None:
        """Run `work`; None when it was interrupted, after it has cleaned up."""
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            loop = runner.get_loop()
            task = loop.create_task(work)
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._on_signal, task)
            try:
                return loop.run_until_complete(task)
            except asyncio.CancelledError:
                if not self._count:
                    raise  # nobody interrupted it: a fault, which is not to pass for one
                return None

    def _on_signal(self, task: asyncio.Task[Any]) -> None:
        self._count += 1
        if self._count == 1:
            self._say("interrupted: stopping what was started (again: kill it)")
            task.cancel()
        else:
            self.hurry()
