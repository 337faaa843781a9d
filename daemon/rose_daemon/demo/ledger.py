"""The client's own books on turns: each asked once, each answered exactly once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

FINISHED = "finished"
CUT = "rose:kv_budget_cut"
"""How an attempt ends that an emergency cut of the KV budget took."""


class Attempt(msgspec.Struct, frozen=True):
    """One try of a turn on one replica, as the gateway tells it."""

    replica: str
    tokens: int
    end: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the client was answered."""

    turn_id: str
    """As the answer names it."""
    completion_id: str
    text: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    attempts: tuple[Attempt, ...]
    weight_versions: tuple[tuple[int, int, int], ...]

    def fingerprint(self) -> str:
        """Identity of the content."""
        return hashlib.sha256(repr((self.completion_id, self.text, self.output_ids)).encode()).hexdigest()


class TurnLedger:
    """Counts from what was sent and what came back; trusts nobody else's counters."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.failures: dict[str, str] = {}
        self.faults: list[str] = []
        """What went wrong with single turns, in words."""
        self.replayed = 0
        self._asked: set[str] = set()
        self._completions: dict[str, str] = {}
        self._duplicated: set[str] = set()

    def ask(self, turn_id: str) -> None:
        """A turn is about to be sent; its id must be new."""
        assert turn_id not in self._asked, turn_id
        self._asked.add(turn_id)

    def answer(self, turn_id: str, answer: Answer, versions_allowed: Iterable[int]) -> None:
        """The answer to a turn came."""
        assert turn_id in self._asked, turn_id
        self.answers[turn_id] = answer
        if answer.turn_id != turn_id:
            self._duplicate(turn_id, f"got the answer of {answer.turn_id}")
        other = self._completions.setdefault(answer.completion_id, turn_id)
        if other != turn_id:
            self._duplicate(turn_id, f"got the completion of {other}")
        if sum(attempt.end == FINISHED for attempt in answer.attempts) != 1:
            self._duplicate(turn_id, f"ran {[attempt.end for attempt in answer.attempts]}")
        wrong = {version for *_, version in answer.weight_versions} - set(versions_allowed)
        if wrong:
            self.faults.append(f"{turn_id}: sampled from weight versions {sorted(wrong)}")

    def fail(self, turn_id: str, reason: str) -> None:
        """A turn got no answer: it is lost."""
        assert turn_id in self._asked, turn_id
        self.failures[turn_id] = reason
        self.faults.append(f"{turn_id}: {reason}")

    def replay(self, turn_id: str, again: Answer) -> None:
        """A finished turn was sent again; the answer must be the same."""
        self.replayed += 1
        if again.fingerprint() != self.answers[turn_id].fingerprint():
            self._duplicate(turn_id, "was answered differently when sent again")

    def _duplicate(self, turn_id: str, why: str) -> None:
        self._duplicated.add(turn_id)
        self.faults.append(f"{turn_id}: {why}")

    # ---- counts ---------------------------------------------------------------------------------

    @property
    def asked(self) -> int:
        """Turns sent, each counted once."""
        return len(self._asked)

    @property
    def lost(self) -> int:
        """Turns sent and never answered."""
        return len(self._asked) - len(self.answers)

    @property
    def duplicated(self) -> int:
        """Turns that were answered, or ran to the end, other than once."""
        return len(self._duplicated)

    @property
    def aborted(self) -> int:
        """Attempts that ended early."""
        return sum(attempt.end != FINISHED for answer in self.answers.values() for attempt in answer.attempts)

    @property
    def rerouted(self) -> list[Answer]:
        """Turns that went on at another replica."""
        return [one for one in self.answers.values() if len({tried.replica for tried in one.attempts}) > 1]

    @property
    def cut(self) -> list[Answer]:
        """Turns of which an attempt fell to an emergency cut."""
        return [answer for answer in self.answers.values() if any(one.end == CUT for one in answer.attempts)]

    def tokens_by_replica(self) -> Counter[str]:
        """Output tokens each replica gave."""
        tokens: Counter[str] = Counter()
        for answer in self.answers.values():
            for attempt in answer.attempts:
                tokens[attempt.replica] += attempt.tokens
        return tokens

    def turns_by_replica(self) -> Counter[str]:
        """Turns each replica finished."""
        return Counter(answer.attempts[-1].replica for answer in self.answers.values() if answer.attempts)
