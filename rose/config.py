"""`rose.toml` and ROSE_* variables -> one frozen configuration.

The docstring under each key is its documentation: `rose init` prints it above the key.


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

from rose.config_environ import readable, with_environment
from rose.config_lending import LendingConfig
from rose.config_rules import check
from rose.errors import ConfigError
from rose.units import JobId, NodeId, ReplicaId

SCHEMA = 1
CONFIG_NAME = "rose.toml"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, and strict about keys."""


class NodeConfig(_Section, frozen=True):
    """This host's daemon, rosed."""

    id: NodeId = NodeId("node-0")
    """Name of this host, unique among the hosts of one rose-scheduler."""
    state_dir: str = "/var/lib/rose"
    """Host store of weights, journals, logs of engines."""
    run_dir: str = "/dev/shm/rose"
    """Boards; must be on a tmpfs."""
    control_socket: str = ""
    """Unix socket of rosed; empty means `<state_dir>/rosed.sock`."""
    token_file: str = ""
    """Secret shared with the engines of this host (mode 0600); empty means `<state_dir>/engine.token`."""
    tick_ms: float = 50
    """Period of the control loop: observe, decide, renew the gates."""
    gate_lease_ms: float = 1000
    """Gates close by themselves when rosed has not renewed them for this long."""
    heartbeat_ms: float = 1000
    """Period of the reports to rose-scheduler."""
    engine_start_timeout_s: float = 300
    """An engine that does not answer its health probe by then counts as dead."""
    engine_stop_grace_s: float = 10
    """Time an engine has to end by itself before it is killed."""
    adopt_grace_s: float = 0
    """How long engines outlive a rosed that was killed, with closed gates, for the next one to take
    them over; 0 ends them with it."""
    restart_backoff_s: float = 2
    """Wait before a dead engine is started again; doubles up to the next key."""
    restart_backoff_max_s: float = 60
    """Longest wait before a dead engine is started again."""
    weights_timeout_s: float = 120
    """Deadline of one pull of a weight version, and of one update of an engine."""
    weights_threads: int = 2
    """Threads that decode versions."""
    weights_keep: int = 4
    """Newest weight versions kept on disk as they came, beside those that engines still need."""
    weights_stateful: bool = False
    """Take versions as stateful deltas where the trainer offers them: some percent fewer bytes, for a byte
    of memory for every weight."""
    weights_undo_max: int = 4
    """Weight versions that can be taken back without a download; 0 keeps no copy of the checkpoint."""
    metrics_port: int = 0
    """Port of the Prometheus endpoint on 127.0.0.1; 0 means none."""
    log_bytes_max: int = 16 << 20
    """Size at which the log of an engine is rotated; one old file is kept."""
    journal_bytes_max: int = 32 << 20
    """Size at which the journal of decisions is rotated; one old file is kept."""


class DeviceConfig(_Section, frozen=True):
    """The accelerator that serving and rollout share; on a CPU host, the cores that play it."""

    kind: Literal["cpu", "cuda"] = "cpu"
    """`cpu` or `cuda`."""
    id: str = "cpu-0"
    """Name of the device, unique in the cluster: at most one job borrows it."""
    gpu: str = ""
    """UUID (`GPU-...`, `MIG-...`), PCI address or index of the GPU (kind cuda); empty means the only one."""
    cpus: tuple[int, ...] = (0,)
    """Cores the engines' workers share (kind cpu)."""
    memory_bytes: int = 0
    """Capacity to divide (kind cpu); 0 means the host's memory."""
    rich_in: Literal["", "compute", "bandwidth"] = ""
    """What it offers most of for its price: tasks that mostly prefill go to
    `compute`, others to `bandwidth`."""


