"""Which weight versions of the job can be had, which lie on this host, and how to get from one to another.

A staged version is a delta on its base, or an anchor (no base: applies to any older version).  An engine
moves in order: to a higher version, along deltas whose base it holds, or onto an anchor.  A pin bounds how
far; engines beyond it go back along undos, step by step.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from rose.units import NS_PER_S, WeightVersion

VERSIONS_MAX = 4096
"""Versions remembered; the oldest are forgotten."""
UNDOS_MAX = 256
"""Ways back remembered; those from the oldest versions are forgotten."""
RETRY_NS = NS_PER_S
RETRY_NS_MAX = 60 * NS_PER_S


class Staged(NamedTuple):
    """A version whose files lie verified on this host; as an undo, its base is the higher one."""

    version: WeightVersion
    base: WeightVersion | None
    path: str


class Pull(NamedTuple):
    """A version to fetch, for engines that hold `held`."""

    version: WeightVersion
    held: WeightVersion
    squashed: bool = False
    """As the one delta on `held` that the trainer offers beside the version."""


class _Way(NamedTuple):
    """How to come to a version, and what it takes from where engines are."""

    nbytes: int
    steps: int
    pull: Pull | None
    base: WeightVersion | None = None
    """What the files of the last step are built on."""


class _Retry(NamedTuple):
    failures: int
    at_ns: int


class VersionShelf:
    """The versions of one job on this host.  One pull at a time; failed pulls are retried for ever,
    with a growing pause, as a version may appear (again) at the relay at any time.
    """

    def __init__(self) -> None:
        self._available: list[WeightVersion] = []
        self._staged: dict[WeightVersion, Staged] = {}
        self._by_base: dict[WeightVersion | None, list[WeightVersion]] = {}
        """Staged versions in order, by what they are built on: a chain is followed at every event."""
        self._bases: dict[WeightVersion, WeightVersion | None] = {}
        """What versions at the relay are built on, where that is known; None: an anchor."""
        self._bytes: dict[WeightVersion, int] = {}
        self._squashed: dict[WeightVersion, tuple[WeightVersion, int]] = {}
        """Squashed deltas at the relay: their base and size."""
        self._retries: dict[WeightVersion, _Retry] = {}
        self._undos: dict[WeightVersion, Staged] = {}
        self.pulling: Pull | None = None
        self.pin: WeightVersion | None = None
        """No engine is to go beyond this version."""

    @property
    def newest(self) -> WeightVersion:
        """The newest version known to exist; 0 before any."""
        return self._available[-1] if self._available else WeightVersion(0)

    @property
    def staged(self) -> tuple[WeightVersion, ...]:
        """Versions that lie on this host, in order."""
        return tuple(sorted(self._staged))

    def available(
        self,
        version: WeightVersion,
        base: WeightVersion | None = None,
        *,
        anchor: bool = False,
        nbytes: int = 0,
    ) -> bool:
        """The relay has `version`, built on `base` (if known) or an anchor; False if that cannot be new."""
        if version > 0 and (anchor or (base is not None and base < version)):
            self._bases[version] = None if anchor else base
            self._bytes[version] = nbytes
        at = bisect_right(self._available, version)
        if version <= 0 or (at and self._available[at - 1] == version):
            return False
        insort(self._available, version)
        if len(self._available) > VERSIONS_MAX:
            oldest = self._available.pop(0)
            self._drop(oldest)
            self._retries.pop(oldest, None)
            for known in (self._bases, self._bytes, self._squashed):
                known.pop(oldest, None)
        return True

    def offered_squashed(self, version: WeightVersion, base: WeightVersion, nbytes: int) -> None:
        """The relay has one delta from `base` to a version that is available."""
        if version in self._available and 0 <= base < version:
            self._squashed[version] = base, nbytes

    def arrived(self, staged: Staged) -> bool:
        """The version's files lie on this host; False if that is no version, or not based on an older one."""
        self._no_longer_pulling(staged.version)
        if staged.version <= 0 or (staged.base is not None and staged.base >= staged.version):
            return False
        shortcut = self._squashed.get(staged.version)
        if shortcut is None or shortcut[0] != staged.base or staged.version not in self._bases:
            nbytes = self._bytes.get(staged.version, 0)
            self.available(staged.version, staged.base, anchor=staged.base is None, nbytes=nbytes)
        self._retries.pop(staged.version, None)
        if staged.version in self._available:
            self._drop(staged.version)  # an older copy may have had another base
            self._staged[staged.version] = staged
            insort(self._by_base.setdefault(staged.base, []), staged.version)
        return True

    def failed(self, version: WeightVersion, now_ns: int) -> int:
        """The version could not be had; answers the pause before the next try."""
        failures = self._retries.get(version, _Retry(0, 0)).failures + 1
        pause_ns = min(RETRY_NS << min(failures - 1, 32), RETRY_NS_MAX)
        if version in self._available:
            self._retries[version] = _Retry(failures, now_ns + pause_ns)
        self._no_longer_pulling(version)
        return pause_ns

    def distrust(self, version: WeightVersion) -> None:
        """An engine refused these files: fetch and verify them again."""
        self._drop(version)

    def pruned(self, version: WeightVersion) -> None:
        """The version's files were deleted on this host."""
        self._drop(version)

    def _drop(self, version: WeightVersion) -> None:
        staged = self._staged.pop(version, None)
        if staged is not None:
            self._by_base[staged.base].remove(version)
            if not self._by_base[staged.base]:
                del self._by_base[staged.base]

    def undo_ready(self, undo: Staged) -> bool:
        """There is a way back from `undo.base`; False if it does not lead back."""
        if undo.base is None or not 0 <= undo.version < undo.base:
            return False
        self._undos[undo.base] = undo
        if len(self._undos) > UNDOS_MAX:
            del self._undos[min(self._undos)]
        return True

    def forget_undo(self, base: WeightVersion) -> None:
        """An engine refused to go back from `base` this way."""
        self._undos.pop(base, None)

    def leads_back(self, held: WeightVersion, version: WeightVersion) -> bool:
        """Whether undos lead from `held` to exactly `version` (or nothing needs to be taken back)."""
        start = held
        while held > version and held in self._undos:
            held = self._undos[held].version
        return held == version or start < version

    def beyond_pin(self, held: WeightVersion) -> bool:
        """Whether an engine that holds `held` has to go back."""
        return self.pin is not None and held > self.pin

    def next_step(self, held: WeightVersion) -> Staged | None:
        """Where to go from `held`: back if beyond the pin, else the furthest delta on it or newest anchor."""
        if self.beyond_pin(held):
            return self._undos.get(held)
        for base in (held, None):
            versions = self._by_base.get(base, [])
            end = len(versions) if self.pin is None else bisect_right(versions, self.pin)
            if end and versions[end - 1] > held:
                return self._staged[versions[end - 1]]
        return None

    def next_pull(self, held_by_engines: Iterable[WeightVersion], now_ns: int) -> Pull | None:
        """The version to fetch next so that every engine gets on, or None (also while one is on its way).

        Follows what is staged as far as it leads, then takes the way of fewest bytes from there: along
        deltas, or from the last anchor on, which saves all before it.  Where that way is not known or a
        version on it is not to be had, versions are taken in order; a later one may be an anchor.
        """
        if self.pulling is not None:
            return None
        starts = [self._reached_from(held) for held in held_by_engines]
        for reached in starts:
            for way in (*self._way_from(reached, starts), *self._in_order(reached)):
                if way.pull is not None and self._wanted(way, way.pull.version, now_ns):
                    self.pulling = way.pull
                    return self.pulling
        return None

    def _wanted(self, way: _Way, version: WeightVersion, now_ns: int) -> bool:
        """Whether it does not lie here in this form, and may be tried now."""
        staged = self._staged.get(version)
        if staged is not None and (way.steps == 0 or staged.base == way.base):
            return False
        retry = self._retries.get(version)
        return retry is None or retry.at_ns <= now_ns

    def _in_order(self, reached: WeightVersion) -> list[_Way]:
        """All later versions, whatever they are built on (`steps` 0)."""
        return [_Way(0, 0, Pull(version, reached)) for version in self._later_than(reached)]

    def dead_end(self, held: WeightVersion) -> bool:
        """Whether later versions are wanted, all of them lie here, and none can follow where `held` leads."""
        later = self._later_than(self._reached_from(held))
        return bool(later) and all(version in self._staged for version in later)

    def _reached_from(self, held: WeightVersion) -> WeightVersion:
        """How far the staged versions lead (or the undos, beyond the pin)."""
        while (step := self.next_step(held)) is not None:
            held = step.version
        return held

    def _way_from(self, reached: WeightVersion, others: Iterable[WeightVersion]) -> list[_Way]:
        """The way of fewest bytes to the newest version; empty if none is known.

        A squashed delta is no part of it where it would leave out a version that `others` have reached: they
        need the newest one built on that.
        """
        later = self._later_than(reached)
        ways = {reached: _Way(0, 0, None)}
        for version in later:
            found: list[_Way] = []
            if version in self._bases:
                base = self._bases[version]
                if (start := ways.get(reached if base is None else base)) is not None:
                    nbytes = start.nbytes + self._bytes.get(version, 0)
                    found.append(_Way(nbytes, start.steps + 1, Pull(version, reached), base))
            if version in self._squashed:
                base, size = self._squashed[version]
                if base in ways and not any(base < other < version for other in others):
                    start = ways[base]
                    pull = Pull(version, base, squashed=True)
                    found.append(_Way(start.nbytes + size, start.steps + 1, pull, base))
            if found:
                ways[version] = min(found, key=lambda way: (way.nbytes, way.steps))
        way: list[_Way] = []
        at = later[-1] if later else reached
        while (step := ways.get(at)) is not None and step.pull is not None:
            way.append(step)
            at = reached if step.base is None else step.base
        return way[::-1]

    def _later_than(self, version: WeightVersion) -> list[WeightVersion]:
        end = len(self._available) if self.pin is None else bisect_right(self._available, self.pin)
        return self._available[bisect_right(self._available, version) : end]

    def _no_longer_pulling(self, version: WeightVersion) -> None:
        if self.pulling is not None and self.pulling.version == version:
            self.pulling = None
