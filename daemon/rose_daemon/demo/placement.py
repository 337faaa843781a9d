"""Where every process of the demo really runs, read from /proc, against where it was promised to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from rose.config import ReplicaConfig
from rose_daemon.harness.stack import GENERATOR_NAME, SERVING_NAME, Cores

_POLICIES = {0: "SCHED_OTHER", 1: "SCHED_FIFO", 2: "SCHED_RR", 3: "SCHED_BATCH", 5: "SCHED_IDLE"}
_POLICY_FIELD = 41
"""Of /proc/PID/stat, counted from 1 as proc(5) does."""
_ENGINE_NAME = "ROSE_ENGINE_NAME"


class Place(NamedTuple):
    """Cores and scheduling class."""

    cpus: frozenset[int]
    policy: str

    def __str__(self) -> str:
        return f"{self.policy} on core {','.join(map(str, sorted(self.cpus)))}"


class Observed(NamedTuple):
    """One process."""

    pid: int
    role: str
    places: Counter[Place]
    """Its threads."""


class PlacementRow(msgspec.Struct, frozen=True, kw_only=True):
    """A role, as promised and as found."""

    role: str
    pids: tuple[int, ...]
    promised: str
    found: tuple[str, ...]
    """Distinct places of all threads."""
    threads: int
    ok: bool


def promises(cores: Cores, replicas: Iterable[ReplicaConfig]) -> dict[str, Place]:
    """What runs where."""
    host = Place(frozenset({cores.host}), "SCHED_OTHER")
    leftover = Place(frozenset({cores.host}), "SCHED_IDLE")
    accelerator = Place(frozenset({cores.shared}), "SCHED_OTHER")
    promised = dict.fromkeys(("agents", GENERATOR_NAME, "relay", "scheduler", "rosed"), host)
    engines = {SERVING_NAME: accelerator}
    for replica in replicas:
        engines[replica.id] = accelerator if replica.kind == "opportunistic" else leftover
    for name, place in engines.items():
        promised |= {f"{name} API server": host, f"{name} core": host, f"{name} worker": place}
    return promised | {"trainer": leftover}


def check(observed: Iterable[Observed], promised: Mapping[str, Place]) -> list[PlacementRow]:
    """A row a promise; a role that was not found, or a thread elsewhere, breaks it."""
    found: dict[str, list[Observed]] = {}
    for process in observed:
        found.setdefault(process.role, []).append(process)
    rows = []
    for role, place in promised.items():
        places: Counter[Place] = Counter()
        for process in found.get(role, ()):
            places += process.places
        rows.append(
            PlacementRow(
                role=role,
                pids=tuple(process.pid for process in found.get(role, ())),
                promised=str(place),
                found=tuple(sorted(map(str, places))),
                threads=places.total(),
                ok=set(places) == {place},
            )
        )
    return rows


def observe(pids: Iterable[int], roles: Mapping[int, str], proc: Path = Path("/proc")) -> list[Observed]:
    """Look at processes; `roles` names the roots, engines name their own.  Skips what has ended."""
    observed = []
    for pid in pids:
        try:
            role = roles.get(pid) or _engine_role(proc / str(pid))
            places = Counter(_place(thread) for thread in (proc / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        if role and places:
            observed.append(Observed(pid, role, places))
    return observed


def _engine_role(process: Path) -> str:
    """`<engine> worker` and the like; empty for a process that belongs to no engine or only helps it."""
    environ = dict(
        entry.partition("=")[::2] for entry in (process / "environ").read_text("utf-8", "replace").split("\0")
    )
    title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    name = environ.get(_ENGINE_NAME, "")
    for mark, part in (
        ("warden.py", ""),
        ("resource_tracker", ""),
        ("VLLM::Worker", "worker"),
        ("VLLM::EngineCore", "core"),
        ("api_server", "API server"),
        ("VLLM::", "API server"),
    ):
        if mark in title:
            return f"{name} {part}" if name and part else ""
    return ""


def _place(thread: Path) -> Place:
    allowed = next(
        line for line in (thread / "status").read_text().splitlines() if line.startswith("Cpus_allowed_list:")
    )
    fields = (thread / "stat").read_text().rpartition(")")[2].split()
    # After the name come the fields from the third on.
    policy = int(fields[_POLICY_FIELD - 3])
    return Place(parse_cpus(allowed.partition(":")[2]), _POLICIES.get(policy, f"policy {policy}"))


def parse_cpus(text: str) -> frozenset[int]:
    """A CPU list as the kernel prints it, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