class ServingConfig(_Section, frozen=True):
    """The serving engine on this host.  ROSE observes it; it never starts, stops or restarts it."""

    mode: Literal["plugin", "metrics"] = "plugin"
    """plugin: the engine has ROSE's plugin and publishes its slack.  metrics: it has not; rollout runs only
    after it was idle for a while, one capped step for each reading of its metrics."""
    name: str = "serving"
    """Name the serving engine's plugin was given; names its board."""
    boards: tuple[str, ...] = ()
    """Boards that the opportunistic replicas obey, where they share several devices with serving (rank 1 of a
    data-parallel engine writes `<name>-dp1`, and so on); empty means `name` alone."""
    url: str = ""
    """Its base URL; empty: no serving engine here (a host of dedicated replicas)."""
    ttft_slo_ms: float = 250
    """Budget of the time to the first token."""
    tpot_slo_ms: float = 60
    """Budget of the time per output token after the first."""
    probe_ms: float = 1000
    """Period of the health probe and of the reading of its metrics (mode plugin)."""
    metrics_ms: float = 500
    """The same in mode metrics; at least ttft_slo_ms, as a request shows in the metrics only once it has its
    first token."""
    metrics_stale_ms: float = 5000
    """Metrics older than this are unknown."""
    quiet_ms: float = 2000
    """Mode metrics: how long the engine must have had nothing to do."""


class ReplicaConfig(_Section, frozen=True):
    """One rollout engine that rosed starts on this host."""

    id: ReplicaId
    """Name of the replica, unique among all hosts."""
    kind: Literal["opportunistic", "dedicated"]
    """`opportunistic` shares the serving device and obeys its gate; `dedicated` has its own."""
    model: str
    """Checkpoint directory of version 0."""
    served_name: str = "rollout"
    """Model name that clients ask for."""
    host: str = "127.0.0.1"
    """Address the engine listens on."""
    port: int = 0
    """Port the engine listens on; 0 takes a free one."""
    cpus: tuple[int, ...] = ()
    """Cores of the engine's worker (kind cpu); empty means the device's."""
    api_cpus: tuple[int, ...] = ()
    """Cores of its API server and core loop; empty leaves their affinity alone."""
    idle_priority: bool = False
    """Run the worker under SCHED_IDLE (kind cpu)."""
    tensor_parallel: int = 1
    """Workers that the model is cut over, each with its share of `cpus` (kind cpu) or a GPU of its own."""
    kv_blocks: int = 0
    """KV blocks to allocate; 0 lets vLLM choose."""
    block_tokens: int = 32
    """Tokens in a KV block."""
    context_tokens_max: int = 2048
    """Longest context, prompt and answer together."""
    sequences_max: int = 16
    """Most requests that run at once."""
    profile: str = ""
    """Latency profile to start from, as `rose profile` wrote it; empty: it learns from its own steps."""
    step_log: bool = False
    """Log every step in a ring in `node.run_dir`, for measurements: some microseconds a step."""
    engine_args: tuple[str, ...] = ()
    """More arguments for the vLLM server."""


class MpsConfig(_Section, frozen=True):
    """NVIDIA MPS (kind cuda): serving and rollout at once on the GPU, instead of taking turns."""

    enabled: bool = False
    """The operator opts in here and in the launch of the serving engine: see `rose mps env`."""
    thread_percentage: int = 30
    """Share of the GPU's multiprocessors that the rollout engine may use, in percent."""
    memory_bytes: int = 0
    """Device memory that the rollout engine may take; 0 means no limit."""
    run_dir: str = "/run/rose/mps"
    """Pipes and logs of the GPU's own control daemon, in a folder named by its UUID."""
    control: str = "nvidia-cuda-mps-control"
    """NVIDIA's command."""


class AdmissionConfig(_Section, frozen=True):
    """When rollout tokens may run beside serving."""

    mode: Literal["strict", "slack", "closed", "open"] = "strict"
    """strict: only while serving is idle.  slack: also beside decoding requests, as far as their budgets
    allow.  open harms serving: for benchmarks."""
    token_cap: int = 512
    """Most rollout tokens in one step of an open gate."""
    margin_ms: float = 5
    """Safety margin on every predicted duration."""
    board_stale_ms: float = 1000
    """A board older than this is unknown, and closes the gate; at least 300, as idle engines write theirs
    every 100 ms."""


