"""The command line: what it imports, what it prints, how it exits."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose import config, switch, wire
from rose.cli import main as cli
from rose.cli.control import ask
from rose.errors import Exit, NotReady, RoseError, TimedOut

HEAVY = ("torch", "vllm", "zmq", "aiohttp", "numpy", "rich", "rose_daemon")

STATUS: dict[str, Any] = {
    "node": "node-0",
    "host": {"name": "alpha", "uptime_s": 12.0},
    "devices": [
        {
            "name": "CPU cores 0",
            "sharing": "time-slice",
            "memory_bytes": None,
            "utilisation": 0.5,
            "unknown": [
                {"signal": "memory_bytes", "reason": "meminfo_unreadable", "age_s": 2.0, "blocks": ""}
            ],
        }
    ],
    "serving": {"state": "busy", "mode": "plugin", "ttft_slack_ms": 120.0, "tpot_slack_ms": None},
    "gate": {"open": False, "reason": "serving_running", "mode": "strict"},
    "memory": {
        "state": "frozen",
        "budget_bytes": 64 << 20,
        "serving_bytes": 2 << 30,
        "headroom_bytes": None,
        "unknown": [{"signal": "headroom_bytes", "reason": "board_stale", "age_s": None, "blocks": ""}],
    },
    "replicas": [
        {
            "id": "opp-0",
            "kind": "opportunistic",
            "state": "ready",
            "reason": "",
            "weight_version": 3,
            "turns_in_flight": 2,
            "gate": {"open": False, "reason": "serving_running", "mode": "strict"},
            "kv_blocks": {"used": 7, "budget": 20, "total": 40},
        }
    ],
    "scheduler": {"state": "registered", "address": "tcp://127.0.0.1:7701"},
    "job": {"id": "job-0", "rl_step": 4, "required_version": 3},
    "last_staging": {
        "version": 3,
        "age_s": 9.5,
        "delta_bytes": 8_300_000,
        "density": 0.019,
        "bytes_per_changed": 0.813,
        "encode_ms": 590.0,
        "push_ms": None,
        "pull_ms": 160.0,
        "verify_ms": 8.0,
        "decode_ms": 240.0,
    },
    "last_update": {
        "replica": "opp-0",
        "version": 3,
        "ok": True,
        "reason": "",
        "ms": 41.0,
        "age_s": 9.0,
        "engine_ms": {"stage": 30.0, "pause": 8.0},
    },
    "healthy": True,
    "problems": [],
}

LENDING: dict[str, Any] = {
    "closed": "",
    "text": "lends",
    "requests": 100,
    "late_by_rollout": 1,
    "late_by_unknown": 1,
    "budget_left_share": 0.5,
    "take_back_p99_ms": 55.0,
}

Answer = Callable[[bytes], bytes]


class FakeRosed:
    """Answers every request line with what `answer` makes of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[wire.ControlRequest] = []
        self.reply: bytes = wire.pack_line(wire.Reply(body=STATUS))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                self.requests.append(wire.unpack_request(stream.readline()))
                stream.write(self.reply)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def rosed(tmp_path: Path) -> Iterator[FakeRosed]:
    fake = FakeRosed(tmp_path / "rosed.sock")
    yield fake
    fake.close()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["rose", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def imported_by(*arguments: str) -> tuple[set[str], str]:
    """Top-level modules that a run of `rose` imports, and what it prints."""
    code = (
        "import sys\n"
        f"sys.argv = ['rose', *{list(arguments)!r}]\n"
        "from rose.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\nMODULES', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    said, _, modules = text.rpartition("MODULES ")
    return set(modules.split()), said


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("status", "--help"), ("--version",), ("init", "--stdout"), ("weights", "--help")],
)
def test_light_commands_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules, _ = imported_by(*arguments)
    assert modules.isdisjoint(HEAVY), modules & set(HEAVY)


