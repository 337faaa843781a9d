"""Who may use a GPU that serving and rollout share: one policy object for each device.

ROSE's own is `rose_sim.gated`.  These stand for the systems it is compared with; each says what it assumes.
"""

from __future__ import annotations

from collections.abc import Callable

from rose_sim.engine import ALONE, Engine
from rose_sim.loop import Loop
from rose_sim.steps import Request

TURNS = 4
"""Halves: without MPS the device gives each its turn, so that a step takes twice as long."""

Interrupt = Callable[[Request, int, str], None]


class Sharing:
    """Base: a serving engine that has its GPU for itself."""

    def __init__(self, loop: Loop, serving: Engine, rollout: Engine | None) -> None:
        self.loop = loop
        self.serving = serving
        self.rollout = rollout
        self.interrupt: Interrupt | None = None
        """Told of rollout requests that had to end early: (request, tokens it got, reason)."""
        self.gate_open_ps = 0
        self.cuts = 0

    def arriving(self, request: Request) -> None:
        """A serving request is about to be submitted."""

    def arrived(self, request: Request) -> None:
        """It was."""

    def first_token(self, request: Request) -> None:
        """A serving request got its first token."""

    def finished(self, request: Request) -> None:
        """A serving request is complete."""

    def step_began(self) -> None:
        """An RL step begins."""

    def gate_open(self) -> bool:
        """Whether rollout may run at the moment."""
        return True

    def opened_ps(self) -> int:
        """For how long rollout was let run, up to now."""
        return self.gate_open_ps

    def loaded(self) -> bool:
        """Whether the serving model is on the device."""
        return True


class Contending(Sharing):
    """Both engines run whenever they have work; the device takes turns between them.

    While both have work, each step takes twice as long.  Nothing is reserved and nothing gives way: this is
    co-location without a policy, and what Prism's sharing comes to for a second model whose load has no
    deadline of its own.  With `eviction`, a serving model that had no request for the first of the two times
    is evicted; loading it again takes the second.
    """

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, eviction: tuple[int, int] | None = None
    ) -> None:
        super().__init__(loop, serving, rollout)
        self._shared = False
        self._eviction = eviction
        self._loaded = True
        self._idle_mark = 0
        serving.changed = rollout.changed = self._changed
        self._watch()

    def arriving(self, request: Request) -> None:
        """Wait for the step in flight of the other engine, and for the model if it was evicted."""
        assert self.rollout is not None
        self._idle_mark += 1
        if self.rollout.in_step and not self.serving.load:
            self.serving.hold(self.rollout.step_end_ps())
        if not self._loaded:
            assert self._eviction is not None
            self._loaded = True
            self.cuts += 1
            self.serving.hold(self.loop.now_ps + self._eviction[1])

    def finished(self, request: Request) -> None:
        """Watch for idleness."""
        self._watch()

    def loaded(self) -> bool:
        """Whether the serving model is on the device."""
        return self._loaded

    def _watch(self) -> None:
        if self._eviction is not None and self.serving.load == 0:
            self._idle_mark += 1
            self.loop.after(self._eviction[0], self._idle, self._idle_mark)

    def _idle(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark:
            self._loaded = False

    def _changed(self, _now_ps: int) -> None:
        assert self.rollout is not None
        both = self.serving.load > 0 and self.rollout.load > 0
        if both != self._shared:
            self._shared = both
            self.serving.share(TURNS if both else ALONE)
            self.rollout.share(TURNS if both else ALONE)


class Swapping(Sharing):
    """One model on the device at a time (ServerlessLLM with rollout as a second model).

    A serving request that finds rollout there ends it (its requests go elsewhere and are prefilled anew), and
    waits until the serving model is loaded; rollout comes back when serving has been idle for `keep_alive`
    and its model is loaded again.
    """

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, *, load_ps: tuple[int, int], keep_alive_ps: int
    ) -> None:
        super().__init__(loop, serving, rollout)
        self._rollout = rollout
        self._load_serving_ps, self._load_rollout_ps = load_ps
        self._keep_alive_ps = keep_alive_ps
        self.serves = False
        """The serving model is on the device, or on its way there."""
        self.evict: Callable[[], None] | None = None
        self.restore: Callable[[], None] | None = None
        self._idle_mark = 0

    def arriving(self, request: Request) -> None:
        """Take the device from rollout."""
        self._idle_mark += 1
        if not self.serves:
            self.serves = True
            self.cuts += 1
            if self.evict is not None:
                self.evict()
            self.serving.hold(self.loop.now_ps + self._load_serving_ps)

    def finished(self, request: Request) -> None:
        """Give it back after a while."""
        if self.serving.load == 0:
            self._idle_mark += 1
            self.loop.after(self._keep_alive_ps, self._idle, self._idle_mark)

    def _idle(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark and self.serves:
            self.loop.after(self._load_rollout_ps, self._loaded, mark)

    def _loaded(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark and self.serves:
            self.serves = False
            if self.restore is not None:
                self.restore()

    def gate_open(self) -> bool:
        """Whether rollout has the device."""
        return not self.serves

    def loaded(self) -> bool:
        """Whether serving has it."""
        return self.serves