class MemoryConfig(_Section, frozen=True):
    """Serving-first memory sharing."""

    headroom_share: float = 0.2
    """Share of the device's memory that is kept for serving."""
    cut_share: float = 0.5
    """Share of the KV budget that remains after an emergency cut."""
    kv_budget_blocks_min: int = 4
    """A cut never goes below this many KV blocks."""
    shared_kv_bytes: int = 0
    """KV memory that the serving engine and the opportunistic replicas share, where the serving engine was
    started with this as ROSE_ENGINE_KV_SHARED_BYTES: it lends what it leaves unused, and takes it back.
    0: each engine has its own (`static`)."""
    inactive_unleased: bool = False
    """An opportunistic replica on which no job holds a lease is inactive: its engine stays up, with no KV
    memory.  A lease activates it."""


class SchedulerConfig(_Section, frozen=True):
    """rose-scheduler and its gateway."""

    control: str = "tcp://127.0.0.1:7701"
    """ZMQ address that nodes connect to.  Any address but loopback needs curve_dir."""
    curve_dir: str = ""
    """Directory with this host's CURVE keys (`rose keys`), on the scheduler's host and on nodes."""
    gateway_host: str = "127.0.0.1"
    """Address the gateway listens on."""
    gateway_port: int = 7700
    """Port of the gateway, which agents call."""
    state_dir: str = "/var/lib/rose/scheduler"
    """Durable state: jobs, leases, finished turns."""
    suspect_after_ms: float = 3000
    """A node silent this long is suspect."""
    dead_after_ms: float = 6000
    """A node silent this long is dead: its turns are moved, its leases end."""
    stall_timeout_ms: float = 2000
    """A node silent this long gets no new turns."""
    turn_stall_timeout_s: float = 120
    """A dispatched turn without a new token for this long is moved (the gate may hold it back for long)."""
    lease_min_s: float = 60
    """Least time a replica is lent to a job before fairness between jobs may take it back."""
    borrow_kv_share_max: float = 0.8
    """Serving devices whose recent KV use is at or above that are not borrowed; those lent stay lent."""
    stream_spacing_max_ms: float = 100
    """How far apart the gateway may read a stream that has begun while it is short of processor time; what
    has come meanwhile is sent on together.  0: each token by itself, however busy."""
    queue_max: int = 4096
    """Turns that may wait for a replica; further ones are refused with 429."""
    body_bytes_max: int = 8 << 20
    """Largest request body the gateway reads."""
    token_file: str = ""
    """Token that clients must send; empty means none is asked for (loopback only)."""
    tokens_dir: str = ""
    """Directory of tokens that clients may send, by scope: NAME.read, NAME.submit, NAME.admin
    (`rose token`)."""
    tls_cert: str = ""
    """Certificate chain (PEM) of the gateway; any address but loopback needs TLS."""
    tls_key: str = ""
    """Private key (PEM) of the certificate."""
    tls_ca: str = ""
    """Certificates (PEM) by which `rose jobs` and the like know the gateway; empty means the system's."""
    tls_elsewhere: bool = False
    """A proxy before the gateway speaks TLS: plain HTTP is then served on any address."""
    otlp_traces_endpoint: str = ""
    """Where spans of turns are sent to (OTLP over HTTP, the extra `otel`), such as
    http://127.0.0.1:4318/v1/traces; empty: none are recorded.  Off loopback it must be https."""
    workers: tuple[str, ...] = ()
    """URLs of vLLM or SGLang servers that ROSE does not manage, used as dedicated replicas."""


