"""What the node machine cannot see on boards: memory of the host, health and metrics of the serving engine.

Where the device is the CPU, its memory is the host's: capacity from `[device] memory_bytes`, the cgroup or
/proc/meminfo, and use counted as anonymous plus shared memory of the engines' processes (no page walk, which
would hold up the engine being measured).  A signal that cannot be had is `Unknown` with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from rose.boards import Owner
from rose.core.events import MemoryObserved
from rose.core.readings import Unknown
from rose_daemon.node.warden import descendants, parents

_KV_USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""New and old name of the share of KV blocks in use."""
_METRICS_BYTES_MAX = 4 << 20
_PROC = Path("/proc")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class ServingProbe(NamedTuple):
    """Answer of the serving engine's HTTP port."""

    healthy: bool | Unknown
    kv_used_share: float | Unknown


def device_memory(limit_bytes: int, serving: Owner | None, rollout_pids: Iterable[int]) -> MemoryObserved:
    """Memory of the host that serving and the lent replicas share; `limit_bytes` 0 means all of it.

    `serving` is the process that writes the slack board (the serving engine's core); its workers, which
    hold weights and KV blocks, descend from it.
    """
    total = _capacity(limit_bytes)
    parent_of = parents()
    serving_bytes: int | Unknown
    if serving is None:
        serving_bytes = 0
    elif serving.alive():
        serving_bytes = tree_bytes(serving.pid, parent_of)
    else:
        serving_bytes = Unknown("serving_gone")
    rollout = _sum(tree_bytes(pid, parent_of) for pid in rollout_pids)
    return MemoryObserved(serving_bytes, _free(total, serving_bytes, rollout), total)


def _capacity(limit_bytes: int) -> int | Unknown:
    host = meminfo("MemTotal")
    if isinstance(host, Unknown):
        return limit_bytes or host
    limits = [host, *filter(None, (limit_bytes, _cgroup_limit()))]
    return min(limits)


def _free(total: int | Unknown, serving: int | Unknown, rollout: int | Unknown) -> int | Unknown:
    """What is left of the capacity, and no more than what the host can still give."""
    available = meminfo("MemAvailable")
    left = _sum((total, *(part if isinstance(part, Unknown) else -part for part in (serving, rollout))))
    if isinstance(left, Unknown) or isinstance(available, Unknown):
        return left if isinstance(left, Unknown) else available
    return max(0, min(left, available))


def meminfo(key: str) -> int | Unknown:
    """A value of /proc/meminfo in bytes."""
    try:
        text = (_PROC / "meminfo").read_text()
    except OSError:
        return Unknown("meminfo_unreadable")
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return Unknown("meminfo_incomplete")


def _cgroup_limit() -> int:
    """The cgroup's memory limit, 0 for none (or no cgroup v2 here)."""
    try:
        text = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def tree_bytes(pid: int, parent_of: Mapping[int, int]) -> int | Unknown:
    """Anonymous and shared memory of a process and all its descendants."""
    own = _process_bytes(pid)
    if isinstance(own, Unknown):
        return own
    held = (_process_bytes(child) for child in descendants(pid, parent_of))
    # A child that ended between the two looks holds nothing any more.
    return own + sum(bytes_ for bytes_ in held if not isinstance(bytes_, Unknown))


def _process_bytes(pid: int) -> int | Unknown:
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")  # its name may be any bytes
    except OSError:
        return Unknown("process_gone")
    held = 0
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            held += int(line.split()[1]) * 1024
    return held


def _sum(values: Iterable[int | Unknown]) -> int | Unknown:
    total = 0
    for value in values:
        if isinstance(value, Unknown):
            return value
        total += value
    return total


class CpuUse:
    """Busy share of some cores between two looks at /proc/stat."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = cpus
        self._before: tuple[int, int] | None = None

    def sample(self) -> float | Unknown:
        """The share since the last call."""
        now = _core_ticks(self._cpus)
        before, self._before = self._before, now
        if now is None or before is None:
            return Unknown("stat_unreadable" if now is None else "first_sample")
        busy, total = now[0] - before[0], now[1] - before[1]
        return busy / total if total > 0 else Unknown("no_time_passed")


def _core_ticks(cpus: Sequence[int]) -> tuple[int, int] | None:
    """Busy and total clock ticks of some cores (proc(5), stat)."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return None
    busy = total = 0
    for line in lines:
        name, *fields = line.split()
        if name.removeprefix("cpu").isdigit() and int(name[3:]) in cpus:
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq + steal
            total += user + nice + system + idle + iowait + irq + softirq + steal
    return busy, total


async def probe_serving(session: aiohttp.ClientSession, url: str, timeout_s: float) -> ServingProbe:
    """Ask /health and /metrics.  Refused connections mean down; silence means unknown."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    healthy: bool | Unknown
    try:
        async with session.get(url + "/health", timeout=limit) as response:
            healthy = response.status == 200
    except TimeoutError:
        healthy = Unknown("health_timeout")
    except (aiohttp.ClientError, OSError):
        healthy = False
    if healthy is not True:
        return ServingProbe(healthy, Unknown("serving_down" if healthy is False else "health_timeout"))
    try:
        async with session.get(url + "/metrics", timeout=limit) as response:
            text = await _text(response)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return ServingProbe(healthy, Unknown("metrics_unreachable"))
    return ServingProbe(healthy, kv_used_share(text) if text is not None else Unknown("metrics_too_long"))


async def _text(response: aiohttp.ClientResponse) -> str | None:
    """The whole body, which may come in pieces; None if it is longer than metrics ever are."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _METRICS_BYTES_MAX:
            return None
    return data.decode(errors="replace")


def kv_used_share(metrics: str) -> float | Unknown:
    """Highest KV use over the engine's ranks, from the text of /metrics."""
    shares: list[float] = []
    try:
        for family in text_string_to_metric_families(metrics):
            shares += [sample.value for sample in family.samples if sample.name in _KV_USAGE_NAMES]
    except ValueError:
        return Unknown("metrics_malformed")
    if not shares:
        return Unknown("metrics_missing")
    share = max(shares)
    return share if 0 <= share <= 1 else Unknown("metrics_contradictory")
