"""The demo from start to end: a host, its serving load, RL steps, one emergency cut, and what was found."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from rose.boards import WatchedBoard
from rose.client import Job, Scheduler
from rose.config import ReplicaConfig
from rose.core.readings import ReplicaReading, Unknown
from rose.errors import NotReady, RoseError, TimedOut
from rose.units import JobId, ReplicaId
from rose_daemon.demo.audit import Answers, Evidence, VersionAudit, audit, fixed_prompts, gather_evidence
from rose_daemon.demo.checkpoints import make_model_files
from rose_daemon.demo.drill import CutDrill
from rose_daemon.demo.episodes import EpisodePlan, Group, Player
from rose_daemon.demo.ledger import TurnLedger
from rose_daemon.demo.placement import check, observe, promises
from rose_daemon.demo.report import Findings, StepRecord
from rose_daemon.demo.training import Sample, Trained, Trainer, TrainerSettings, trainer_command
from rose_daemon.harness.generator import LoadGenerator, Replay
from rose_daemon.harness.interrupts import Interrupts
from rose_daemon.harness.load import Budgets, RequestRecord
from rose_daemon.harness.processes import Placement, until
from rose_daemon.harness.replay import ReplayPlan, plan_replay
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import Cores, Stack, StackPlan, pin_this_process
from rose_daemon.harness.stats import percentile

JOB = JobId("job-0")
OPPORTUNISTIC, DEDICATED = ReplicaId("opportunistic-0"), ReplicaId("dedicated-0")
BLOCK_TOKENS, CONTEXT_TOKENS_MAX, SEQUENCES_MAX = 32, 1024, 16
BLOCKS_PER_TURN = 5
"""KV blocks that a turn holds when an episode begins, with its answer."""
UPDATE_TIMEOUT_S = 120.0
PLACEMENT_AFTER_S = 3.0
"""Into the first step's rollout, if it lasts that long: then every process is at work."""
_WARM_UP_REQUESTS = 3


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    directory: Path
    steps: int = 3
    duration_s: float = 120.0
    trace: ReplayPlan
    budgets: Budgets = Budgets()
    episodes: EpisodePlan = EpisodePlan()
    seed: int = 1
    keep: bool = False


def replicas(model: Path, cores: Cores, episodes: EpisodePlan) -> tuple[ReplicaConfig, ReplicaConfig]:
    """The opportunistic engine, on the shared core, and the dedicated one, on what the host core has left."""
    common: dict[str, Any] = {
        "model": str(model),
        "block_tokens": BLOCK_TOKENS,
        "context_tokens_max": CONTEXT_TOKENS_MAX,
        "sequences_max": SEQUENCES_MAX,
        "api_cpus": (cores.host,),
    }
    return (
        ReplicaConfig(
            id=OPPORTUNISTIC,
            kind="opportunistic",
            cpus=(cores.shared,),
            kv_blocks=opportunistic_blocks(episodes),
            **common,
        ),
        ReplicaConfig(
            id=DEDICATED, kind="dedicated", cpus=(cores.host,), idle_priority=True, kv_blocks=192, **common
        ),
    )


