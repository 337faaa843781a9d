"""`rose.toml` and ROSE_* variables -> one frozen configuration.

Precedence: ROSE_<SECTION>__<KEY> in the environment, then the file, then the defaults here.  Every error
names the file, the key and what would be accepted; unknown keys are errors, not silence.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rose.errors import ConfigError
from rose.units import JobId, NodeId, ReplicaId

SCHEMA = 1
CONFIG_NAME = "rose.toml"
_ENV_PREFIX = "ROSE_"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, and strict about keys."""


class NodeConfig(_Section, frozen=True):
    """This host's daemon."""

    id: NodeId = NodeId("node-0")
    state_dir: str = "/var/lib/rose"
    """Host store of weights, journals, logs of engines."""
    run_dir: str = "/dev/shm/rose"
    """Boards; must be on a tmpfs."""
    control_socket: str = ""
    """Unix socket of rosed; empty means `<state_dir>/rosed.sock`."""
    token_file: str = ""
    """Secret shared with the engines of this host (mode 0600); empty means `<state_dir>/engine.token`."""
    tick_ms: float = 50
    gate_lease_ms: float = 1000
    """Gates close by themselves when rosed has not renewed them for this long."""
    heartbeat_ms: float = 1000
    engine_start_timeout_s: float = 300
    engine_stop_grace_s: float = 10
    restart_backoff_s: float = 2
    restart_backoff_max_s: float = 60


class DeviceConfig(_Section, frozen=True):
    """The accelerator that serving and rollout share; on a CPU host, the cores that play it."""

    kind: Literal["cpu", "cuda"] = "cpu"
    id: str = "cpu-0"
    cpus: tuple[int, ...] = (0,)
    """Cores the engines' workers share (kind cpu)."""
    memory_bytes: int = 0
    """Capacity to divide (kind cpu); 0 means the host's memory."""


class ServingConfig(_Section, frozen=True):
    """The serving engine on this host.  ROSE observes it; it never starts, stops or restarts it."""

    name: str = "serving"
    url: str = ""
    """Empty: no serving engine here (a host of dedicated replicas)."""
    ttft_slo_ms: float = 250
    tpot_slo_ms: float = 60


class ReplicaConfig(_Section, frozen=True):
    """One rollout engine that rosed starts on this host."""

    id: ReplicaId
    kind: Literal["opportunistic", "dedicated"]
    model: str
    """Checkpoint directory of version 0."""
    served_name: str = "rollout"
    host: str = "127.0.0.1"
    port: int = 0
    cpus: tuple[int, ...] = ()
    """Cores of the engine's worker (kind cpu)."""
    api_cpus: tuple[int, ...] = ()
    """Cores of its API server and core loop."""
    idle_priority: bool = False
    """Run the worker under SCHED_IDLE (kind cpu)."""
    kv_blocks: int = 0
    """KV blocks to allocate; 0 lets vLLM choose."""
    block_tokens: int = 32
    context_tokens_max: int = 2048
    sequences_max: int = 16
    engine_args: tuple[str, ...] = ()
    """More arguments for the vLLM server."""


class AdmissionConfig(_Section, frozen=True):
    """When rollout tokens may run beside serving."""

    mode: Literal["strict", "closed", "open"] = "strict"
    """strict: only while serving is idle.  open harms serving: for benchmarks."""
    token_cap: int = 512
    margin_ms: float = 5
    board_stale_ms: float = 1000


class MemoryConfig(_Section, frozen=True):
    """Serving-first memory sharing."""

    headroom_share: float = 0.2
    cut_share: float = 0.5
    """Share of the KV budget that remains after an emergency cut."""
    kv_budget_blocks_min: int = 4


class SchedulerConfig(_Section, frozen=True):
    """rose-scheduler and its gateway."""

    control: str = "tcp://127.0.0.1:7701"
    """ZMQ address that nodes connect to.  Other than loopback is refused until CURVE is configured."""
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 7700
    state_dir: str = "/var/lib/rose/scheduler"
    suspect_after_ms: float = 3000
    dead_after_ms: float = 6000
    stall_timeout_ms: float = 2000
    """A node silent this long gets no new turns."""
    turn_stall_timeout_s: float = 120
    """A dispatched turn without a new token for this long is moved (the gate may hold it back for long)."""
    queue_max: int = 4096
    body_bytes_max: int = 8 << 20
    token_file: str = ""
    """Token that clients must send; empty means none is asked for (loopback only)."""


class RelayConfig(_Section, frozen=True):
    """Where weight versions are exchanged."""

    url: str = "http://127.0.0.1:7702"
    host: str = "127.0.0.1"
    port: int = 7702
    capacity_bytes: int = 1 << 30
    token_file: str = ""
    stage_ttl_s: float = 600


