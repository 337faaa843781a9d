"""The steps of an engine, one by one, for whoever wants to know what ran when: off unless asked for."""

from __future__ import annotations

from rose.core.readings import StepRecord
from rose.engines.vllm.settings import PluginSettings
from rose.rings import RingWriter


class StepLog:
    """Writes a record a step into a bounded ring; costs some microseconds a step, or nothing while off."""

    def __init__(self, settings: PluginSettings, name: str) -> None:
        """`name` is that of the engine's board.  Raises OSError when the ring cannot be made."""
        self._number = 0
        self._ring = RingWriter(settings.boards.steps(name), StepRecord) if settings.step_log else None

    def ended(self, started_ns: int, ended_ns: int, tokens: int) -> None:
        """A step had the device from `started_ns` to `ended_ns`."""
        if self._ring is not None:
            self._number += 1
            self._ring.write(StepRecord(self._number, started_ns, ended_ns, tokens))
