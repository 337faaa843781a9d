"""Rules of `rose.toml` that no type expresses, or that concern more than one key."""

from __future__ import annotations

import ipaddress
import math
import re
from operator import attrgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec

from rose.core.admission import LEASE_NS_MAX
from rose.core.hours import Hours
from rose.core.readings import BOARD_STALE_MS_MIN, HEARTBEAT_MS
from rose.errors import ConfigError
from rose.units import MIB, NS_PER_MS

if TYPE_CHECKING:
    from rose.config import Config, RelayConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ABOVE_ZERO = (
    "node.tick_ms", "node.heartbeat_ms", "node.engine_start_timeout_s", "node.engine_stop_grace_s",
    "node.restart_backoff_s", "node.weights_timeout_s", "node.log_bytes_max", "node.journal_bytes_max",
    "serving.ttft_slo_ms", "serving.tpot_slo_ms", "serving.probe_ms",
    "serving.metrics_ms", "serving.metrics_stale_ms", "serving.quiet_ms",
    "admission.board_stale_ms", "memory.kv_budget_blocks_min",
    "scheduler.suspect_after_ms", "scheduler.stall_timeout_ms", "scheduler.turn_stall_timeout_s",
    "scheduler.queue_max", "scheduler.body_bytes_max", "relay.capacity_bytes", "relay.stage_ttl_s",
    "relay.streams", "relay.mooncake_replicas", "relay.mooncake_lease_s",
    "job.trajectories_per_replica_max", "lending.switchback_window_s",
)  # fmt: skip
_NOT_NEGATIVE = (
    "node.adopt_grace_s", "node.weights_undo_max", "device.memory_bytes", "mps.memory_bytes",
    "memory.shared_kv_bytes",
    "admission.token_cap", "admission.margin_ms", "relay.pace_bytes_per_s",
    "lending.harm_requests_min", "lending.drill_period_s",
    "job.n_rl", "job.n_serving_max", "job.staleness_max", "scheduler.lease_min_s",
    "scheduler.stream_spacing_max_ms",
)  # fmt: skip
_URL_MAX = 512
_MPS_DEFAULT = PurePosixPath("/tmp/nvidia-mps")
_NAME_HINT = "letters, digits, dots, dashes and underscores"


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def engine_address_fault(url: str) -> str:
    """What is wrong with the address of an engine's server, or an empty string."""
    parts = _parts(url) if len(url) <= _URL_MAX else None
    if parts is None or parts.scheme != "http" or not parts.hostname or parts.port is None:
        return f"{url[:80]!r} is not an engine's address: http://host:port"
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        return f"{url[:80]!r} must be host and port only"
    return ""


class _Refuse(Protocol):
    def __call__(self, key: str, why: str, hint: str = "") -> NoReturn: ...


def check(config: Config, source: str) -> None:
    """Rules that no type expresses, or that concern more than one key."""

    def refuse(key: str, why: str, hint: str = "") -> NoReturn:
        raise ConfigError(f"{source}: {key}: {why}", hint)

    _check_replicas(config, refuse)
    _check_numbers(config, refuse)
    _check_metrics(config, refuse)
    _check_mps(config, refuse)
    _check_lending(config, refuse)
    _check_addresses(config, refuse)