def test_status_imports_no_engine_and_no_network_library(rosed: FakeRosed) -> None:
    modules, said = imported_by("status", "--json", "--socket", str(rosed.path))
    assert modules.isdisjoint(HEAVY), modules & set(HEAVY)
    assert json.loads(said) == STATUS


def test_help_lists_every_command_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "--help") == 0
    lines = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
    for name in (
        "init",
        "status",
        "reclaim",
        "gate",
        "drain",
        "undrain",
        "weights",
        "version",
        *cli._installed(),
    ):
        assert lines[name], f"{name} has no description"


def test_usage_errors(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "stauts") == Exit.USAGE
    assert "stauts" in capsys.readouterr().err
    assert run(monkeypatch, "gate", "r") == Exit.USAGE
    assert run(monkeypatch, "gate", "r", "ajar") == Exit.USAGE


def test_an_entry_point_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    point = cli.EntryPoint("demo", "no_such_library.command:app", cli.GROUP)
    monkeypatch.setattr(cli, "_installed", lambda: {"demo": point})
    assert run(monkeypatch, "demo") == Exit.ERROR
    assert capsys.readouterr().err.startswith("rose: `rose demo` needs no_such_library")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rose.cli.status.ask", interrupted)
    assert run(monkeypatch, "status", "--socket", rosed.path) == 130


# ---- init ---------------------------------------------------------------------------------------


def test_init_writes_a_file_that_loads_to_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    assert run(monkeypatch, "init", tmp_path) == 0
    assert config.load(tmp_path / "rose.toml", {}) == config.Config()
    assert run(monkeypatch, "init", tmp_path / "rose.toml") == Exit.USAGE
    assert "--force" in capsys.readouterr().err
    (tmp_path / "rose.toml").write_text("")
    assert run(monkeypatch, "init", "--force", tmp_path / "rose.toml") == 0
    assert (tmp_path / "rose.toml").read_text()
    assert run(monkeypatch, "init", tmp_path / "no" / "such" / "rose.toml") == Exit.USAGE


def test_the_sample_in_the_repository_is_what_init_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(monkeypatch, "init", "--stdout") == 0
    sample = Path(__file__).parents[2] / "daemon" / "etc" / "rose.toml"
    assert sample.read_text() == capsys.readouterr().out, "renew it: rose init --force daemon/etc/rose.toml"


# ---- status and orders --------------------------------------------------------------------------


def test_status_for_people(monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "status", "--socket", rosed.path) == 0
    said = capsys.readouterr().out
    for text in (
        "node-0 on alpha", "unknown (meminfo_unreadable, 2.0 s old)", "50% busy", "TTFT slack 120 ms",
        "TPOT slack no deadline", "closed (serving_running)", "frozen", "headroom unknown (board_stale)",
        "opp-0", "7/20/40", "v3 applied 9 s ago, 41 ms", "registered at tcp://127.0.0.1:7701",
    ):  # fmt: skip
        assert text in said, text


def test_no_color_is_heeded_on_a_terminal(rosed: FakeRosed) -> None:
    controller, terminal = pty.openpty()
    argv = [sys.executable, "-m", "rose.cli.main", "status", "--socket", str(rosed.path)]
    environ = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    with subprocess.Popen(argv, stdout=terminal, env=environ) as shown:
        os.close(terminal)
        text = b""
        with contextlib.suppress(OSError):  # the terminal is gone when it ends
            while part := os.read(controller, 4096):
                text += part
    os.close(controller)
    assert shown.returncode == 0
    assert b"node-0" in text
    assert not re.search(rb"\x1b\[[0-9;]*[349][0-9]", text)


def test_status_exits_3_when_not_healthy(
    monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed, capsys: Any
) -> None:
    sick = {**STATUS, "healthy": False, "problems": ["replica opp-0 is backoff: it died"]}
    rosed.reply = wire.pack_line(wire.Reply(body=sick))
    assert run(monkeypatch, "status", "--socket", rosed.path) == Exit.NOT_READY
    assert "replica opp-0 is backoff: it died" in capsys.readouterr().out
    assert run(monkeypatch, "status", "--json", "--socket", rosed.path) == Exit.NOT_READY
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_status_without_rosed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    assert run(monkeypatch, "status", "--socket", tmp_path / "none.sock") == Exit.NOT_READY
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("rose: rosed does not answer on ")
    assert second.startswith("hint: ")


