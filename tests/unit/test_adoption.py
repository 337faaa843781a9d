"""Which engines of a former rosed may be taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rose_daemon.node import adoption

from rose.boards import process_start_ticks
from rose.config import Config, ReplicaConfig
from rose.core.adoption import EngineIdentity, refusal, weights_refusal
from rose.engines.vllm.launch import EngineCommand
from rose.units import ReplicaId, WeightVersion

FOUND = EngineIdentity("node-0", "r", 8001, "c", "b")


def test_the_same_engine_may_stay() -> None:
    assert refusal(FOUND, FOUND) == ""


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("node", "node-1", "other_node"),
        ("replica", "s", "other_replica"),
        ("port", 8002, "port_changed"),
        ("command", "d", "configuration_changed"),
        ("boards", "e", "boards_changed"),
    ],
)
def test_whatever_differs_is_a_reason_to_refuse(field: str, value: object, reason: str) -> None:
    assert refusal(FOUND, msgspec.structs.replace(FOUND, **{field: value})) == reason


def test_a_replica_that_is_wanted_no_more() -> None:
    assert refusal(FOUND, None) == "replica_removed"


@pytest.mark.parametrize(
    ("version", "verified", "reason"),
    [
        (0, True, ""),
        (0, None, ""),
        (0, False, "weights_mismatch"),
        (7, True, ""),
        (7, None, "version_unknown"),
        (7, False, "weights_mismatch"),
    ],
)
def test_weights_that_nobody_vouches_for_are_refused(
    version: int, verified: bool | None, reason: str
) -> None:
    assert weights_refusal(WeightVersion(version), verified) == reason


def test_the_identity_follows_what_an_engine_goes_by_and_nothing_else() -> None:
    section = ReplicaConfig(id=ReplicaId("r"), kind="dedicated", model="/m", port=8001)

    def of(argv: tuple[str, ...], env: dict[str, str]) -> EngineIdentity:
        return adoption.identity(Config(), section, EngineCommand(argv, env))

    base = of(("engine", "--seed", "0"), {"VLLM_X": "1", "INVOCATION_ID": "a"})
    assert of(("engine", "--seed", "0"), {"VLLM_X": "1", "INVOCATION_ID": "b"}) == base
    assert of(("engine", "--seed", "0"), {"VLLM_X": "2"}).command != base.command
    assert of(("engine", "--seed", "1"), {"VLLM_X": "1"}).command != base.command
    assert (
        of(
            (
                "engine",
                "--seed 0",
            ),
            {"VLLM_X": "1"},
        ).command
        != base.command
    )


def test_records_of_processes_that_are_gone_or_never_were_are_taken_away(tmp_path: Path) -> None:
    def write(name: str, pid: int, ticks: int) -> None:
        body = {"identity": msgspec.to_builtins(FOUND), "pid": pid, "start_ticks": ticks, "socket": "/none"}
        (tmp_path / f"engine-{name}.json").write_text(json.dumps(body))

    mine = process_start_ticks(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    write("alive", os.getpid(), mine)
    write("gone", gone.pid, 1)
    write("reused", os.getpid(), mine + 1)
    (tmp_path / "engine-garbage.json").write_bytes(b"\xff{")
    (tmp_path / "engine-empty.json").write_bytes(b"")
    assert adoption.ports_held(tmp_path) == {"r": 8001}
    assert [path.name for path in tmp_path.iterdir()] == ["engine-alive.json"]
