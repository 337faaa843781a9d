"""The command line and environment of an engine with the ROSE plugin.  Imports no vLLM.

rosed starts rollout engines with `rollout_command`; an operator (or the demo) starts the serving engine with
`serving_command`.  Both give a complete environment, so `Popen(command.argv, env=command.env)` is all there
is to do; cores and scheduling class are set by the plugin inside the engine, from its settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rose.config import Config, ReplicaConfig
from rose.engines.vllm.settings import PluginSettings
from rose.units import MIB

INFERRED_OPEN_MS = 20.0
"""How long a board that rosed inferred from metrics holds: time to wake up and begin one step."""
_PACKAGE = "rose.engines.vllm"
_API_SERVER = "vllm.entrypoints.openai.api_server"
_KV_BYTES_CPU = 256 * MIB
"""KV memory that a CPU engine may take: vLLM's own default there is most of the host's memory."""
_ROOM_TO_GROW = 1.5
"""A replica leaves half the headroom more of shared memory free than what a cut restores: otherwise every
block that serving takes back would cause one."""
_STEP_TOKENS_MAX = 512
"""Most tokens a step schedules (chunked prefill): bounds the step that an arriving request waits for."""
_DROPPED = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", "VLLM_USE_SPINLOOP_EXT")
"""Variables of the caller that would override what is asked for here."""


class EngineCommand(NamedTuple):
    """How to start an engine."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment."""


class EngineShape(NamedTuple):
    """Sizes of an engine."""

    kv_blocks: int = 0
    """KV blocks to allocate; 0 lets the engine choose."""
    block_tokens: int = 32
    context_tokens_max: int = 2048
    sequences_max: int = 16


DEFAULT_SHAPE = EngineShape()


class _Server(NamedTuple):
    model: str
    served_name: str
    host: str
    port: int