def test_the_socket_is_found_through_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rosed: FakeRosed
) -> None:
    file = tmp_path / "rose.toml"
    file.write_text(f'[node]\ncontrol_socket = "{rosed.path}"\n')
    assert run(monkeypatch, "status", "--json", "--config", file) == 0
    file.write_text("[node")
    assert run(monkeypatch, "status", "--json", "--config", file) == Exit.USAGE


@pytest.mark.parametrize(
    ("arguments", "request_sent", "body"),
    [
        (("reclaim", "r", "--reason", "drill"), wire.ReclaimRequest("r", "drill"), {"kv_budget_blocks": 5}),  # type: ignore[arg-type]
        (("gate", "r", "closed"), wire.GateRequest("r", "closed"), {"mode": "closed"}),  # type: ignore[arg-type]
        (("gate", "r", "auto"), wire.GateRequest("r", None), {"mode": "strict"}),  # type: ignore[arg-type]
        (("gate", "r", "open", "--tokens", "64"), wire.GateRequest("r", "open", 64), {"mode": "open"}),  # type: ignore[arg-type]
        (("lend", "off"), wire.LendRequest(on=False), {"lending": LENDING}),
        (("lend", "on", "--reset"), wire.LendRequest(on=True, reset=True), {"lending": LENDING}),
        (("drain", "r"), wire.DrainRequest("r", drain=True), {}),  # type: ignore[arg-type]
        (("undrain", "r"), wire.DrainRequest("r", drain=False), {}),  # type: ignore[arg-type]
    ],
)
def test_orders_go_over_the_socket(
    monkeypatch: pytest.MonkeyPatch,
    rosed: FakeRosed,
    arguments: tuple[str, ...],
    request_sent: wire.ControlRequest,
    body: dict[str, Any],
) -> None:
    rosed.reply = wire.pack_line(wire.Reply(body=body))
    assert run(monkeypatch, *arguments, "--socket", rosed.path) == 0
    assert rosed.requests == [request_sent]


def test_lending_for_people(monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed, capsys: Any) -> None:
    rosed.reply = wire.pack_line(wire.Reply(body=STATUS | {"lending": LENDING}))
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "status", "--socket", rosed.path) == 0
    harm = "2 of 100 requests late by rollout (50% of the error budget left)"
    assert f"lends  {harm}  memory back within 55 ms (p99)" in capsys.readouterr().out
    stopped = LENDING | {"closed": "outside_hours", "text": "outside", "budget_left_share": None}
    rosed.reply = wire.pack_line(wire.Reply(body={"lending": stopped}))
    assert run(monkeypatch, "lend", "off", "--socket", rosed.path) == 0
    assert "stopped (outside_hours): outside  2 of 100 requests late by rollout (only measured)" in (
        capsys.readouterr().out
    )
    assert run(monkeypatch, "lend", "off", "--reset", "--socket", rosed.path) == Exit.USAGE


