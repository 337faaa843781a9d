"""The RL run: rollout, training and weight phases, step after step, or rollout beside training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Protocol

import msgspec

from rose_sim.episodes import Batch, Episode, demand, draw
from rose_sim.fleet import Fleet, Turn
from rose_sim.loop import Loop, ps, seconds
from rose_sim.scenario import Scenario
from rose_sim.serving import API_PS


class StepRecord(msgspec.Struct, kw_only=True):
    """What one RL step took."""

    step: int
    rollout_s: float
    """From the first turn that could be sent to the last trajectory that counts."""
    allocation_s: float
    """Until elastic GPUs could be used, as far as getting them (not their weights) took time."""
    step_s: float
    trajectories: int
    """Played to their ends."""
    launched: int
    tokens: int
    """Output tokens of the trajectories played to their ends."""
    finish_s: list[float]
    """When each of them ended, after the begin of the rollout."""


class Provider(Protocol):
    """What a system does around the steps of the job."""

    def allocate(self, step: int) -> tuple[int, float]:
        """Get elastic GPUs for a step: (ps before rollout may begin, seconds spent on getting them)."""
        ...

    def deliver(self, step: int, version: int) -> None:
        """Bring `version` to the engines; dedicated ones have it when this returns."""
        ...

    def release(self, step: int) -> None:
        """Rollouts of the step are over."""
        ...

    def weights_s(self, step: int) -> float:
        """From the end of training until dedicated engines run the new version."""
        ...


class Player:
    """Plays episodes turn by turn: the next turn is sent when the last one is answered and the world moved.

    An episode takes a slot from its start to its end, environment times included; there are as many as the
    replicas in use have (paper: at most 16 trajectories a GPU).  Others wait in line.
    """

    def __init__(self, loop: Loop, fleet: Fleet, on_end: Callable[[Episode, int], None]) -> None:
        self.loop = loop
        self.fleet = fleet
        self.turns_sent = 0
        self._on_end = on_end
        self._live: dict[str, Turn | None] = {}
        self._line: deque[Episode] = deque()
        fleet.on_room = self.fill

    def start(self, episodes: list[Episode]) -> None:
        """Play these when there are slots: reset the environment, then turn by turn."""
        self._line.extend(episodes)
        self.fill()

    def fill(self) -> None:
        """Give free slots to those next in line."""
        if not self._line:
            return
        slots = self.fleet.slots()
        while self._line and len(self._live) < slots:
            episode = self._line.popleft()
            episode.started_ps = self.loop.now_ps
            self._live[episode.id] = None
            self.loop.after(episode.reset_ps + API_PS // 2, self._send, episode)

    def stop_all(self) -> None:
        """Nobody needs the episodes that are left."""
        self._line.clear()
        for name in list(self._live):
            turn = self._live.pop(name)
            if turn is not None:
                self.fleet.cancel(turn)

    def _send(self, _now_ps: int, episode: Episode) -> None:
        if episode.id not in self._live:
            return
        plan = episode.turns[episode.next_turn]
        turn = Turn(f"{episode.id}/{episode.next_turn}", episode.context, plan.output, episode)
        self._live[episode.id] = turn
        self.turns_sent += 1
        self.fleet.send(turn, episode.id, episode.task)

    def answered(self, turn: Turn, now_ps: int) -> None:
        """For the fleet: a turn is complete."""
        episode: Episode = turn.owner
        self._live[episode.id] = None
        plan = episode.turns[episode.next_turn]
        episode.next_turn += 1
        episode.context += plan.output + plan.observation
        if episode.next_turn < len(episode.turns):
            self.loop.after(plan.env_ps + API_PS, self._send, episode)
        else:
            self.loop.after(plan.env_ps + API_PS // 2, self._end, episode)

    def begin_again(self, turn: Turn) -> None:
        """For the fleet: the turn's trajectory was over-stale.  Its episode begins anew, by another name."""
        episode: Episode = turn.owner
        del self._live[episode.id]
        episode.id = f"{episode.id}+"
        episode.next_turn, episode.context = 0, episode.prompt
        self._line.appendleft(episode)
        self.fill()

    def _end(self, now_ps: int, episode: Episode) -> None:
        if episode.id in self._live:
            del self._live[episode.id]
            episode.finished_ps = now_ps
            self._on_end(episode, now_ps)
            self.fill()


