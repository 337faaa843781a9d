"""The host: kernel, clocks, memory, limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from rose.config import Config
from rose.units import GIB, MIB
from rose_daemon.doctor.finding import HOST, Finding, Findings, Roots, error, missing, ok, warning

_FAST_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}
_SHM_BYTES_MIN = 256 * MIB
"""Boards take kilobytes; vLLM's queues between its processes lie there too."""
_FILES_MIN = 4096
_ENGINE_BYTES = 4 * GIB
"""About what an engine on a CPU takes with a small model."""


def checks(config: Config, roots: Roots = HOST) -> Findings:
    """All of them."""
    yield _kernel()
    yield _clock(roots)
    yield _synchronised(roots)
    yield from _shared_memory(config, roots)
    yield _hugepages(roots)
    yield _memory(roots)
    yield from _cgroup(roots)
    yield _files()
    yield _cores(config)


def _kernel() -> Finding:
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in {"x86_64", "aarch64"}:
        return error("kernel", f"{platform.system()} on {machine}", "ROSE needs Linux on x86_64 or aarch64")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as refused:
        text = f"{platform.release()} has no pidfd_open ({refused.strerror})"
        return warning("kernel", text, "engines are watched through /proc instead, which costs more a step")
    return ok("kernel", f"Linux {platform.release()} on {machine}")


def _clock(roots: Roots) -> Finding:
    source = roots.text("sys", "devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        return warning("clock", "the clock source is not known", "see dmesg for clocksource")
    if source not in _FAST_CLOCKS:
        advice = "boot with clocksource=tsc where the processor allows it: each step reads the clock often"
        return warning("clock", f"clock source {source} is slow to read", advice)
    return ok("clock", f"clock source {source}")


def _synchronised(roots: Roots) -> Finding:
    """The wall clock matters for logs, TLS and tracing between hosts; no gate hangs on it."""
    daemons = {"systemd-timesyn", "systemd-timesyncd", "chronyd", "ntpd"}
    for entry in roots.proc.glob("[0-9]*/comm"):
        try:
            if entry.read_text().strip() in daemons:
                return ok("wall_clock", "a time daemon runs")
        except OSError:
            continue
    advice = "run chrony or systemd-timesyncd (on a virtual machine or in a container the host may do it)"
    return warning("wall_clock", "no time daemon runs here", advice)


def _shared_memory(config: Config, roots: Roots) -> Findings:
    size = shutil.disk_usage(roots.dev / "shm") if (roots.dev / "shm").is_dir() else None
    if size is None:
        yield error("shm", f"{roots.dev / 'shm'} is not there", "mount a tmpfs on it")
    elif size.free < _SHM_BYTES_MIN:
        text = f"{size.free // MIB} MiB free of {size.total // MIB} in /dev/shm"
        yield warning("shm", text, "give it 1 GiB or more (docker run --shm-size=1g): vLLM needs it too")
    else:
        yield ok("shm", f"{size.free // MIB} MiB free of {size.total // MIB} in /dev/shm")
    kind = _filesystem(config.node.run_dir, roots)
    if kind in {"tmpfs", "ramfs"}:
        yield ok("run_dir", f"{config.node.run_dir} is on a {kind}")
    else:
        text = f"{config.node.run_dir} is on {kind or 'an unknown file system'}"
        yield error("run_dir", text, "set node.run_dir to a directory below /dev/shm")


def _filesystem(path: str, roots: Roots) -> str:
    """Type of the file system that a path is, or would be, on (proc(5), mounts)."""
    best, kind = "", ""
    for line in (roots.text("proc", "mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        where = fields[1].rstrip("/") or "/"
        inside = path == where or path.startswith(where if where == "/" else where + "/")
        if inside and len(where) >= len(best):
            best, kind = where, fields[2]
    return kind


def _hugepages(roots: Roots) -> Finding:
    setting = roots.text("sys", "kernel/mm/transparent_hugepage/enabled")
    total = _meminfo(roots).get("HugePages_Total", 0)
    chosen = "not there" if setting is None else setting.partition("[")[2].partition("]")[0] or setting
    text = f"transparent huge pages: {chosen}; {total} reserved"
    if total:
        advice = "neither vLLM nor ROSE uses them: vm.nr_hugepages=0 gives their memory back"
        return warning("hugepages", text, advice)
    return ok("hugepages", text)


def _memory(roots: Roots) -> Finding:
    known = _meminfo(roots)
    total, available = known.get("MemTotal", 0) * 1024, known.get("MemAvailable", 0) * 1024
    if not total:
        return error("memory", "/proc/meminfo cannot be read", "rosed needs it to know what serving uses")
    text = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    if available < _ENGINE_BYTES:
        return warning("memory", text, "an engine may not start: each takes some GiB")
    return ok("memory", text)


def _meminfo(roots: Roots) -> Mapping[str, int]:
    found = {}
    for line in (roots.text("proc", "meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            found[name] = int(value[0])
    return found


def _cgroup(roots: Roots) -> Findings:
    kind = _container(roots)
    yield ok("container", f"runs in {kind}" if kind else "none")
    names = ("memory.max", "cpu.max", "pids.max")
    memory, cpu, pids = (roots.text("sys", f"fs/cgroup/{name}") for name in names)
    if memory is None and cpu is None:
        yield ok("cgroup", "no limits of cgroup v2 are seen here")
        return
    limits = []
    if memory and memory.isdigit():
        limits.append(f"memory {int(memory) / GIB:.1f} GiB")
    quota, _, period = (cpu or "max").partition(" ")
    if quota.isdigit() and period.isdigit():
        limits.append(f"{int(quota) / int(period):.1f} processors")
    if pids and pids.isdigit():
        limits.append(f"{pids} processes and threads")
    if quota.isdigit():
        advice = "lift cpu.max: an engine that is throttled in the middle of a step makes requests late"
        yield warning("cgroup", "limits: " + ", ".join(limits), advice)
    else:
        yield ok("cgroup", "limits: " + (", ".join(limits) or "none"))


def _container(roots: Roots) -> str:
    if roots is HOST and Path("/.dockerenv").exists():
        return "docker"
    if (environ := roots.text("proc", "1/environ")) and "container=" in environ:
        return environ.partition("container=")[2].split("\0", 1)[0] or "a container"
    for name in ("docker", "kubepods", "containerd", "lxc", "podman"):
        if name in (roots.text("proc", "1/cgroup") or ""):
            return name
    return ""


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < _FILES_MIN:
        shown = "unlimited" if hard == unlimited else str(hard)
        text = f"a process may open {soft} files (hard limit {shown})"
        advice = "ulimit -n 65536, or LimitNOFILE in the unit: the gateway needs it"
        return warning("open_files", text, advice)
    return ok("open_files", "no limit" if soft == unlimited else f"a process may open {soft}")


def _cores(config: Config) -> Finding:
    allowed = os.sched_getaffinity(0)
    wanted = set(config.device.cpus) if config.device.kind == "cpu" else set()
    wanted |= {core for section in config.replicas for core in (*section.cpus, *section.api_cpus)}
    text = f"{len(allowed)} of {os.cpu_count()} cores may be used here"
    if lacking := sorted(wanted - allowed):
        names = ", ".join(map(str, lacking))
        return missing("cores", f"{text}; not {names}", "change the cores in rose.toml", needed=True)
    return ok("cores", text)
