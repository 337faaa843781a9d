"""FrozenLake as a conversation: what the agent is told, what its words mean, and what they are worth."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import msgspec
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

SIZE = 4
ACTIONS = "LDRU"
"""In the order of gymnasium's action numbers."""
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
SYSTEM = "Cross the lake from S to G. H is a hole. Answer L, D, R or U."
GOAL_BONUS = 1.0
FORMAT_WEIGHT = 0.1


class Move(msgspec.Struct, frozen=True):
    """What an answer means."""

    action: int
    format_score: float
    """1 when the first character is a legal letter, less the later the first one comes, 0 without one."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode went."""

    distance_start: int
    """Steps from the start to the goal along the shortest safe way."""
    distance_end: int
    distance_best: int
    """Smallest distance reached."""
    reached: bool
    format_scores: tuple[float, ...]
    """Of each turn."""


def read_move(text: str, token_ids: Sequence[int]) -> Move:
    """The first of the letters L, D, R, U in the answer; without one, a hash of its tokens picks an action.

    The hash keeps a model that has not learnt to answer moving, and the same answer means the same move.
    """
    for position, letter in enumerate(text):
        if letter in ACTIONS:
            return Move(ACTIONS.index(letter), 1 / (1 + position))
    return Move(zlib.crc32(",".join(map(str, token_ids)).encode()) % len(ACTIONS), 0.0)


def reward(outcome: Outcome) -> float:
    """Shaped reward: progress at best and at the end (each at most 0.5), a goal bonus, a little for format.

    Ours.  An episode that wandered is told from one that did not, so groups seldom have equal rewards.
    """
    start = max(outcome.distance_start, 1)
    progress = 0.5 * (start - outcome.distance_best) / start
    progress += 0.5 * (start - min(outcome.distance_end, start)) / start
    scores = outcome.format_scores
    form = sum(scores) / len(scores) if scores else 0.0
    return progress + GOAL_BONUS * outcome.reached + FORMAT_WEIGHT * form


def distances(rows: Sequence[str]) -> dict[tuple[int, int], int]:
    """Steps to the goal from every cell from which it can be reached without a hole."""
    goal = next((y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "G")
    found = {goal: 0}
    frontier = deque([goal])
    while frontier:
        y, x = frontier.popleft()
        for dy, dx in _STEPS:
            cell = (y + dy, x + dx)
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0])
            if inside and cell not in found and rows[cell[0]][cell[1]] != "H":
                found[cell] = found[y, x] + 1
                frontier.append(cell)
    return found


class Lake:
    """One episode.  The same seed gives the same lake: all episodes of a group play the same one."""

    def __init__(self, seed: int) -> None:
        self.rows: list[str] = generate_random_map(size=SIZE, p=0.75, seed=seed)
        self.done = False
        self._distances = distances(self.rows)
        self._env: Any = gymnasium.make("FrozenLake-v1", desc=self.rows, is_slippery=False)
        position, _ = self._env.reset(seed=seed)
        self._cell = divmod(int(position), SIZE)
        self._reached = False
        self._start = self._best = self._distance()
        self._format_scores: list[float] = []

    def __enter__(self) -> Lake:
        return self

    def __exit__(self, *_: object) -> None:
        self._env.close()

    def opening(self) -> list[dict[str, str]]:
        """The first messages of the conversation."""
        lake = "\n".join(self.rows)
        where = f"{lake}\n{self.describe()}"
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": where}]

    def describe(self) -> str:
        """Where the agent is."""
        return f"row {self._cell[0]} col {self._cell[1]}"

    def play(self, move: Move) -> None:
        """Take one step."""
        position, gained, terminated, truncated, _ = self._env.step(move.action)
        self._cell = divmod(int(position), SIZE)
        self._format_scores.append(move.format_score)
        self._reached = self._reached or float(gained) > 0
        self._best = min(self._best, self._distance())
        self.done = bool(terminated or truncated)

    def outcome(self) -> Outcome:
        """How it went so far."""
        return Outcome(
            distance_start=self._start,
            distance_end=self._distance(),
            distance_best=self._best,
            reached=self._reached,
            format_scores=tuple(self._format_scores),
        )

    def _distance(self) -> int:
        # A hole is as far away as no cell is.
        return self._distances.get(self._cell, SIZE * SIZE)
