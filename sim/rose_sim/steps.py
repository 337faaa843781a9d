"""What an engine works on: requests, and runs of steps whose batch does not change."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rose_sim.engine import Engine


class Request:
    """One LLM call in an engine."""

    __slots__ = (
        "cached",
        "engine",
        "finish_step",
        "finished_ps",
        "first_ps",
        "kept",
        "key",
        "number",
        "output",
        "owner",
        "prefilled",
        "prompt",
        "reserved",
        "sent_ps",
        "started_ps",
    )  # fmt: skip

    def __init__(self, prompt: int, output: int, *, key: object = None, owner: Any = None) -> None:
        assert prompt > 0, prompt
        assert output > 0, output
        self.prompt = prompt
        self.output = output
        self.key = key
        """Whose prefix it continues."""
        self.owner = owner
        self.engine: Engine | None = None
        self.number = 0
        self.cached = 0
        """Prompt tokens found in the prefix cache."""
        self.prefilled = 0
        self.kept = 0
        """Prompt tokens whose KV was handed over by another engine (prefill elsewhere)."""
        self.reserved = 0
        self.finish_step = -1
        """Step after which it is complete; -1 before its first token."""
        self.sent_ps = 0
        self.started_ps = -1
        self.first_ps = -1
        self.finished_ps = -1


class Work(NamedTuple):
    """What an engine did since it came."""

    steps: int
    busy_ps: int
    context_steps: int
    """Sum over steps of the context lengths read."""
    prefill_tokens: int
    decode_tokens: int


class Run:
    """Steps under way."""

    __slots__ = ("chunk", "end_ps", "first", "more", "packed", "start_ps", "steps")

    def __init__(self, start_ps: int, first: int, more: int, steps: int, chunk: int) -> None:
        self.start_ps = start_ps
        self.first = first
        self.more = more
        self.steps = steps
        self.chunk = chunk
        """Prompt tokens of the head of the line in each step; 0 in a run of decodes only."""
        self.packed: Sequence[tuple[Request, int]] = ()
        """Prompts that share the (single) step, with their tokens."""
        self.end_ps = start_ps + steps * first + more * (steps * (steps - 1) // 2)

    def total(self, steps: int) -> int:
        """Duration of the first `steps` steps."""
        return steps * self.first + self.more * (steps * (steps - 1) // 2)

    def complete(self, now_ps: int) -> int:
        """Steps over at `now_ps`."""
        elapsed = now_ps - self.start_ps
        if elapsed < self.first:
            return 0
        if self.more == 0:
            return min(self.steps, elapsed // self.first)
        # total(n) <= elapsed: n is the root of more/2 n^2 + (first - more/2) n - elapsed, rounded down
        linear = 2 * self.first - self.more
        count = (isqrt(linear * linear + 8 * self.more * elapsed) - linear) // (2 * self.more)
        while self.total(count + 1) <= elapsed:
            count += 1
        while self.total(count) > elapsed:
            count -= 1
        return min(self.steps, count)
