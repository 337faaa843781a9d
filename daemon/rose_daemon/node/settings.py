"""The node machine's settings, from `rose.toml` and the checkpoints it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rose.config import Config, ReplicaConfig
from rose.core.lifecycle import LifecycleSettings
from rose.core.memory import MemorySettings
from rose.core.nodeview import NodeSettings, ReplicaSettings
from rose.core.readings import GateMode
from rose.units import Nanos, ms_to_ns, s_to_ns
from rose_daemon.node.engines import engine_url

GRACE_SHARE_OF_ENGINES = 0.8
"""Part of the stop grace that engines get before they are killed; the rest is for rosed's own tidying."""
_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}


def node_settings(config: Config) -> NodeSettings:
    """Settings for `rose.core.node.NodeMachine`; every replica has a port by now."""
    return NodeSettings(
        node=config.node.id,
        job=config.job.id,
        replicas=tuple(_replica(config, section) for section in config.replicas),
        ttft_slo_ns=ms_to_ns(config.serving.ttft_slo_ms),
        tpot_slo_ns=ms_to_ns(config.serving.tpot_slo_ms),
        serving=config.serving.name if config.serving.url else "",
        gate_mode=GateMode[config.admission.mode.upper()],
        token_cap=config.admission.token_cap,
        margin_ns=ms_to_ns(config.admission.margin_ms),
        gate_lease_ns=ms_to_ns(config.node.gate_lease_ms),
        memory=MemorySettings(
            headroom_share=config.memory.headroom_share,
            cut_share=config.memory.cut_share,
            budget_blocks_min=config.memory.kv_budget_blocks_min,
        ),
        lifecycle=LifecycleSettings(
            start_timeout_ns=s_to_ns(config.node.engine_start_timeout_s),
            stop_grace_ns=stop_grace_ns(config),
            backoff_ns=s_to_ns(config.node.restart_backoff_s),
            backoff_max_ns=s_to_ns(config.node.restart_backoff_max_s),
        ),
        kv_share_max=config.lending.kv_share_max,
        abort_in_flight=config.job.staleness_max == 0,
    )


def stop_grace_ns(config: Config) -> Nanos:
    """Time between asking an engine to end and killing it."""
    return s_to_ns(GRACE_SHARE_OF_ENGINES * config.node.engine_stop_grace_s)


def _replica(config: Config, section: ReplicaConfig) -> ReplicaSettings:
    block_bytes = kv_block_bytes(Path(section.model), section.block_tokens)
    if config.device.kind == "cuda":
        block_bytes //= section.tensor_parallel  # of one device
    return ReplicaSettings(
        replica=section.id,
        kind=section.kind,
        url=engine_url(section),
        model=section.served_name,
        block_tokens=section.block_tokens,
        context_tokens_max=section.context_tokens_max,
        block_bytes=block_bytes,
        device=config.device.id if section.kind == "opportunistic" else "",
        hardware=config.device.rich_in,
        follows_leases=section.kind == "opportunistic" and config.memory.inactive_unleased,
    )


def kv_block_bytes(model: Path, block_tokens: int) -> int:
    """Bytes of one KV block over all layers, K and V; 0 where the checkpoint's config.json does not tell.

    Holds for plain attention with the KV cache in the model's own dtype, vLLM's default.
    """
    try:
        shape: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = int(shape["num_attention_heads"])
        kv_heads = int(shape.get("num_key_value_heads") or heads)
        head_dim = int(shape.get("head_dim") or int(shape["hidden_size"]) // heads)
        element_bytes = _BYTES_OF[str(shape.get("dtype") or shape["torch_dtype"])]
        return 2 * int(shape["num_hidden_layers"]) * kv_heads * head_dim * element_bytes * block_tokens
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return 0
