"""KV memory of one simulated engine: what running requests hold, and the prefixes kept between turns."""

from __future__ import annotations

from collections import OrderedDict

BLOCK_TOKENS = 16


def blocks_up(tokens: int) -> int:
    """Tokens that whole blocks for `tokens` hold."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class KvLedger:
    """Tokens in use, never more than the capacity, never below zero.

    A request reserves its final length when it is admitted, which the simulator knows and vLLM does not: the
    ledger therefore never has to pre-empt a running request, where vLLM now and then would.
    A kept prefix gives way to running requests, least recently used first.
    """

    def __init__(self, capacity_tokens: int, *, keep_prefixes: bool) -> None:
        self.capacity = capacity_tokens
        self.running = 0
        """Tokens reserved by running requests."""
        self.kept = 0
        """Tokens of prefixes that no running request holds."""
        self.peak = 0
        """Most tokens reserved by running requests at once."""
        self.evicted = 0
        """Tokens of prefixes dropped for want of room."""
        self._keep = keep_prefixes
        self._prefixes: OrderedDict[object, int] = OrderedDict()

    @property
    def used(self) -> int:
        """All tokens that occupy memory."""
        return self.running + self.kept

    def fits_ever(self, tokens: int) -> bool:
        """Whether a request of that final length could run alone."""
        return blocks_up(tokens) <= self.capacity

    def prefix(self, key: object) -> int:
        """Tokens kept for `key`."""
        return self._prefixes.get(key, 0)

    def admit(self, key: object, tokens: int) -> int | None:
        """Reserve room for a request; answers the tokens of its prefix that are here, None without room.

        The prefix becomes part of the reservation.
        """
        running = self.running + blocks_up(tokens)
        if running > self.capacity:
            return None
        self.running = running
        self.peak = max(self.peak, running)
        if not self._prefixes:
            return 0
        hit = self._prefixes.pop(key, 0)
        self.kept -= blocks_up(hit)
        self._make_room()
        return hit

    def release(self, key: object, reserved_tokens: int, keep_tokens: int) -> None:
        """A request is over; `keep_tokens` of it stay as a prefix if there is room."""
        self.running -= blocks_up(reserved_tokens)
        if self._keep and keep_tokens > 0:
            self.kept += blocks_up(keep_tokens) - blocks_up(self._prefixes.pop(key, 0))
            self._prefixes[key] = keep_tokens
            self._make_room()
        assert self.running >= 0, self.running

    def resize(self, capacity_tokens: int) -> None:
        """Another budget.  What runs is the engine's affair: it ends requests first."""
        self.capacity = capacity_tokens
        assert self.running <= capacity_tokens, (self.running, capacity_tokens)
        self._make_room()

    def forget(self, key: object) -> None:
        """The prefix will not be asked for again."""
        self.kept -= blocks_up(self._prefixes.pop(key, 0))

    def clear(self) -> None:
        """Other weights, or the engine lost its memory: no prefix is of use."""
        self._prefixes.clear()
        self.kept = 0

    def _make_room(self) -> None:
        while self.used > self.capacity and self._prefixes:
            _, tokens = self._prefixes.popitem(last=False)
            self.kept -= blocks_up(tokens)
            self.evicted += tokens
        assert self.kept >= 0, self.kept
