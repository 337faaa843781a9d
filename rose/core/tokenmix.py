"""Hardware affinity (RollArt, arXiv 2512.22560): which kind of device suits a task's turns.

Prefill is bound by compute, decoding by memory bandwidth.  What a task's turns do is measured: prompt tokens
that no prefix covers, against tokens generated.
"""

from __future__ import annotations

from collections import OrderedDict

from rose.units import JobId

COMPUTE = "compute"
BANDWIDTH = "bandwidth"
EITHER = ""

_TASKS_MAX = 1024
_SMOOTHING = 0.05
_TURNS_MIN = 8
"""Turns of a task before its mix is acted upon."""


class TokenMix:
    """Moving averages per job and task; bounded, least recently seen first to go."""

    def __init__(self, prefill_per_output: float) -> None:
        """Tasks with more fresh prompt tokens per generated token than that are prefill-heavy."""
        self._threshold = prefill_per_output
        self._tasks: OrderedDict[tuple[JobId, str], tuple[int, float, float]] = OrderedDict()

    def observe(self, job: JobId, task: str, fresh_tokens: int, output_tokens: int) -> None:
        """A turn finished."""
        turns, fresh, output = self._tasks.pop((job, task), (0, float(fresh_tokens), float(output_tokens)))
        weight = max(_SMOOTHING, 1 / (turns + 1))
        fresh += weight * (fresh_tokens - fresh)
        output += weight * (output_tokens - output)
        self._tasks[job, task] = (turns + 1, fresh, output)
        if len(self._tasks) > _TASKS_MAX:
            self._tasks.popitem(last=False)

    def suits(self, job: JobId, task: str) -> str:
        """COMPUTE, BANDWIDTH, or EITHER while too little is known."""
        turns, fresh, output = self._tasks.get((job, task), (0, 0.0, 0.0))
        if turns < _TURNS_MIN:
            return EITHER
        return COMPUTE if fresh > self._threshold * output else BANDWIDTH

    def drop_job(self, job: JobId) -> None:
        """The job is over."""
        for key in [key for key in self._tasks if key[0] == job]:
            del self._tasks[key]
