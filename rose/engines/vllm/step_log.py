"""The steps of an engine, one by one, for whoever wants to know what ran when: off unless asked for."""

from __future__ import annotations

from rose.core.readings import StepRecord
from rose.engines.vllm.settings import PluginSettings
from rose.rings import RingWriter


class StepLog:
    """Writes a record a step into bounded rings; costs some microseconds a step, or nothing while off.

    A ring has one reader, so there is one for rosed and one for whoever measures.
    """

    def __init__(self, settings: PluginSettings, name: str) -> None:
        """`name` is that of the engine's board.  Raises OSError when a ring cannot be made."""
        self._number = 0
        boards = settings.boards
        wanted = ((settings.step_log, boards.steps(name)), (settings.lent_log, boards.lent_steps(name)))
        self._rings = tuple(RingWriter(path, StepRecord) for on, path in wanted if on)

    def ended(self, started_ns: int, ended_ns: int, tokens: int) -> None:
        """A step had the device from `started_ns` to `ended_ns`."""
        if not self._rings:
            return
        self._number += 1
        record = StepRecord(self._number, started_ns, ended_ns, tokens)
        for ring in self._rings:
            ring.write(record)