class SyncJob:
    """Rollout, then training, then weights; DAPO launches more groups and drops those left at the end."""

    def __init__(self, loop: Loop, fleet: Fleet, scenario: Scenario, system: Provider) -> None:
        self.records: list[StepRecord] = []
        self.player = Player(loop, fleet, self._episode_ended)
        self._loop = loop
        self._fleet = fleet
        self._scenario = scenario
        self._system = system
        self._batch: Batch | None = None
        self._left: list[int] = []
        self._done: list[Episode] = []
        self._missing = 0
        self._began_ps = self._allocated_ps = 0
        self._allocation_s = 0.0

    @property
    def step(self) -> int:
        """Number of the step under way."""
        rl = self._scenario.rl
        return rl.first_step + len(self.records) * rl.step_stride

    def begin(self, _now_ps: int = 0, _: object = None) -> None:
        """Begin a step: the trainer has just committed its weights."""
        self._began_ps = self._loop.now_ps
        wait_ps, self._allocation_s = self._system.allocate(self.step)
        self._loop.after(max(wait_ps, ps(self._system.weights_s(self.step))), self._roll)
        self._system.deliver(self.step, len(self.records) + 1)

    def _roll(self, now_ps: int, _: object) -> None:
        self._allocated_ps = now_ps
        self._fleet.begin_step(self.step, len(self.records) + 1)
        self._batch = draw(self._scenario, self.step)
        self._left = [len(group) for group in self._batch.groups]
        self._missing = self._batch.needed
        self._done = []
        self.player.start([episode for group in self._batch.groups for episode in group])

    def _episode_ended(self, episode: Episode, now_ps: int) -> None:
        assert self._batch is not None
        self._done.append(episode)
        self._left[episode.group] -= 1
        if self._left[episode.group] == 0 and self._batch.useful[episode.group]:
            self._missing -= 1
            if self._missing == 0:
                self._rolled(now_ps)

    def _rolled(self, now_ps: int) -> None:
        self.player.stop_all()
        self._fleet.end_step(self.step)
        self._system.release(self.step)
        rl = self._scenario.rl
        self._loop.after(ps(rl.reward_s + rl.train_s), self._trained, now_ps)

    def _trained(self, now_ps: int, rolled_ps: int) -> None:
        assert self._batch is not None
        self.records.append(
            StepRecord(
                step=self.step,
                rollout_s=seconds(rolled_ps - self._allocated_ps),
                allocation_s=self._allocation_s,
                step_s=seconds(now_ps - self._began_ps),
                trajectories=len(self._done),
                launched=sum(len(group) for group in self._batch.groups),
                tokens=sum(plan.output for episode in self._done for plan in episode.turns),
                finish_s=[seconds(episode.finished_ps - self._allocated_ps) for episode in self._done],
            )
        )
        if len(self.records) == self._scenario.rl.steps:
            self._loop.stop()
        else:
            self.begin()


class AsyncJob:
    """Rollout beside training (AReaL): at most `staleness` + 1 batches are under way or wait for training.

    Trajectories keep the version they are on when a new one comes (their engines take it at once); groups
    that are not useful are dropped as in DAPO.  A record's `rollout_s` is the time between two batches.
    """

    def __init__(
        self, loop: Loop, fleet: Fleet, scenario: Scenario, system: Provider, *, staleness: int
    ) -> None:
        self.records: list[StepRecord] = []
        self.player = Player(loop, fleet, self._episode_ended)
        self._loop = loop
        self._fleet = fleet
        self._scenario = scenario
        self._system = system
        self._staleness = staleness
        self._left: dict[int, int] = {}
        self._useful: dict[int, bool] = {}
        self._episodes: dict[str, int] = {}
        self._launched = self._ready = self._drawn = 0
        self._source: list[tuple[list[Episode], bool]] = []
        self._training = False
        self._batch_ps = self._waiting_ps = 0
        self._done_tokens = self._done_count = 0

    @property
    def step(self) -> int:
        """Number of the step under way."""
        rl = self._scenario.rl
        return rl.first_step + len(self.records) * rl.step_stride

    def begin(self, _now_ps: int = 0, _: object = None) -> None:
        """Begin the run."""
        self._system.allocate(self.step)
        self._system.deliver(self.step, 1)
        self._fleet.begin_step(self.step, 1)
        self._batch_ps = self._loop.now_ps
        self._fill()

    def _fill(self) -> None:
        """Launch groups up to the bound."""
        rl = self._scenario.rl
        limit = ceil(rl.groups * (self._staleness + 1) * demand(rl, self.step))
        while len(self._left) + self._ready < limit:
            if not self._source:
                step = rl.first_step + self._drawn * rl.step_stride
                batch = draw(self._scenario, step)
                self._source = list(zip(batch.groups, batch.useful, strict=True))[::-1]
                self._drawn += 1
            group, useful = self._source.pop()
            number = self._launched
            self._launched += 1
            self._left[number] = len(group)
            self._useful[number] = useful
            for episode in group:
                episode.group = number
                episode.id = f"a{self._drawn}-{episode.id}"
            self.player.start(group)

    def _episode_ended(self, episode: Episode, now_ps: int) -> None:
        self._done_count += 1
        self._done_tokens += sum(plan.output for plan in episode.turns)
        self._left[episode.group] -= 1
        if self._left[episode.group]:
            return
        del self._left[episode.group]
        self._ready += self._useful.pop(episode.group)
        self._train()
        self._fill()

    def _train(self) -> None:
        rl = self._scenario.rl
        if self._training or self._ready < rl.groups:
            return
        self._ready -= rl.groups
        self._training = True
        delay = rl.reward_s + rl.train_s + self._system.weights_s(self.step)
        self._loop.after(ps(delay), self._trained, self._loop.now_ps)

    def _trained(self, now_ps: int, collected_ps: int) -> None:
        rl = self._scenario.rl
        step = self.step
        self.records.append(
            StepRecord(
                step=step,
                rollout_s=seconds(collected_ps - self._batch_ps),
                allocation_s=0.0,
                step_s=seconds(now_ps - self._waiting_ps),
                trajectories=rl.groups * rl.group_size,
                launched=self._done_count,
                tokens=self._done_tokens,
                finish_s=[],
            )
        )
        self._batch_ps, self._waiting_ps = collected_ps, now_ps
        self._done_count = self._done_tokens = 0
        self._training = False
        if len(self.records) == rl.steps:
            self._loop.stop()
            return
        version = len(self.records) + 1
        self._system.deliver(self.step, version)
        self._fleet.begin_step(self.step, version)
        self._train()
        self._fill()