class JobConfig(_Section, frozen=True):
    """The RL job whose replicas this node runs."""

    id: JobId = JobId("job-0")
    n_rl: int = 1
    n_serving_max: int = 1
    staleness_max: int = 0
    trajectories_per_replica_max: int = 16


class Config(_Section, frozen=True):
    """All of `rose.toml`."""

    schema: int = SCHEMA
    node: NodeConfig = NodeConfig()
    device: DeviceConfig = DeviceConfig()
    serving: ServingConfig = ServingConfig()
    replicas: tuple[ReplicaConfig, ...] = ()
    admission: AdmissionConfig = AdmissionConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    relay: RelayConfig = RelayConfig()
    job: JobConfig = JobConfig()

    @property
    def control_socket(self) -> Path:
        """Where rosed listens for `rose status` and the like."""
        return Path(self.node.control_socket or f"{self.node.state_dir}/rosed.sock")

    @property
    def engine_token_file(self) -> Path:
        """Where the secret shared with this host's engines is kept."""
        return Path(self.node.token_file or f"{self.node.state_dir}/engine.token")

    def replica(self, replica: ReplicaId) -> ReplicaConfig:
        """The replica's section; raises KeyError."""
        for section in self.replicas:
            if section.id == replica:
                return section
        raise KeyError(replica)


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read and check the configuration.

    `path` None looks at ROSE_CONFIG, then ./rose.toml, then /etc/rose/rose.toml.  Raises ConfigError.
    """
    source = path or _find(environ)
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file", "make one with `rose init`, or name it with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    return build(document, str(source), environ)


def build(document: dict[str, Any], source: str, environ: Mapping[str, str] | None = None) -> Config:
    """Check a parsed document; `source` names it in errors.  Raises ConfigError."""
    merged = _with_environment(document, environ or {})
    try:
        config = msgspec.convert(merged, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(str(error))}", "`rose init --stdout` prints every key") from None
    _check(config, source)
    return config


def _find(environ: Mapping[str, str]) -> Path:
    if named := environ.get("ROSE_CONFIG"):
        return Path(named)
    here = Path(CONFIG_NAME)
    return here if here.exists() else Path("/etc/rose") / CONFIG_NAME


def _with_environment(document: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in document.items()}
    for name in sorted(environ):
        if not name.startswith(_ENV_PREFIX) or "__" not in name:
            continue
        section, _, key = name[len(_ENV_PREFIX) :].lower().partition("__")
        part = merged.setdefault(section, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{name}: `{section}` cannot be set from the environment")
        part[key] = _value(environ[name])
    return merged


def _value(text: str) -> Any:
    """An environment value as TOML would read it, or else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _readable(error: str) -> str:
    """msgspec says "... - at `$.serving.port`"; put the key first, as an operator reads it."""
    text, _, where = error.partition(" - at `$.")
    return f"{where.rstrip('`')}: {text}" if where else text


def _check(config: Config, source: str) -> None:
    """Rules that concern more than one key."""

    def refuse(key: str, why: str, hint: str = "") -> None:
        raise ConfigError(f"{source}: {key}: {why}", hint)

    if config.schema != SCHEMA:
        refuse("schema", f"{config.schema} is not supported", f"this release reads schema {SCHEMA}")
    ids = [section.id for section in config.replicas]
    if len(set(ids)) != len(ids):
        refuse("replicas", f"ids are not unique: {', '.join(ids)}")
    for section in config.replicas:
        if section.kind == "opportunistic" and not config.serving.url:
            refuse(f"replicas.{section.id}", "an opportunistic replica needs [serving] url")
        if not 0 <= section.port <= 65535:
            refuse(f"replicas.{section.id}.port", f"{section.port} is not a port")
    for key, value in (
        ("serving.ttft_slo_ms", config.serving.ttft_slo_ms),
        ("serving.tpot_slo_ms", config.serving.tpot_slo_ms),
        ("node.tick_ms", config.node.tick_ms),
        ("node.heartbeat_ms", config.node.heartbeat_ms),
        ("admission.board_stale_ms", config.admission.board_stale_ms),
    ):
        if value <= 0:
            refuse(key, f"{value} must be above 0")
    if not 0 < config.memory.cut_share < 1:
        refuse("memory.cut_share", "must lie between 0 and 1")
    if not 0 <= config.memory.headroom_share < 1:
        refuse("memory.headroom_share", "must lie in [0, 1)")
    if config.node.gate_lease_ms < 2 * config.node.tick_ms:
        refuse("node.gate_lease_ms", "must be at least twice node.tick_ms", "or the gate closes between two ticks")
    if config.scheduler.stall_timeout_ms <= config.node.heartbeat_ms:
        refuse("scheduler.stall_timeout_ms", "must be above node.heartbeat_ms", "or every node looks stalled")
