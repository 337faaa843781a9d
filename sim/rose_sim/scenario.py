"""What to simulate: a scenario file (TOML) as frozen structs, checked once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from rose.errors import ConfigError

SCHEMA = 1


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a scenario."""


class Serving(_Part, frozen=True, kw_only=True):
    """The serving fleet and its load."""

    model: str
    gpus: int
    tp: int = 1
    ttft_ms: float
    tpot_ms: float
    rate_rps: float = 5.0
    """Mean over the day, of the whole fleet.  A recorded trace is thinned to it."""
    amplitude: float = 0.55
    """Of the generated day: at 5 requests/s it gives the published peaks, 1.7 (minute) and 4.2 (second)."""
    period_s: float = 86_400.0
    start_s: float = 0.0
    """Time of day at which the simulation begins."""
    trace: str = "generated"
    """`generated`, or the path of a trace (see `rose_sim.traces`)."""
    profile: str = ""
    """Path of a measured engine (`rose profile`, `rose sim calibrate`), in place of the cost model's."""
    step_tokens_max: int = 8192
    requests_max: int = 256
    prefill_gpus: int = 0
    """Of `gpus`, those that only prefill and hand the KV over to the others; 0: every engine does both."""
    handover_gb_s: float = 25.0
    """At which KV goes from a prefill to a decode engine: half of a 400 Gbps link (ours)."""

    @property
    def instances(self) -> int:
        """Serving engines."""
        return self.gpus // self.tp


class Rollout(_Part, frozen=True, kw_only=True):
    """The rollout engines."""

    model: str
    tp: int = 1
    profile: str = ""
    """As `serving.profile`; engines on `mixed_gpu` keep the cost model's."""
    dedicated_gpus: int
    borrowed_gpus_max: int
    trajectories_per_gpu_max: int = 16
    context_tokens_max: int = 32_768
    step_tokens_max: int = 2048
    """Of dedicated engines; beside serving the admission gate sets the limit."""
    headroom_share: float = 0.2
    token_cap: int = 512
    margin_ms: float = 5.0
    gate_mode: Literal["strict", "slack", "open"] = "strict"
    mixed_gpu: str = ""
    """Kind of further dedicated GPUs, beside those of the scenario's kind (RollArt's mixed pool)."""
    mixed_gpus: int = 0

    @property
    def replica_cap(self) -> int:
        """Turns at a time on one engine."""
        return self.trajectories_per_gpu_max * self.tp


class Rl(_Part, frozen=True, kw_only=True):
    """The RL run."""

    algorithm: Literal["grpo", "dapo"] = "grpo"
    groups: int
    group_size: int
    steps: int
    first_step: int = 20
    step_stride: int = 1
    """Steps between those simulated: density and demand go by the step's number."""
    train_s: float
    demand_max: float = 5.7
    """DAPO: most trajectories generated in a step, over the batch."""
    training_gpus: int = 0
    reward_s: float = 0.01
    staleness: int | None = None
    """Alpha of systems whose rollout overlaps training, in versions; left out: the system's own."""
    abort_stale: bool = False
    """Trajectories that began on weights further back than alpha begin again, from their prompts."""
    second_share: float = 0.0
    """Share of the groups that are of the second task."""


class Trajectories(_Part, frozen=True, kw_only=True):
    """Shape of an episode.  All sizes are log-normal: median and sigma."""

    turns_median: float
    turns_sigma: float
    turns_max: int
    prompt_tokens: int
    response_median: float
    response_sigma: float
    """Between trajectories: some think aloud."""
    turn_sigma: float = 0.4
    """Between turns of one trajectory."""
    response_max: int = 8192
    observation_median: float
    observation_sigma: float = 0.5
    env_s_median: float
    env_sigma: float = 0.8
    reset_s: float = 1.0


class Network(_Part, frozen=True, kw_only=True):
    """Between the trainer's cluster and the serving cluster."""

    gbps: float = 200.0
    push_gb_s: float = 0.48
    """What an end host pushes (RollArt, table 3: 0.44 to 0.51)."""
    pull_gb_s: float = 2.05
    """What an end host pulls over 200 GbE with TCP (the same table: 2.0 to 2.4)."""
    dense_density: float = 0.5
    """Share of weights that the first step changes."""
    density: float = 0.033
    """Share that a late step changes."""
    dense_steps: float = 4.0
    """Decay of the early density, in steps."""