class RelayConfig(_Section, frozen=True):
    """Where weight versions are exchanged."""

    kind: Literal["embedded", "mooncake"] = "embedded"
    """embedded: `rose relay` keeps the versions itself.  mooncake: a Mooncake Store does, which has no access
    control and listens on all interfaces: private networks only.  The same for relay, trainers and nodes."""
    url: str = ""
    """Where trainers and nodes reach the relay; empty: where `rose relay` listens, by host and port."""
    host: str = "127.0.0.1"
    """Address `rose relay` listens on."""
    port: int = 7702
    """Port `rose relay` listens on."""
    capacity_bytes: int = 1 << 30
    """Memory for versions, which `rose relay` keeps or (kind mooncake) lends to the store.  A full relay
    refuses new versions, it never drops committed ones."""
    token_file: str = ""
    """Token that trainers and nodes must send; empty means none is asked for (loopback only)."""
    tokens_dir: str = ""
    """Directory of tokens that `rose relay` accepts, by scope: NAME.read, NAME.submit, NAME.admin
    (`rose token`)."""
    stage_ttl_s: float = 600
    """A version that was begun and not committed by then is dropped."""
    tls_cert: str = ""
    """Certificate chain (PEM) of `rose relay`; any address but loopback needs TLS and a token."""
    tls_key: str = ""
    """Private key (PEM) of the certificate."""
    tls_ca: str = ""
    """Certificates (PEM) by which trainers and nodes know the relay; empty means the system's."""
    shared_memory: bool = True
    """Let processes of the relay's user on its host read from its memory (kind embedded)."""
    streams: int = 8
    """Connections that share the pulls of a process (kind embedded); on loopback one is used."""
    pace_bytes_per_s: int = 0
    """Most that one connection sends, paced by the kernel (kind embedded); 0 is without limit."""
    congestion: str = ""
    """Congestion control of what is sent, such as bbr (kind embedded); empty means the system's."""
    mooncake_master: str = "127.0.0.1:50051"
    """Address of `mooncake_master` (kind mooncake)."""
    mooncake_host: str = "127.0.0.1"
    """Address of this host by which the store's other hosts reach it (kind mooncake)."""
    mooncake_replicas: int = 1
    """Copies of each bucket, each on another lender of memory (kind mooncake)."""
    mooncake_lease_s: float = 10
    """The master's --default_kv_lease_ttl, which must be at least 4 times what the slowest bucket takes (kind
    mooncake)."""
    mooncake_namespace: str = "rose"
    """First part of every key (kind mooncake).  All objects below it are removed when `rose relay` starts, so
    each relay of a store needs its own."""

    @property
    def address(self) -> str:
        """Where trainers and nodes reach the relay: `url`, or what host and port amount to."""
        scheme = "https" if self.tls_cert else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.url or f"{scheme}://{host}:{self.port}"


class JobConfig(_Section, frozen=True):
    """The RL job whose replicas this node runs."""

    id: JobId = JobId("job-0")
    """Name of the job; its weight versions are pulled from the relay."""
    n_rl: int = 1
    """Dedicated replicas the job asks for."""
    n_serving_max: int = 1
    """Most borrowed serving devices the job may use."""
    staleness_max: int = 0
    """Versions a turn may lag behind the required one; 0 is on-policy."""
    trajectories_per_replica_max: int = 16
    """Most trajectories on one replica."""


class Config(_Section, frozen=True):
    """All of `rose.toml`."""

    schema: int = SCHEMA
    """Layout of this file."""
    node: NodeConfig = NodeConfig()
    device: DeviceConfig = DeviceConfig()
    serving: ServingConfig = ServingConfig()
    replicas: tuple[ReplicaConfig, ...] = ()
    mps: MpsConfig = MpsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    memory: MemoryConfig = MemoryConfig()
    lending: LendingConfig = LendingConfig()
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


_DEFAULTS = Config()


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read and check the configuration.

    `path` None looks at ROSE_CONFIG, then ./rose.toml, then /etc/rose/rose.toml.  Raises ConfigError.
    """
    source = path or _find(environ)
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{source}: no such file", "make one with `rose init`, or name it with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid TOML: nested too deeply") from None
    return build(document, str(source), environ)


def build(document: dict[str, Any], source: str, environ: Mapping[str, str] | None = None) -> Config:
    """Check a parsed document; `source` names it in errors.  Raises ConfigError."""
    merged = with_environment(document, environ or {}, _DEFAULTS)
    try:
        config = msgspec.convert(merged, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source}: {readable(str(error))}", "`rose init --stdout` prints every key"
        ) from None
    if config.schema != SCHEMA:
        hint = f"this release reads schema {SCHEMA}"
        raise ConfigError(f"{source}: schema: {config.schema} is not supported", hint)
    check(config, source)
    return config


def _find(environ: Mapping[str, str]) -> Path:
    if named := environ.get("ROSE_CONFIG"):
        return Path(named)
    here = Path(CONFIG_NAME)
    return here if here.exists() else Path("/etc/rose") / CONFIG_NAME
