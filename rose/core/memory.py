"""Serving-first memory sharing: the KV budget of one rollout replica (paper: preemptive memory sharing).

    normal --(headroom entered, or reclaim)--> pressure --(cut applied)--> frozen --(next RL step)--> normal

*Pressure* is one emergency cut: `cut_share` of the budget stays, at least the minimum; the engine aborts
whole requests to get there.  *Frozen* means that the budget does not grow before the next RL step, however
much memory comes free: a budget that follows serving up and down would abort again and again.

"One cut" protects rollout from being cut over and over for the same pressure; it must not leave serving
short either (ours).  So while frozen a second cut waits until the first was applied and `settle_ns` passed,
as only then it shows what came back.  What is free from then on is the *floor*.  A shortage that stands
still at the floor is not cut for again: serving asks for no more, and the next cut would end turns for
nothing.  It is cut for again once free memory has fallen below the floor by `fall_share` of the headroom, as
serving goes on growing; or while less than `critical_share` of the headroom is free, where a serving engine
that wants more could not show it.  Every further cut has a floor of its own, down to the minimum.

An RL step thaws.  The budget then grows by what the next known reading shows to be free beyond the
headroom: never on an unknown reading, never on one from before the thaw, never on one that cannot tell
serving's bytes from others, and never while another engine on the device starts or changes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rose.core.readings import Unknown


class MemoryState(StrEnum):
    """Where a replica's KV budget stands."""

    NORMAL = "normal"
    PRESSURE = "pressure"
    """A cut was decided, and the engine has not confirmed it yet."""
    FROZEN = "frozen"
    """The cut is applied; the budget does not grow before the next RL step."""


class MemoryReading(msgspec.Struct, frozen=True):
    """Memory of the shared device, in bytes."""

    serving_bytes: int | Unknown
    free_bytes: int | Unknown
    total_bytes: int | Unknown
    attributed: bool = True
    """False where it is not known which bytes are the serving engine's: then no budget grows."""

    def headroom_bytes(self, share: float) -> int | Unknown:
        """Bytes to keep free for serving: `share` of the device."""
        return self.total_bytes if isinstance(self.total_bytes, Unknown) else round(share * self.total_bytes)

    def spare_bytes(self, share: float) -> int | Unknown:
        """Free bytes beyond the headroom; negative when serving has grown into it."""
        if isinstance(self.free_bytes, Unknown):
            return self.free_bytes
        if isinstance(self.total_bytes, Unknown):
            return self.total_bytes
        if not 0 <= self.free_bytes <= self.total_bytes or self.total_bytes == 0:
            return Unknown("memory_contradictory")
        return self.free_bytes - round(share * self.total_bytes)


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the policy, from the paper where it names them."""

    headroom_share: float = 0.2
    cut_share: float = 0.5
    budget_blocks_min: int = 4
    settle_ns: int = 1_000_000_000
    """How long after an applied cut a reading counts as taken after it."""
    fall_share: float = 0.1
    """By how much of the headroom free memory has to fall after a cut for another one in the same RL step."""
    critical_share: float = 0.25
    """With less of the headroom free than this, cuts go on."""
    block_bytes: int = 0
    """Bytes of one KV block; 0 if not known: then a thaw gives the whole budget back or nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_share < 1:
            raise ValueError(f"headroom_share must lie in [0, 1), not {self.headroom_share}")
        if not 0 < self.cut_share < 1:
            raise ValueError(f"cut_share must lie between 0 and 1, not {self.cut_share}")
        if not 0 <= self.fall_share <= 1 or not 0 <= self.critical_share <= 1:
            raise ValueError("fall_share and critical_share must lie in [0, 1]")
        if self.budget_blocks_min < 1 or self.settle_ns < 0 or self.block_bytes < 0:
            raise ValueError("budget_blocks_min must be above 0, settle_ns and block_bytes not below")


class Cut(msgspec.Struct, frozen=True):
    """One emergency cut, as decided."""

    before_blocks: int
    after_blocks: int
    reason: str