@pytest.fixture
def down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a rosed that does not run."""
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "rose.toml"
    file.write_text(f'[node]\nstate_dir = "{state}"\n')
    monkeypatch.setenv("ROSE_CONFIG", str(file))
    return state


def test_lending_is_switched_off_without_rosed(
    monkeypatch: pytest.MonkeyPatch, down: Path, capsys: Any
) -> None:
    assert run(monkeypatch, "lend", "off") == 0
    assert "rosed does not run: the next that starts lends nothing" in capsys.readouterr().out
    assert switch.is_off(down)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(down / "rosed.sock"))
    dead.close()  # the file of a killed rosed
    assert run(monkeypatch, "lend", "on") == 0
    assert "may lend" in capsys.readouterr().out
    assert not switch.is_off(down)


def test_what_only_rosed_can_do_waits_for_it(monkeypatch: pytest.MonkeyPatch, down: Path) -> None:
    assert run(monkeypatch, "lend", "on", "--reset") == Exit.NOT_READY
    assert run(monkeypatch, "lend", "off", "--socket", down / "other.sock") == Exit.NOT_READY
    assert list(down.iterdir()) == []


def test_a_switch_that_cannot_be_set_is_an_error(
    monkeypatch: pytest.MonkeyPatch, down: Path, capsys: Any
) -> None:
    down.rmdir()
    assert run(monkeypatch, "lend", "off") == Exit.ERROR
    assert "lending.json cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_rosed_that_starts_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch, down: Path) -> None:
    begun: list[FakeRosed] = []
    put = switch.put

    def late(state_dir: Path, *, off: bool) -> Path:
        begun.append(FakeRosed(down / "rosed.sock"))
        begun[0].reply = wire.pack_line(wire.Reply(body={"lending": LENDING}))
        return put(state_dir, off=off)

    monkeypatch.setattr(switch, "put", late)
    assert run(monkeypatch, "lend", "off") == 0
    assert begun[0].requests == [wire.LendRequest(on=False)]
    begun[0].close()


def test_a_rosed_that_hangs_finds_the_switch_when_it_restarts(
    monkeypatch: pytest.MonkeyPatch, down: Path, capsys: Any
) -> None:
    monkeypatch.setattr("rose.cli.control.ask.__defaults__", (0.2,))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(down / "rosed.sock"))
        mute.listen()
        assert run(monkeypatch, "lend", "off") == Exit.TIMEOUT
    assert switch.is_off(down)
    assert "once rosed was restarted" in capsys.readouterr().err


def test_rosed_refuses(monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed, capsys: Any) -> None:
    rosed.reply = wire.pack_line(wire.Reply("this host has no replica x", "it has: r", int(Exit.NOT_FOUND)))
    assert run(monkeypatch, "reclaim", "x", "--socket", rosed.path) == Exit.NOT_FOUND
    assert capsys.readouterr().err.splitlines() == ["rose: this host has no replica x", "hint: it has: r"]


def test_answers_that_are_not_rosed_s(rosed: FakeRosed) -> None:
    for garbage in (b"", b"HTTP/1.1 400 Bad Request\r\n", b"{}\n", b"[]\n"):
        rosed.reply = garbage
        with pytest.raises(NotReady):
            ask(rosed.path, wire.StatusRequest())
    rosed.reply = wire.pack_line(wire.Reply("odd", code=99))
    with pytest.raises(RoseError) as refusal:
        ask(rosed.path, wire.StatusRequest())
    assert refusal.value.code == Exit.ERROR


@pytest.mark.parametrize(
    "body",
    [{}, {"healthy": True}, {**STATUS, "host": None}, {**STATUS, "replicas": [{}]}, {**STATUS, "devices": 3}],
)
def test_status_of_a_foreign_daemon(
    monkeypatch: pytest.MonkeyPatch, rosed: FakeRosed, capsys: Any, body: dict[str, Any]
) -> None:
    rosed.reply = wire.pack_line(wire.Reply(body=body))
    assert run(monkeypatch, "status", "--socket", rosed.path) == Exit.NOT_READY
    said = capsys.readouterr()
    assert said.out == ""
    assert "not one of this release's rosed" in said.err


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("init", "--stdout"), ("status", "--json")])
def test_output_to_a_full_disk_is_one_line(rosed: FakeRosed, arguments: tuple[str, ...]) -> None:
    socket_option = ("--socket", str(rosed.path)) if arguments[0] == "status" else ()
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rose.cli.main", *arguments, *socket_option],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert ended.returncode == Exit.ERROR
    assert ended.stderr == "rose: the output cannot be written: No space left on device\n"


def test_a_rosed_that_hangs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        with pytest.raises(TimedOut):
            ask(tmp_path / "mute.sock", wire.StatusRequest(), timeout_s=0.2)