def _check_replicas(config: Config, refuse: _Refuse) -> None:
    ids = [section.id for section in config.replicas]
    if len(set(ids)) != len(ids):
        refuse("replicas", f"ids are not unique: {', '.join(ids)}")
    listeners: dict[tuple[str, int], str] = {}
    for section in config.replicas:
        key = f"replicas.{section.id or '?'}"
        if not _NAME.fullmatch(section.id):
            refuse(f"{key}.id", f"{section.id!r} is not a name", _NAME_HINT)
        if section.kind == "opportunistic" and not config.serving.url:
            refuse(key, "an opportunistic replica needs [serving] url")
        if not section.model:
            refuse(f"{key}.model", "is empty", "name the checkpoint directory of version 0")
        for name in ("tensor_parallel", "block_tokens", "context_tokens_max", "sequences_max"):
            if getattr(section, name) < 1:
                refuse(f"{key}.{name}", "must be at least 1")
        if section.tensor_parallel > 1 and section.kind == "opportunistic" and config.memory.shared_kv_bytes:
            why = "a replica over several devices cannot share KV memory with serving"
            refuse(f"{key}.tensor_parallel", why, "set memory.shared_kv_bytes to 0")
        if section.kv_blocks < 0:
            refuse(f"{key}.kv_blocks", "must not be negative")
        # vLLM keeps one block for itself.
        if section.kv_blocks and (section.kv_blocks - 1) * section.block_tokens < section.context_tokens_max:
            why = f"{section.kv_blocks} blocks cannot hold one context of {section.context_tokens_max} tokens"
            least = -(-section.context_tokens_max // section.block_tokens) + 1
            refuse(f"{key}.kv_blocks", why, f"at least {least}, or a smaller context_tokens_max")
        if section.port:
            other = listeners.setdefault((section.host, section.port), section.id)
            if other != section.id:
                refuse(f"{key}.port", f"{section.port} is also the port of {other}")


def _check_numbers(config: Config, refuse: _Refuse) -> None:
    for section, values in msgspec.to_builtins(config).items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                refuse(f"{section}.{name}", f"{value} is not a finite number")
    for key in _ABOVE_ZERO:
        if not _get(config, key) > 0:
            refuse(key, f"{_get(config, key)} must be above 0")
    for key in _NOT_NEGATIVE:
        if not _get(config, key) >= 0:
            refuse(key, f"{_get(config, key)} must not be negative")
    _check_ports(config, refuse)
    _check_shares(config, refuse)


def _check_metrics(config: Config, refuse: _Refuse) -> None:
    serving = config.serving
    key = "metrics_ms" if serving.mode == "metrics" else "probe_ms"
    period_ms = getattr(serving, key)
    if serving.metrics_stale_ms <= period_ms:
        why = f"{serving.metrics_stale_ms:g} must be above serving.{key}, {period_ms:g}"
        refuse("serving.metrics_stale_ms", why, "or the metrics are stale between two readings")
    if serving.mode == "plugin":
        return
    if serving.boards:
        refuse("serving.boards", "needs serving.mode plugin", "rosed infers the slack of one engine")
    if config.memory.shared_kv_bytes:
        refuse("memory.shared_kv_bytes", "needs serving.mode plugin", "an engine without it shares no memory")
    if serving.metrics_ms < serving.ttft_slo_ms:
        why = f"{serving.metrics_ms:g} must be at least serving.ttft_slo_ms, {serving.ttft_slo_ms:g}"
        refuse("serving.metrics_ms", why, "or rollout could run several times before a request is seen")
    if serving.quiet_ms < serving.metrics_ms:
        refuse("serving.quiet_ms", "must be at least serving.metrics_ms", "or one reading would be enough")
    for section in config.replicas:
        if section.kind == "opportunistic" and not section.profile:
            why = "is needed in serving.mode metrics: it caps the step that a request may have to wait for"
            refuse(f"replicas.{section.id}.profile", why, "measure one with `rose profile`")


def _check_mps(config: Config, refuse: _Refuse) -> None:
    mps = config.mps
    if not 1 <= mps.thread_percentage <= 100:
        refuse("mps.thread_percentage", f"{mps.thread_percentage} must lie in [1, 100]")
    if mps.memory_bytes and mps.memory_bytes < MIB:
        refuse("mps.memory_bytes", f"{mps.memory_bytes} is less than a MiB", "0 means no limit")
    directory = PurePosixPath(mps.run_dir)
    if not directory.is_absolute():
        refuse("mps.run_dir", f"{mps.run_dir!r} is not an absolute path")
    if _MPS_DEFAULT in (directory, *directory.parents):
        why = "is where every CUDA process of the host looks for a daemon"
        refuse("mps.run_dir", f"{mps.run_dir} {why}", "such as /run/rose/mps")
    if mps.enabled and config.device.kind != "cuda":
        refuse("mps.enabled", "needs device.kind cuda")


def _check_lending(config: Config, refuse: _Refuse) -> None:
    lending = config.lending
    for hours in lending.hours:
        try:
            Hours.parse(hours)
        except ValueError as error:
            refuse("lending.hours", str(error))
    for name in ("kv_share_max", "drill_share_max"):
        if not 0 < getattr(lending, name) <= 1:
            refuse(f"lending.{name}", "must lie in (0, 1]")
    if not 0 <= lending.harm_share_max <= 1:
        refuse("lending.harm_share_max", "must lie in [0, 1]")
    if not 0 <= lending.switchback_share <= 0.5:
        refuse("lending.switchback_share", "must lie in [0, 0.5]")
    if lending.harm_window_s < 60:
        refuse("lending.harm_window_s", "must be at least 60", "harm is counted by the minute")


def _check_ports(config: Config, refuse: _Refuse) -> None:
    ports = {key: _get(config, key) for key in ("scheduler.gateway_port", "relay.port", "node.metrics_port")}
    ports |= {f"replicas.{section.id}.port": section.port for section in config.replicas}
    for key, port in ports.items():
        if not 0 <= port <= 65535:
            refuse(key, f"{port} is not a port")


def _check_shares(config: Config, refuse: _Refuse) -> None:
    if config.admission.board_stale_ms < BOARD_STALE_MS_MIN:
        refuse(
            "admission.board_stale_ms",
            f"must be at least {BOARD_STALE_MS_MIN}",
            f"idle engines write their boards every {HEARTBEAT_MS} ms: with less, gates would flap",
        )
    if not 0 < config.memory.cut_share < 1:
        refuse("memory.cut_share", "must lie between 0 and 1")
    if not 0 <= config.memory.headroom_share < 1:
        refuse("memory.headroom_share", "must lie in [0, 1)")
    if not 0 < config.scheduler.borrow_kv_share_max <= 1:
        refuse("scheduler.borrow_kv_share_max", "must lie in (0, 1]")
    if config.node.gate_lease_ms < 2 * config.node.tick_ms:
        refuse(
            "node.gate_lease_ms",
            "must be at least twice node.tick_ms",
            "or the gate closes between two ticks",
        )
    if config.node.gate_lease_ms > LEASE_NS_MAX / NS_PER_MS:
        refuse(
            "node.gate_lease_ms",
            f"must be at most {LEASE_NS_MAX // NS_PER_MS}",
            "an engine takes a longer lease for a clock that jumped, and closes its gate",
        )
    if config.node.restart_backoff_max_s < config.node.restart_backoff_s:
        refuse("node.restart_backoff_max_s", "must not be below node.restart_backoff_s")
    if config.scheduler.stall_timeout_ms <= config.node.heartbeat_ms:
        refuse("scheduler.stall_timeout_ms", "must be above node.heartbeat_ms", "or every node looks stalled")
    if config.scheduler.dead_after_ms < config.scheduler.suspect_after_ms:
        refuse("scheduler.dead_after_ms", "must not be below scheduler.suspect_after_ms")


def _check_addresses(config: Config, refuse: _Refuse) -> None:
    scheduler, relay = config.scheduler, config.relay
    # Without the name of its serving engine, an opportunistic replica would run as a dedicated one: ungated.
    names = {"node.id": config.node.id, "serving.name": config.serving.name, "job.id": config.job.id}
    for key, name in names.items():
        if not _NAME.fullmatch(name):
            refuse(key, f"{name!r} is not a name", _NAME_HINT)
    for board in config.serving.boards:
        if not _NAME.fullmatch(board):
            refuse("serving.boards", f"{board!r} is not a name", _NAME_HINT)
    control = _parts(scheduler.control)
    if control is None or not (control.scheme == "ipc" or (control.scheme == "tcp" and control.port)):
        why = f"{scheduler.control!r} is not a ZMQ address"
        refuse("scheduler.control", why, "such as tcp://127.0.0.1:7701")
    if control.scheme == "tcp" and not is_loopback(control.hostname or "") and not scheduler.curve_dir:
        hint = "set scheduler.curve_dir to keys made by `rose keys`"
        refuse("scheduler.control", f"{control.hostname} is not loopback", hint)
    if not is_loopback(scheduler.gateway_host) and not (scheduler.token_file or scheduler.tokens_dir):
        hint = "set scheduler.token_file or scheduler.tokens_dir"
        refuse("scheduler.gateway_host", f"{scheduler.gateway_host} is not loopback", hint)
    if not is_loopback(scheduler.gateway_host) and not (scheduler.tls_cert or scheduler.tls_elsewhere):
        hint = "set scheduler.tls_cert and tls_key, or tls_elsewhere where a proxy before it speaks TLS"
        refuse("scheduler.gateway_host", f"{scheduler.gateway_host} is not loopback", hint)
    if bool(scheduler.tls_cert) != bool(scheduler.tls_key):
        refuse("scheduler.tls_cert", "goes together with scheduler.tls_key")
    tokens = relay.token_file or relay.tokens_dir
    if not is_loopback(relay.host) and not (relay.tls_cert and relay.tls_key and tokens):
        hint = "set relay.tls_cert, relay.tls_key and relay.token_file or tokens_dir"
        refuse("relay.host", f"{relay.host} is not loopback", hint)
    if not relay.url and relay.host in ("0.0.0.0", "::"):
        refuse("relay.url", f"is needed where relay.host is {relay.host}", "the name in the certificate")
    if relay.kind == "mooncake":
        _check_mooncake(relay, refuse)
    _check_urls(config, refuse)


def _check_urls(config: Config, refuse: _Refuse) -> None:
    for url in config.scheduler.workers:
        if fault := engine_address_fault(url):
            refuse("scheduler.workers", fault)
    traces = config.scheduler.otlp_traces_endpoint
    urls = {
        "serving.url": config.serving.url,
        "relay.url": config.relay.url,
        "scheduler.otlp_traces_endpoint": traces,
    }
    for key, url in urls.items():
        parts = _parts(url)
        if url and not (parts and parts.scheme in ("http", "https") and parts.hostname):
            refuse(key, f"{url!r} is not an HTTP address", "such as http://127.0.0.1:8000")
    if traces and urlsplit(traces).scheme == "http" and not is_loopback(urlsplit(traces).hostname or ""):
        why = f"{urlsplit(traces).hostname} is not loopback, and {traces} is not encrypted"
        refuse("scheduler.otlp_traces_endpoint", why, "https, or a collector on this host that sends on")


def _check_mooncake(relay: RelayConfig, refuse: _Refuse) -> None:
    parts = _parts(f"//{relay.mooncake_master}")
    if not (parts and parts.hostname and parts.port) or parts.path:
        refuse(
            "relay.mooncake_master", f"{relay.mooncake_master!r} is not HOST:PORT", "such as 10.0.0.1:50051"
        )
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", relay.mooncake_host):
        refuse("relay.mooncake_host", f"{relay.mooncake_host!r} is not a host's address")
    if not _NAME.fullmatch(relay.mooncake_namespace):
        refuse("relay.mooncake_namespace", f"{relay.mooncake_namespace!r} is not a name", _NAME_HINT)


def _parts(url: str) -> SplitResult | None:
    """The parts of an address; None when it has no valid host or port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # is parsed, and refused, only when asked for
    except ValueError:
        return None
    return parts


def _get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return attrgetter(key)(config)