def opportunistic_blocks(episodes: EpisodePlan) -> int:
    """KV blocks: enough for any turn, and few, so that half of them is less than the turns in flight hold.

    The demo's cut leaves half; it has to take blocks that are in use.
    """
    at_once = min(episodes.episodes_at_once, episodes.groups * episodes.group_size)
    in_flight = min(SEQUENCES_MAX, at_once // 2)
    # One block beyond the context, as vLLM keeps one for itself.
    return max(CONTEXT_TOKENS_MAX // BLOCK_TOKENS + 1, BLOCKS_PER_TURN * in_flight)


class Demo:
    """One run; `found` is filled as it goes."""

    def __init__(self, options: DemoOptions, screen: Screen, interrupts: Interrupts) -> None:
        self.options = options
        self._screen = screen
        self._interrupts = interrupts
        self._replay = plan_replay(options.trace, options.seed)
        self._cores = Cores.of_this_machine()
        self._ledger = TurnLedger()
        self._prompts = fixed_prompts(options.seed)
        self._first_answers: Answers = ()
        self.found = Findings(
            started_at=datetime.now(UTC),
            budgets=options.budgets,
            replicas={OPPORTUNISTIC: "opportunistic", DEDICATED: "dedicated"},
            trace=self._replay.description,
            ledger=self._ledger,
        )

    async def run(self) -> Findings:
        """Everything.  Raises RoseError for what a person can act on; always stops what it started."""
        began_s = time.monotonic()
        models = await asyncio.to_thread(make_model_files, self.options.directory)
        plan = StackPlan(
            directory=self.options.directory,
            serving_model=models.serving,
            replicas=replicas(models.rollout, self._cores, self.options.episodes),
            cores=self._cores,
            ttft_slo_ms=self.options.budgets.ttft_ms,
            tpot_slo_ms=self.options.budgets.tpot_ms,
        )
        pin_this_process(self._cores.host)
        async with Stack(plan, self._screen) as stack:
            self._interrupts.hurry = stack.hurry
            await stack.launch()
            trainer = await self._start_trainer(stack, models.rollout)
            self._screen.say(f"starting; see it with: rose status --config {stack.config_path}")
            await stack.ready()
            await stack.guard(self._work(stack, trainer, await stack.start_generator()))
        self.found.wall_s = time.monotonic() - began_s
        return self.found

    async def _start_trainer(self, stack: Stack, model: Path) -> Trainer:
        settings = TrainerSettings(
            model=str(model),
            config=str(stack.config_path),
            job=JOB,
            checkpoints=str(self.options.directory / "checkpoints") if self.options.keep else "",
        )
        placement = Placement([self._cores.host], idle=True)
        return Trainer(await stack.add("trainer", trainer_command(settings), placement=placement, piped=True))

    # ---- work -----------------------------------------------------------------------------------

    async def _work(self, stack: Stack, trainer: Trainer, generator: LoadGenerator) -> None:
        first_digests = (await trainer.started()).digests
        model = stack.config.replicas[0].served_name
        job = await asyncio.to_thread(Job.create, stack.gateway_url, JOB, model=model)
        await self._until_version(stack, job, 0)
        self._screen.say("auditing version 0")
        evidence = await self._evidence(stack)
        self._first_answers = evidence[0].answers
        self.found.first_audit = audit(0, evidence, first_digests, self._first_answers)
        await self._warm_up(stack, generator)
        stop = asyncio.Event()
        replay = Replay(
            target=stack.serving, seed=self.options.seed, requests=self._replay.requests, endless=True
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generator.replay(replay, self.found.requests, stop))
            ticker = tasks.create_task(self._show(stack))
            try:
                await self._rollout(stack, trainer, job)
            finally:
                stop.set()
            ticker.cancel()
        status = await asyncio.to_thread(Scheduler(stack.gateway_url).status)
        self.found.gateway_turns = status.get("turns", {})
        await asyncio.to_thread(job.end)

    async def _warm_up(self, stack: Stack, generator: LoadGenerator) -> None:
        """The first requests of an engine pay for what is made lazily; users of a serving engine do not."""
        warm: list[RequestRecord] = []
        requests = self._replay.requests[:_WARM_UP_REQUESTS]
        await generator.replay(Replay(target=stack.serving, seed=0, requests=requests), warm)
        for record in warm:
            if record.error:
                raise RoseError(f"serving does not answer: {record.error}", f"see {stack.log_dir}")

    async def _rollout(self, stack: Stack, trainer: Trainer, job: Job) -> None:
        """RL steps: as many as asked for, and more while the time is not over."""
        board = WatchedBoard(stack.boards.replica(OPPORTUNISTIC), ReplicaReading)
        before = _reading(board)
        player = Player(
            stack.gateway_url,
            JOB,
            stack.config.replicas[0].served_name,
            self.options.episodes,
            self._ledger,
            seed=self.options.seed,
        )
        drill = CutDrill(stack, OPPORTUNISTIC, self._ledger, self._screen)
        end_s = time.monotonic() + self.options.duration_s
        try:
            rl_step = 0
            while rl_step < self.options.steps or time.monotonic() < end_s:
                rl_step += 1
                await self._step(stack, trainer, job, player, drill, rl_step)
        finally:
            self.found.cuts = drill.cuts
            await player.close()
            self.found.trajectories_finished = player.trajectories_finished
            self.found.trajectories_lost = player.trajectories_lost
        self.found.gate = (before, _reading(board))

    async def _step(
        self, stack: Stack, trainer: Trainer, job: Job, player: Player, drill: CutDrill, rl_step: int
    ) -> None:
        required, version = rl_step - 1, rl_step
        await asyncio.to_thread(job.begin_step, rl_step, required)
        self._screen.say(f"step {rl_step}: rollout on version {required}")
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(drill.during(rl_step)),
                tasks.create_task(self._look(stack, PLACEMENT_AFTER_S)),
            ]
            groups = await player.play_step(rl_step, [required])
            for task in beside:
                task.cancel()
        rollout_s = time.monotonic() - began_s
        await self._look(stack, after_s=0.0)
        await asyncio.to_thread(job.end_step, rl_step)
        self._screen.say(f"step {rl_step}: {rollout_s:.1f} s of rollout; training version {version}")
        trained = await trainer.train(version, samples(groups))
        published_s = time.monotonic()
        await asyncio.to_thread(job.published, version)
        await self._until_version(stack, job, version)
        update_s = time.monotonic() - published_s
        self.found.pauses_ms += await _pauses(stack, version)
        evidence = await self._evidence(stack)
        record = StepRecord(
            rl_step=rl_step,
            required_version=required,
            groups=tuple(groups),
            rollout_s=rollout_s,
            trained=trained,
            update_s=update_s,
            audit=audit(version, evidence, trained.digests, self._first_answers),
        )
        self.found.steps.append(record)
        self._screen.say(_step_line(record))

    # ---- beside the rollout ---------------------------------------------------------------------

    async def _look(self, stack: Stack, after_s: float) -> None:
        """See where all processes run, once a demo."""
        if self.found.placement:
            return
        await asyncio.sleep(after_s)
        roles = {child.process.pid: name for name, child in stack.children.items() if name != "serving"}
        roles |= {os.getpid(): "agents"}
        pids = [*stack.pids(), os.getpid()]
        observed = await asyncio.to_thread(observe, pids, roles)
        self.found.placement = check(observed, promises(self._cores, stack.config.replicas))

    async def _show(self, stack: Stack) -> None:
        """Keep the live rows fresh."""
        board = WatchedBoard(stack.boards.replica(OPPORTUNISTIC), ReplicaReading)
        while True:
            await asyncio.sleep(1.0)
            requests = self.found.requests
            p99 = percentile([one.ttft_ms for one in requests if one.ttft_ms is not None], 99)
            broken = sum(bool(one.breach(self.options.budgets)) for one in requests)
            self._screen.show(
                "serving", f"{len(requests)} requests, p99 TTFT {p99 or 0:.0f} ms, {broken} out of budget"
            )
            tokens = self._ledger.tokens_by_replica()
            shares = ", ".join(f"{tokens[name]} tokens by {name}" for name in self.found.replicas)
            self._screen.show(
                "rollout", f"{len(self._ledger.answers)} of {self._ledger.asked} turns, {shares}"
            )
            reading = board.read(time.monotonic_ns(), None)
            if not isinstance(reading, Unknown):
                state = "open" if reading.gate_open else "closed"
                kv = f"KV {reading.kv_used_blocks} of {reading.kv_budget_blocks} blocks"
                self._screen.show(
                    "gate", f"{state}, {kv}, {reading.running} running, {reading.waiting} waiting"
                )

    # ---- versions -------------------------------------------------------------------------------

    async def _until_version(self, stack: Stack, job: Job, version: int) -> None:
        """Wait until every replica runs the version and takes turns."""

        async def reached() -> bool:
            held = (await asyncio.to_thread(job.status)).replicas
            running = {one.replica for one in held if one.weight_version == version and one.state == "ready"}
            return running == set(self.found.replicas)

        try:
            await until(f"version {version} on every replica", reached, UPDATE_TIMEOUT_S, 0.1)
        except TimedOut as error:
            held = (await asyncio.to_thread(job.status)).replicas
            seen = ", ".join(f"{one.replica} is {one.state} on version {one.weight_version}" for one in held)
            raise TimedOut(error.what, f"{seen or 'the job holds no replica'}; see {stack.log_dir}") from None

    async def _evidence(self, stack: Stack) -> list[Evidence]:
        asked = [
            gather_evidence(name, stack.replica(ReplicaId(name)), stack.engine_token, self._prompts)
            for name in self.found.replicas
        ]
        return list(await asyncio.gather(*asked))


def samples(groups: Sequence[Group]) -> list[Sample]:
    """Every turn of every episode whose group teaches something, with its episode's advantage."""
    return [
        Sample(turn.prompt_ids, turn.output_ids, advantage)
        for group in groups
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
        for turn in trajectory.turns
        if advantage
    ]


async def _pauses(stack: Stack, version: int) -> list[float]:
    """How long each engine stood still for the update, as it measured itself."""
    updates = (await stack.status()).get("updates", ())
    return [
        float(update["engine_ms"]["pause"])
        for update in updates
        if update["ok"] and update["version"] == version and "pause" in update["engine_ms"]
    ]


def _reading(board: WatchedBoard[ReplicaReading]) -> ReplicaReading:
    reading = board.read(time.monotonic_ns(), None)
    if isinstance(reading, Unknown):
        raise NotReady(f"{board.path}: {reading}")
    return reading


def _step_line(step: StepRecord) -> str:
    rewards = [one.reward for group in step.groups for one in group.trajectories]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    trained: Trained = step.trained
    seen: VersionAudit = step.audit
    verdict = "bit-exact" if seen.ok else "NOT as the trainer made it"
    return (
        f"step {step.rl_step}: reward {mean:.2f}, {trained.changed} of {trained.elements} weights changed, "
        f"{trained.delta_bytes:,} bytes; version {trained.version} on every replica, {verdict}"
    )