def serving_command(
    *,
    model: str,
    port: int,
    run_dir: str,
    token_file: str,
    name: str = "serving",
    served_name: str = "serving",
    host: str = "127.0.0.1",
    ttft_slo_ms: float = 250,
    tpot_slo_ms: float = 60,
    cpus: Sequence[int] = (),
    api_cpus: Sequence[int] = (),
    profile: str = "",
    slo_classes: str = "",
    slo_token_file: str = "",
    step_log: bool = False,
    kv_shared_bytes: int = 0,
    shape: EngineShape = DEFAULT_SHAPE,
    device: str = "cpu",
    engine_args: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> EngineCommand:
    """A serving engine that publishes its slack; `cpus` are its worker's cores, `api_cpus` all others'.

    `slo_classes`, `slo_token_file` and `kv_shared_bytes` are those of PluginSettings.
    """
    settings = PluginSettings(
        role="serving",
        name=name,
        run_dir=run_dir,
        token_file=token_file,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        worker_cpus=_cores(cpus),
        api_cpus=_cores(api_cpus),
        profile_file=profile,
        slo_classes=slo_classes,
        slo_token_file=slo_token_file,
        step_log=step_log,
        kv_shared_bytes=kv_shared_bytes,
    )
    argv = _server(_Server(model, served_name, host, port), shape, device, kv_shared_bytes)
    argv += ["--scheduler-cls", _scheduler("serving", device)]
    if slo_classes:
        argv += ["--middleware", f"{_PACKAGE}.slo_class.SloClassMiddleware"]
    argv += engine_args
    return EngineCommand(tuple(argv), _environment(settings, len(cpus), device, environ))


def rollout_command(
    replica: ReplicaConfig,
    config: Config,
    *,
    port: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> EngineCommand:
    """A rollout engine of this node; `port` stands in for a replica port of 0 (any free one)."""
    opportunistic = replica.kind == "opportunistic"
    settings = PluginSettings(
        role="rollout",
        name=replica.id,
        run_dir=config.node.run_dir,
        token_file=str(config.engine_token_file),
        serving_name=",".join(config.serving.boards or (config.serving.name,)) if opportunistic else "",
        ttft_slo_ms=config.serving.ttft_slo_ms,
        tpot_slo_ms=config.serving.tpot_slo_ms,
        board_stale_ms=config.admission.board_stale_ms,
        slack_stale_ms=INFERRED_OPEN_MS if config.serving.mode == "metrics" else 0,
        worker_cpus=_cores(replica.cpus),
        worker_idle_priority=replica.idle_priority,
        api_cpus=_cores(replica.api_cpus),
        profile_file=replica.profile,
        step_log=replica.step_log,
        lent_log=opportunistic,
        overlaps=opportunistic and config.mps.enabled,
        kv_shared_bytes=config.memory.shared_kv_bytes if opportunistic else 0,
        kv_headroom_share=min(1.0, _ROOM_TO_GROW * config.memory.headroom_share),
    )
    shape = EngineShape(
        replica.kv_blocks, replica.block_tokens, replica.context_tokens_max, replica.sequences_max
    )
    device = config.device.kind
    server = _Server(replica.model, replica.served_name, replica.host, port or replica.port)
    argv = _server(server, shape, device, settings.kv_shared_bytes)
    argv += ["--scheduler-cls", _scheduler("rollout", device), "--enable-prompt-tokens-details"]
    argv += ["--middleware", f"{_PACKAGE}.endpoints.BellMiddleware"]
    argv += ["--weight-transfer-config", '{"backend":"rose"}']
    if replica.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(replica.tensor_parallel)]
    argv += replica.engine_args
    threads = len(replica.cpus) // replica.tensor_parallel
    return EngineCommand(tuple(argv), _environment(settings, threads, device, environ))


def _cores(cpus: Sequence[int]) -> str:
    return ",".join(str(cpu) for cpu in cpus)


def _scheduler(role: str, device: str) -> str:
    # A GPU engine schedules asynchronously (two steps in flight), a CPU engine cannot.
    kind = "Scheduler" if device == "cpu" else "AsyncScheduler"
    return f"{_PACKAGE}.{role}_scheduler.{role.capitalize()}{kind}"


def _server(server: _Server, shape: EngineShape, device: str, kv_bytes: int) -> list[str]:
    # The `vllm` command looks for the metadata of a distribution named vllm, which a CPU build is not.
    argv = [sys.executable, "-m", _API_SERVER, "--model", server.model]
    argv += ["--served-model-name", server.served_name, "--host", server.host, "--port", str(server.port)]
    argv += [
        "--seed",
        "0",
        "--block-size",
        str(shape.block_tokens),
        "--max-model-len",
        str(shape.context_tokens_max),
    ]
    argv += ["--max-num-seqs", str(shape.sequences_max), "--max-num-batched-tokens", str(_STEP_TOKENS_MAX)]
    argv += ["--enable-chunked-prefill", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if shape.kv_blocks:
        argv += ["--num-gpu-blocks-override", str(shape.kv_blocks)]
    if device == "cpu":
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(kv_bytes or _KV_BYTES_CPU)]
        argv += ["--worker-cls", f"{_PACKAGE}.cpu_worker.RoseCPUWorker"]
    else:
        argv += ["--worker-cls", f"{_PACKAGE}.gpu_worker.RoseGPUWorker"]
    return argv


def _environment(
    settings: PluginSettings, cores: int, device: str, environ: Mapping[str, str]
) -> dict[str, str]:
    env = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED and not name.startswith(PluginSettings.PREFIX)
    }
    env |= settings.to_environ()
    env |= {
        "VLLM_PLUGINS": "rose",  # endpoint plugins load only when named
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
    }
    if device == "cpu":
        # The plugin binds the worker (see cpu_worker); vLLM's own binding would undo that.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(cores, 1))}
        env["VLLM_ZENTORCH_WEIGHT_PREPACK"] = "0"  # packed copies would not see weight updates
    return env