class MemoryPolicy:
    """The KV budget of one replica, and the state it is in.

    `budget_blocks` is 0 until the engine told how many blocks it has (`sized`).
    """

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self.state = MemoryState.NORMAL
        self.total_blocks = 0
        self.budget_blocks = 0
        self.granted_blocks = 0
        """What the engine says it may use; below the budget where memory is shared and others hold it.
        0 if not known."""
        self.cuts = 0
        self.reserve_bytes = 0
        """What to keep free where that is more than the headroom (`rose.core.takeback`)."""
        self._settled_ns = 0
        self._floor_bytes: int | None = None
        """Most spare bytes (at most 0) that were read since the latest cut settled; None before."""
        self._thaw_due = False
        self._grow_due = False

    @property
    def limit_blocks(self) -> int:
        """What to write into `GatePolicy.kv_budget_blocks`: 0 while the engine may use all it has."""
        return 0 if self.budget_blocks == self.total_blocks else self.budget_blocks

    @property
    def usable_blocks(self) -> int:
        """Blocks that the engine can use now, as far as is known."""
        return min(self.budget_blocks, self.granted_blocks or self.budget_blocks)

    def sized(self, total_blocks: int, granted_blocks: int = 0) -> None:
        """The engine has `total_blocks` KV blocks, and may use `granted_blocks` of them (0: not known).

        A restart with another size keeps a cut budget cut.
        """
        self.granted_blocks = granted_blocks
        if total_blocks <= 0 or total_blocks == self.total_blocks:
            return
        uncut = self.budget_blocks == self.total_blocks and self.state is MemoryState.NORMAL
        first = self.total_blocks == 0
        self.total_blocks = total_blocks
        self.budget_blocks = total_blocks if uncut or first else min(self.budget_blocks, total_blocks)

    def observed(
        self, reading: MemoryReading, now_ns: int, *, may_grow: bool = True, taken_bytes: int = 0
    ) -> Cut | None:
        """The device's memory was read; answers the cut to make, if any.

        A budget that is to grow waits until it `may_grow`, and leaves alone `taken_bytes` of what is spare:
        other budgets have grown by those since the reading.
        """
        spare = reading.spare_bytes(self._settings.headroom_share)
        headroom = reading.headroom_bytes(self._settings.headroom_share)
        if isinstance(spare, Unknown) or isinstance(headroom, Unknown):
            return None
        spare -= max(0, self.reserve_bytes - headroom)
        headroom = max(headroom, self.reserve_bytes)
        cut_due = spare < 0 and self._may_cut(spare, headroom, now_ns)
        self._raise_floor(spare, now_ns)
        if spare < 0:
            return self._cut("headroom_entered") if cut_due else None
        if self._grow_due and may_grow and self.total_blocks and reading.attributed:
            assert self.state is MemoryState.NORMAL, self.state
            self._grow_due = False
            self._grow(max(0, spare - taken_bytes))
        return None

    def reclaim(self, reason: str) -> Cut | None:
        """An operator (or a drill) wants memory back; None if it was cut already, or has nothing to give."""
        return self._cut(reason) if self.state is MemoryState.NORMAL else None

    def applied(self, now_ns: int) -> None:
        """The engine obeys the latest budget."""
        if self.state is not MemoryState.PRESSURE:
            return
        self.state = MemoryState.FROZEN
        self._settled_ns = now_ns + self._settings.settle_ns
        if self._thaw_due:
            self.step_began()

    def engine_gone(self, now_ns: int) -> None:
        """The engine's process ended: a cut in flight is done, as all its memory is back."""
        self.applied(now_ns)

    def step_began(self) -> None:
        """An RL step began: thaw.  A cut in flight lands first."""
        self._thaw_due = self.state is MemoryState.PRESSURE
        if not self._thaw_due:
            self.state = MemoryState.NORMAL
            self._grow_due = True

    def _may_cut(self, spare_bytes: int, headroom_bytes: int, now_ns: int) -> bool:
        match self.state:
            case MemoryState.NORMAL:
                return True
            case MemoryState.PRESSURE:
                return False
            case MemoryState.FROZEN:
                if now_ns < self._settled_ns:
                    return False
                settings, floor = self._settings, self._floor_bytes
                fell = floor is not None and spare_bytes < floor - settings.fall_share * headroom_bytes
                return fell or spare_bytes + headroom_bytes < settings.critical_share * headroom_bytes

    def _raise_floor(self, spare_bytes: int, now_ns: int) -> None:
        """What is free now is what the latest cut has brought, or more than was known to have come back."""
        if self.state is MemoryState.FROZEN and now_ns >= self._settled_ns:
            seen_bytes, floor = min(spare_bytes, 0), self._floor_bytes
            self._floor_bytes = seen_bytes if floor is None else max(floor, seen_bytes)

    def _cut(self, reason: str) -> Cut | None:
        before = self.usable_blocks  # half of what it cannot have anyway would be nothing
        after = min(before, max(self._settings.budget_blocks_min, int(before * self._settings.cut_share)))
        if after == before:
            return None
        self.budget_blocks = after
        self.state = MemoryState.PRESSURE
        self._floor_bytes = None
        self._grow_due = self._thaw_due = False
        self.cuts += 1
        return Cut(before, after, reason)

    def _grow(self, spare_bytes: int) -> None:
        if not self._settings.block_bytes:
            self.budget_blocks = self.total_blocks
            return
        grown = self.budget_blocks + spare_bytes // self._settings.block_bytes
        self.budget_blocks = min(self.total_blocks, grown)
