"""Live progress: a small board of rows on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_PLAIN_PERIOD_S = 10.0
"""A row that changes all the time is printed this often where there is no terminal."""


class Screen:
    """`say` prints a line that stays; `show` sets a named row that changes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start_s = time.monotonic()
        self._rows: dict[str, str] = {}
        self._printed_s: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line, with the time since the start."""
        self.console.print(Text.assemble((f"{self._elapsed()} ", "dim"), text), soft_wrap=True)

    def show(self, row: str, text: str) -> None:
        """Set a row; an empty text takes it away."""
        if not text:
            self._rows.pop(row, None)
            return
        changed = self._rows.get(row) != text
        self._rows[row] = text
        now_s = time.monotonic()
        if self._live is None and changed and now_s - self._printed_s.get(row, -1e9) >= _PLAIN_PERIOD_S:
            self._printed_s[row] = now_s
            self.say(f"{row}: {text}")

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._start_s), 60)
        return f"{minutes:02d}:{seconds:02d}"

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Spinner("dots"), Text(self._elapsed(), style="dim"), "")
        for row, text in self._rows.items():
            grid.add_row("", Text(row, style="bold"), Text(text, overflow="ellipsis", no_wrap=True))
        return grid
