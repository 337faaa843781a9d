"""Agents: multi-turn FrozenLake episodes in GRPO groups, through the gateway with OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import openai

from rose_daemon.demo.lake import ACTIONS, Lake, read_move, reward
from rose_daemon.demo.ledger import Answer, Attempt, TurnLedger

TURN_TIMEOUT_S = 300.0
RESAMPLES_MAX = 3
"""A group whose rewards are all equal teaches nothing: it is played again, at most this often."""
EQUAL = 1e-9
"""Rewards that differ by less are the same."""


class EpisodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Size of one RL step."""

    groups: int = 8
    group_size: int = 4
    episodes_at_once: int = 24
    """Fewer than two replicas take (16 each): a turn that loses its replica finds room at the other."""
    turns_max: int = 6
    answer_tokens: int = 64
    temperature: float = 1.0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode."""

    id: str
    group: str
    turns: tuple[Answer, ...]
    reward: float
    reached: bool


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes of the same lake; what GRPO compares."""

    id: str
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    resampled: int


class Player:
    """Plays groups of episodes and keeps the books."""

    def __init__(
        self,
        gateway_url: str,
        job: str,
        model: str,
        plan: EpisodePlan,
        ledger: TurnLedger,
        *,
        seed: int,
    ) -> None:
        self.plan = plan
        self.ledger = ledger
        self.trajectories_lost = 0
        self.trajectories_finished = 0
        self._job = job
        self._model = model
        self._seed = seed
        self._places = asyncio.Semaphore(plan.episodes_at_once)
        self._latest: tuple[str, dict[str, Any]] | None = None
        self._client = openai.AsyncOpenAI(
            base_url=f"{gateway_url}/v1", api_key="unused", timeout=TURN_TIMEOUT_S, max_retries=3
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def play_step(self, rl_step: int, versions_allowed: Sequence[int]) -> list[Group]:
        """All groups of a step, at the same time."""
        playing = [
            self._play_group(f"s{rl_step}-g{index}", versions_allowed) for index in range(self.plan.groups)
        ]
        groups = await asyncio.gather(*playing)
        await self._resend_one()
        return [group for group in groups if group is not None]

    async def _resend_one(self) -> None:
        """Send a finished turn again, as a client does whose connection broke before the answer came."""
        if self._latest is None:
            return
        turn_id, request = self._latest
        try:
            self.ledger.replay(turn_id, await self._complete(turn_id, request))
        except (openai.APIError, ValueError) as error:
            self.ledger.faults.append(f"{turn_id}: sent again: {type(error).__name__}: {error}")

    async def _play_group(self, name: str, versions_allowed: Sequence[int]) -> Group | None:
        """One group, played again while its rewards are all equal; None when episodes of it were lost."""
        resampled = 0
        while True:
            group_id = f"{name}-r{resampled}" if resampled else name
            played = await asyncio.gather(
                *(
                    self._play_in_turn(group_id, f"{group_id}-e{member}", name, versions_allowed)
                    for member in range(self.plan.group_size)
                )
            )
            trajectories = tuple(one for one in played if one is not None)
            if len(trajectories) < 2:
                return None
            values = advantages([one.reward for one in trajectories])
            if any(values) or resampled == RESAMPLES_MAX:
                return Group(
                    id=group_id, trajectories=trajectories, advantages=tuple(values), resampled=resampled
                )
            resampled += 1

    async def _play_in_turn(
        self, group: str, trajectory: str, lake_name: str, versions_allowed: Sequence[int]
    ) -> Trajectory | None:
        async with self._places:
            return await self._play(group, trajectory, lake_name, versions_allowed)

    async def _play(
        self,
        group: str,
        trajectory: str,
        lake_name: str,
        versions_allowed: Sequence[int],
    ) -> Trajectory | None:
        """One episode; None when a turn of it was lost."""
        turns: list[Answer] = []
        with Lake(_lake_seed(self._seed, lake_name)) as lake:
            messages = lake.opening()
            while not lake.done and len(turns) < self.plan.turns_max:
                turn_id = f"{trajectory}-t{len(turns)}"
                request = self._request(messages, trajectory, turn_id, group)
                self.ledger.ask(turn_id)
                try:
                    answer = await self._complete(turn_id, request)
                except (openai.APIError, ValueError) as error:
                    self.ledger.fail(turn_id, f"{type(error).__name__}: {error}")
                    self.trajectories_lost += 1
                    return None
                self.ledger.answer(turn_id, answer, versions_allowed)
                self._latest = (turn_id, request)
                turns.append(answer)
                move = read_move(answer.text, answer.output_ids)
                lake.play(move)
                # The history holds the move, not the words: short, and its tokens are the same for everybody.
                messages = [
                    *messages,
                    {"role": "assistant", "content": ACTIONS[move.action]},
                    {"role": "user", "content": lake.describe()},
                ]
            outcome = lake.outcome()
        self.trajectories_finished += 1
        return Trajectory(
            id=trajectory, group=group, turns=tuple(turns), reward=reward(outcome), reached=outcome.reached
        )

    def _request(
        self, messages: list[dict[str, str]], trajectory: str, turn_id: str, group: str
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": self.plan.answer_tokens,
            "temperature": self.plan.temperature,
            "extra_headers": {
                "x-rose-job": self._job,
                "x-rose-trajectory": trajectory,
                "x-rose-turn-id": turn_id,
                "x-rose-group": group,
            },
            "extra_body": {"return_token_ids": True},
        }

    async def _complete(self, turn_id: str, request: dict[str, Any]) -> Answer:
        """Raises openai.APIError, or ValueError for an answer that lacks what was asked for."""
        completion = await self._client.chat.completions.create(**request)
        return read_answer(turn_id, completion)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards normalised within their group; all zero when they do not differ."""
    values = np.asarray(rewards, dtype=np.float64)
    spread = values.std()
    if spread < EQUAL:
        return [0.0] * len(rewards)
    return [float(value) for value in (values - values.mean()) / spread]


def read_answer(turn_id: str, completion: Any) -> Answer:
    """Check what the gateway added to OpenAI's dialect.  Raises ValueError."""
    choice = completion.choices[0]
    extra, choice_extra = completion.model_extra or {}, choice.model_extra or {}
    rose = extra.get("rose")
    prompt_ids, output_ids = extra.get("prompt_token_ids"), choice_extra.get("token_ids")
    if not isinstance(rose, dict) or prompt_ids is None or output_ids is None:
        raise ValueError(f"the answer to {turn_id} lacks its token ids or the member `rose`")
    return Answer(
        turn_id=str(rose.get("turn_id", "")),
        completion_id=completion.id,
        text=choice.message.content or "",
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        finish_reason=choice.finish_reason or "",
        attempts=tuple(msgspec.convert(one, Attempt) for one in rose.get("attempts", ())),
        weight_versions=tuple(tuple(span) for span in rose.get("weight_versions", ())),
    )


def _lake_seed(seed: int, name: str) -> int:
    """Seed of a group's lake; playing the group again plays the same lake."""
    return int.from_bytes(f"{seed}/{name}".encode(), "little") % (1 << 31)