class Faults(_Part, frozen=True, kw_only=True):
    """What goes wrong, as rates; swarm testing: each seed has some kinds of fault and not others."""

    swarm: bool = False
    """The seed chooses which of the kinds below happen at all (each with probability 1/2)."""
    crashes_per_hour: float = 0.0
    """Of a rollout engine: its turns and KV are lost, and it is back after `restart_s`."""
    restart_s: float = 60.0
    partitions_per_hour: float = 0.0
    """Of a node: the scheduler hears nothing of it for `partition_s`, while its engine goes on."""
    partition_s: float = 20.0
    reclaims_per_hour: float = 0.0
    """Of a serving GPU: its operator takes KV memory back from rollout."""

    @property
    def any(self) -> bool:
        """Whether anything can go wrong."""
        return self.crashes_per_hour + self.partitions_per_hour + self.reclaims_per_hour > 0


class Scenario(_Part, frozen=True, kw_only=True):
    """One experiment: the same load and episodes for every system named."""

    schema: int = SCHEMA
    name: str
    seed: int = 1
    gpu: str = "H800"
    systems: tuple[str, ...] = ("rose",)
    duration_s: float | None = None
    """End here even if steps are left; also how long a system without RL is watched."""
    serving: Serving
    rollout: Rollout
    rl: Rl
    trajectories: Trajectories
    second_task: Trajectories | None = None
    """Shape of the second task's episodes."""
    network: Network = Network()
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        checks = (
            ("schema", self.schema == SCHEMA),
            ("serving.gpus", self.serving.gpus >= 0 and self.serving.gpus % max(1, self.serving.tp) == 0),
            ("serving.tp", self.serving.tp >= 1),
            ("serving.rate_rps", self.serving.rate_rps > 0),
            ("serving.amplitude", 0 <= self.serving.amplitude <= 1),
            ("serving.ttft_ms", self.serving.ttft_ms > 0),
            ("serving.tpot_ms", self.serving.tpot_ms > 0),
            ("rollout.tp", self.rollout.tp >= 1),
            ("rollout.dedicated_gpus", self.rollout.dedicated_gpus >= self.rollout.tp),
            ("rollout.borrowed_gpus_max", self.rollout.borrowed_gpus_max >= 0),
            ("rollout.trajectories_per_gpu_max", self.rollout.trajectories_per_gpu_max >= 1),
            ("rollout.headroom_share", 0 <= self.rollout.headroom_share < 1),
            ("rl.groups", self.rl.groups >= 1),
            ("rl.group_size", self.rl.group_size >= 1),
            ("rl.steps", self.rl.steps >= 1),
            ("rl.train_s", self.rl.train_s >= 0),
            ("rl.demand_max", self.rl.demand_max >= 1),
            ("rl.staleness", self.rl.staleness is None or self.rl.staleness >= 1),
            ("trajectories.turns_max", self.trajectories.turns_max >= 1),
            (
                "trajectories.prompt_tokens",
                0 < self.trajectories.prompt_tokens < self.rollout.context_tokens_max,
            ),
            (
                "serving.prefill_gpus",
                0 <= self.serving.prefill_gpus < max(1, self.serving.gpus)
                and self.serving.prefill_gpus % max(1, self.serving.tp) == 0,
            ),
            ("serving.handover_gb_s", self.serving.handover_gb_s > 0),
            (
                "rollout.mixed_gpus",
                self.rollout.mixed_gpus >= 0
                and bool(self.rollout.mixed_gpus) == bool(self.rollout.mixed_gpu),
            ),
            (
                "rl.second_share",
                0 <= self.rl.second_share <= 1 and (self.second_task is not None or not self.rl.second_share),
            ),
            ("faults.crashes_per_hour", self.faults.crashes_per_hour >= 0),
            ("faults.partitions_per_hour", self.faults.partitions_per_hour >= 0),
            ("faults.reclaims_per_hour", self.faults.reclaims_per_hour >= 0),
            ("faults.restart_s", self.faults.restart_s > 0),
            ("faults.partition_s", self.faults.partition_s > 0),
            ("network.gbps", self.network.gbps > 0),
            ("network.density", 0 < self.network.density <= 1),
        )
        for name, ok in checks:
            if not ok:
                raise ConfigError(f"scenario {self.name}: {name} is out of range")
        if self.serving.tp != self.rollout.tp and self.rollout.borrowed_gpus_max:
            raise ConfigError(
                f"scenario {self.name}: serving.tp and rollout.tp differ",
                "an engine borrows the GPUs of exactly one serving engine",
            )


def read(path: Path) -> Scenario:
    """Read a scenario.  Raises ConfigError that names the file and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return msgspec.convert(tomllib.loads(text), Scenario)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", "docs/simulator.md lists the keys of a scenario") from None
