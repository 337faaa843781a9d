"""`rose weights`: against a store and checkpoints on disk, a relay in memory, and a stand-in for rosed."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import FakeRosed
from weight_states import JOB, MemoryRelay, model, same, stepped

from rose import wire
from rose.cli import main as cli
from rose.errors import Exit
from rose.units import WeightVersion
from rose.weights import tensorfile
from rose.weights.bits import State
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import read_patches, write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.hostcopy import HostCopy
from rose.weights.inspection import kind_of
from rose.weights.patches import apply_to_state
from rose.weights.relay.local import RelayClient
from rose.weights.store import WeightStore

Rose = Callable[..., int]
V1, V2 = WeightVersion(1), WeightVersion(2)
BASE = model()
FIRST = stepped(BASE, 1)
SECOND = stepped(FIRST, 2)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rose.toml"
    path.write_text(f'[node]\nstate_dir = "{tmp_path}"\n')
    return path


@pytest.fixture
def rose(monkeypatch: pytest.MonkeyPatch, config: Path) -> Rose:
    def call(*arguments: object) -> int:
        argv = ["rose", "weights", *map(str, arguments)]
        if arguments[0] not in ("diff", "--help"):
            argv += ["--config", str(config)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return call


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, config: Path) -> Iterator[MemoryRelay]:
    made = MemoryRelay()
    monkeypatch.setattr(RelayClient, "from_config", lambda *arguments, **options: made)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # somebody has to answer at the address
        port = listening.getsockname()[1]
        config.write_text(f'{config.read_text()}[relay]\nurl = "http://127.0.0.1:{port}"\n')
        yield made


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """Versions 1 (a delta) and 2 (an anchor) are staged."""
    store = WeightStore(tmp_path)
    write_version(store.destination(JOB, V1), encode_version(JOB, V1, WeightVersion(0), BASE, FIRST))
    write_version(store.destination(JOB, V2), encode_version(JOB, V2, None, None, SECOND))
    return store


def checkpoint(directory: Path, state: State) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(tensorfile.encode(state, {}))
    return directory


def test_what_lies_here_is_listed(rose: Rose, store: WeightStore, capsys: Any) -> None:
    assert rose("list", JOB) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["version", "base"], ["1", "0"], ["2", "anchor"]]
    assert rose("list", JOB, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["command"] == "weights list"
    assert [each["version"] for each in body["versions"]] == [1, 2]
    assert 0 < body["versions"][0]["density"] < 0.1


@pytest.mark.parametrize("options", [(), ("--json",), ("--relay",), ("--relay", "--json")])
def test_a_job_without_versions_is_not_found(
    rose: Rose, store: WeightStore, relay: MemoryRelay, capsys: Any, options: tuple[str, ...]
) -> None:
    assert rose("list", "nosuch", *options) == Exit.NOT_FOUND
    said = capsys.readouterr()
    assert said.out == ""
    assert "no version of nosuch lies" in said.err


def test_a_version_is_shown_by_kind(rose: Rose, store: WeightStore, capsys: Any) -> None:
    assert rose("show", JOB, 1) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"version 1 of {JOB}: a delta on version 0, ")
    assert "mlp" in said
    assert rose("show", JOB, 1, "--json") == 0
    kinds = {kind["kind"]: kind for kind in json.loads(capsys.readouterr().out)["kinds"]}
    assert kinds["embed"]["changed"] == 0
    assert kinds["mlp"]["changed"] > 0
    assert rose("show", JOB, 9) == Exit.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.7.self_attn.q_proj.weight", "self_attn.q_proj"),
        ("model.layers.3.mlp.experts.12.up_proj.weight", "mlp.experts.up_proj"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
    ],
)
def test_kinds_of_tensors(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_two_checkpoints_are_compared(rose: Rose, tmp_path: Path, capsys: Any) -> None:
    old, new = checkpoint(tmp_path / "old", BASE), checkpoint(tmp_path / "new", FIRST)
    assert rose("diff", old, new, "--json") == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    changed = encode_version(JOB, V1, WeightVersion(0), BASE, FIRST).manifest.changed
    assert sum(kind["changed"] for kind in kinds) == changed
    assert rose("diff", old, new) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "all"
    other = checkpoint(tmp_path / "other", {"embed.weight": BASE["embed.weight"]})
    assert rose("diff", old, other) == Exit.VERSION_CONFLICT


def test_what_lies_here_is_verified(rose: Rose, store: WeightStore, tmp_path: Path, capsys: Any) -> None:
    copy = HostCopy.create(store.directory(JOB) / "copy", JOB, checkpoint(tmp_path / "model", BASE))
    copy.advance(store.path(JOB, V1))
    assert rose("verify", JOB) == 0
    assert "copy of the checkpoint: version 1, whole" in capsys.readouterr().out
    assert rose("verify", JOB, 2) == 0
    copy._state["embed.weight"].words[0] ^= 1
    assert rose("verify", JOB) == Exit.ERROR
    assert "embed.weight: the copy does not hold" in capsys.readouterr().err
    copy.close()
    bucket = next(store.path(JOB, V1).glob("bucket-*"))
    bucket.write_bytes(bucket.read_bytes()[:-1])
    assert rose("verify", JOB) == Exit.ERROR
    assert bucket.name in capsys.readouterr().err
    assert rose("verify", "nobody") == Exit.NOT_FOUND


def test_publish_pull_and_list_at_the_relay(
    rose: Rose, relay: MemoryRelay, tmp_path: Path, capsys: Any
) -> None:
    zero, one, two = (
        checkpoint(tmp_path / name, state) for name, state in (("0", BASE), ("1", FIRST), ("2", SECOND))
    )
    assert rose("publish", JOB, one, "--base", zero) == 0
    assert "version 1" in capsys.readouterr().out
    assert rose("publish", JOB, two, "--base", zero) == Exit.USAGE, "not the checkpoint of version 1"
    assert "is not version 1" in capsys.readouterr().err
    assert rose("publish", JOB, two, "--version", 5, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["base_version"]) == (5, None)
    assert rose("list", JOB, "--relay", "--json") == 0
    assert [each["version"] for each in json.loads(capsys.readouterr().out)["versions"]] == [1, 5]
    assert rose("show", JOB, 1, "--relay", "--json") == 0
    assert json.loads(capsys.readouterr().out)["base_version"] == 0
    assert rose("pull", JOB, 1, "--out", tmp_path / "mine") == 0
    held = open_checkpoint(zero).state
    assert same(apply_to_state(held, read_patches(tmp_path / "mine", held)), FIRST)
    assert rose("pull", JOB, 5) == 0
    assert WeightStore(tmp_path).manifest(JOB, WeightVersion(5)).target_digests == digest_state(SECOND)
    assert rose("pull", JOB, 7) == Exit.NOT_FOUND


def test_versions_are_squashed(rose: Rose, store: WeightStore, tmp_path: Path, capsys: Any) -> None:
    third = stepped(SECOND, 3)
    v3 = WeightVersion(3)
    write_version(store.destination(JOB, v3), encode_version(JOB, v3, V2, SECOND, third))
    assert rose("squash", JOB, 0, 3, "--out", tmp_path / "one") == 0
    assert capsys.readouterr().out.startswith("2 versions, ")  # from the anchor on
    assert same(apply_to_state(BASE, read_patches(tmp_path / "one")), third)
    assert rose("squash", JOB, 0, 3, "--out", tmp_path / "one") == Exit.USAGE
    assert rose("squash", JOB, 0, 9, "--out", tmp_path / "two") == Exit.NOT_FOUND


def test_rollback_waits_for_the_engines(rose: Rose, tmp_path: Path, capsys: Any) -> None:
    rosed = FakeRosed(tmp_path / "rosed.sock")
    replicas = [{"id": "r", "weight_version": 3, "state": "updating"}]
    rosed.reply = wire.pack_line(wire.Reply(body={"replicas": replicas}))
    arguments = ("rollback", JOB, 2, "--socket", rosed.path)
    assert rose(*arguments, "--wait", 0.2) == Exit.TIMEOUT
    assert "not at version 2 yet: r" in capsys.readouterr().err
    replicas[0].update(weight_version=2, state="ready")
    rosed.reply = wire.pack_line(wire.Reply(body={"replicas": replicas}))
    assert rose(*arguments) == 0
    assert "1 replica(s) at version 2" in capsys.readouterr().out
    assert wire.PinRequest(JOB, V2) in rosed.requests
    assert rose("follow", JOB, "--socket", rosed.path) == 0
    assert rosed.requests[-1] == wire.PinRequest(JOB, None)
    rosed.reply = wire.pack_line(wire.Reply("no way back", "pull it", int(Exit.NOT_FOUND)))
    assert rose(*arguments) == Exit.NOT_FOUND
    assert capsys.readouterr().err == "rose: no way back\nhint: pull it\n"
    rosed.close()


def test_a_relay_that_is_not_there_is_said_at_once(
    rose: Rose, config: Path, tmp_path: Path, capsys: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config.write_text(f'{config.read_text()}[relay]\nurl = "http://127.0.0.1:{port}"\n')
    for arguments in (("list", JOB, "--relay"), ("show", JOB, 1, "--relay"), ("pull", JOB, 1)):
        assert rose(*arguments) == Exit.NOT_READY
        assert f"no relay answers at http://127.0.0.1:{port}" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_said_before_the_relay_is_asked(
    rose: Rose, tmp_path: Path, capsys: Any
) -> None:
    assert rose("publish", JOB, tmp_path / "none") != Exit.OK
    assert str(tmp_path / "none") in capsys.readouterr().err
