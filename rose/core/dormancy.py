"""Whether a lent replica is active or inactive: then its engine lives on, and its KV memory is given back.

An inactive replica costs its host little and is active again at once, where a start takes a minute.  On one
device only one engine at a time starts or changes: two that measure free memory at once mistake each other's
for their own.  Emergency cuts wait for nobody.
"""

from __future__ import annotations

from rose.units import NS_PER_MS, NS_PER_S

CHANGE_NS_MAX = 30 * NS_PER_S
"""A change that the engine has not confirmed by then no longer holds up others on the device."""


class Dormancy:
    """Of one replica.  `follows_leases`: inactive while no job holds a lease on it."""

    def __init__(self, *, follows_leases: bool) -> None:
        self._follows_leases = follows_leases
        self.leased = False
        self.switched_off = False
        """By the operator."""
        self.suspended = False
        """Nothing is lent on this host now."""
        self.active = not follows_leases
        """What the engine is told."""
        self.since_ns: int | None = None
        """When the change under way began; None if there is none."""
        self.revision = 0
        """Policy revision that the engine has to obey for the change to be over."""
        self.activation_ms: float | None = None
        """How long the latest activation took, until the engine obeyed."""

    @property
    def wanted(self) -> bool:
        """Whether it should be active."""
        off = self.switched_off or self.suspended
        return not off and (self.leased or not self._follows_leases)

    @property
    def usable(self) -> bool:
        """Whether it is active, and its engine has said so."""
        return self.active and self.since_ns is None

    def changing(self, now_ns: int) -> bool:
        """Whether a change is under way that others on the device have to wait for."""
        if self.since_ns is not None and now_ns - self.since_ns >= CHANGE_NS_MAX:
            self.since_ns = None
        return self.since_ns is not None

    def begin(self, now_ns: int) -> None:
        """Change to what is wanted."""
        assert self.active is not self.wanted
        self.active, self.since_ns, self.revision = self.wanted, now_ns, 0

    def told(self, revision: int) -> None:
        """The engine was sent this revision."""
        if self.since_ns is not None and not self.revision:
            self.revision = revision

    def obeyed(self, revision: int, now_ns: int) -> None:
        """The engine obeys this revision."""
        if self.since_ns is not None and 0 < self.revision <= revision:
            if self.active:
                self.activation_ms = (now_ns - self.since_ns) / NS_PER_MS
            self.since_ns = None

    def engine_gone(self) -> None:
        """There is no engine to change; the next one finds what it is told."""
        self.since_ns = None
