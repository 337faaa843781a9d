"""The host as the device of CPU engines: its memory, whose it is, and how busy its cores are.

Where the device is the CPU, its memory is the host's: capacity from `[device] memory_bytes`, the cgroup or
/proc/meminfo, and use counted as anonymous plus shared memory of the engines' processes (no page walk, which
would hold up the engine being measured).  A signal that cannot be had is `Unknown` with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from rose.boards import Owner, process_start_ticks
from rose.core.events import MemoryObserved
from rose.core.readings import Unknown
from rose_daemon.node.warden import descendants, parents

_PROC = Path("/proc")
_LISTEN = "0A"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def device_memory(
    limit_bytes: int, serving: Owner | Unknown | None, rollout_pids: Iterable[int]
) -> MemoryObserved:
    """Memory of the host that serving and the lent replicas share; `limit_bytes` 0 means all of it.

    `serving` is the serving engine's core or API server; its workers, which hold weights and KV blocks,
    descend from it.  None: this host has no serving engine.
    """
    total = _capacity(limit_bytes)
    pids = list(rollout_pids)
    parent_of = parents() if pids or isinstance(serving, Owner) else {}
    serving_bytes: int | Unknown
    if serving is None or isinstance(serving, Unknown):
        serving_bytes = 0 if serving is None else serving
    elif serving.alive():
        serving_bytes = tree_bytes(serving.pid, parent_of)
    else:
        serving_bytes = Unknown("serving_gone")
    rollout = _sum(tree_bytes(pid, parent_of) for pid in pids)
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


def listener(port: int) -> Owner | Unknown:
    """The oldest process of this host that listens on a TCP port."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    holders = [pid for pid in parents() if _holds(pid, sockets)] if sockets else []
    owners = [Owner(pid, process_start_ticks(pid)) for pid in holders]
    living = [owner for owner in owners if owner.start_ticks]
    return min(living, key=lambda owner: owner.start_ticks) if living else Unknown("serving_not_found")


def _listening(port: int) -> list[str]:
    """Inodes of the sockets that listen on a port (proc(5), net/tcp: local address, state, inode)."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTEN:
                    found.append(fields[9])
    return found


def _holds(pid: int, sockets: Set[str]) -> bool:
    with contextlib.suppress(OSError):  # gone, or another user's
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()) in sockets:
                    return True
    return False


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
