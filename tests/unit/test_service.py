"""What all daemons share: logs, heartbeats, tokens, what a reload changes; and the layout of the state."""

from __future__ import annotations

import ast
import errno
import json
import os
import socket
from pathlib import Path

import pytest
import structlog
from rose_daemon import sdnotify
from rose_daemon.node import statedir
from rose_daemon.node.journal import Journal
from rose_daemon.node.statedir import claim
from rose_daemon.service import logs
from rose_daemon.service.changes import changed_keys
from rose_daemon.service.supervision import Heartbeat, reachable
from rose_daemon.service.tokens import Keyring, Scope, make_token

from rose import switch
from rose.config import AdmissionConfig, Config, NodeConfig, build
from rose.core.events import Tick
from rose.errors import ConfigError, Exit, RoseError
from rose.journals import Entry, read

ROOT = Path(__file__).parents[2]
LOGGING = {"debug", "info", "warning", "error", "critical"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


# ---- logs ----


def written(
    limit: logs.RateLimit, count: int, code: str = "disk_full", **more: object
) -> list[dict[str, object]]:
    kept = []
    for _ in range(count):
        try:
            kept.append(dict(limit(None, "error", {"event": "x", "level": "error", "code": code, **more})))
        except structlog.DropEvent:
            continue
    return kept


def test_a_fault_that_repeats_is_a_burst_and_then_a_line_a_minute_that_counts() -> None:
    clock = Clock()
    limit = logs.RateLimit(clock)
    assert len(written(limit, 10_000)) == logs.BURST
    clock.now_s += logs.PERIOD_S
    (line,) = written(limit, 500)
    assert line["suppressed"] == 10_000 - logs.BURST
    clock.now_s += logs.PERIOD_S
    assert written(limit, 1)[0]["suppressed"] == 499


def test_one_fault_hides_no_other_and_the_worst_is_never_hidden() -> None:
    limit = logs.RateLimit(Clock())
    written(limit, 1000)
    assert len(written(limit, 1, code="gpu_lost")) == 1
    assert len(written(limit, 1, subject="another")) == 1
    fatal = {"event": "x", "level": "critical", "code": "disk_full"}
    assert [limit(None, "critical", dict(fatal)) for _ in range(100)] == [fatal] * 100


def test_what_was_silent_for_long_may_be_said_in_full_again_and_nothing_grows() -> None:
    clock = Clock()
    limit = logs.RateLimit(clock)
    written(limit, 5)
    clock.now_s += logs.PERIOD_S
    assert len(written(limit, 100)) == logs.BURST
    for number in range(3 * logs.KEYS_MAX):
        written(limit, 1, code=f"code_{number}")
    assert len(limit._buckets) == logs.KEYS_MAX


def test_lines_name_their_reason_stand_on_one_line_and_libraries_are_heard(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import logging, structlog\n"
        "from rose_daemon.service import logs\n"
        "logs.configure('info', 'json')\n"
        "structlog.get_logger().info('scheduler_ready', text='a\\nb')\n"
        "structlog.get_logger().debug('not_said')\n"
        "logging.getLogger('aiohttp.server').error('broke')\n"
        "logging.getLogger('aiohttp.server').info('not said')\n"
    )
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["code"] for line in lines] == ["scheduler_ready", "aiohttp_server"]
    assert lines[0]["text"] == "a | b"
    assert all(line["timestamp"] and line["level"] for line in lines)


def test_every_line_that_a_daemon_may_log_has_a_reason_code() -> None:
    bare = []
    for path in sorted((ROOT / "daemon/rose_daemon").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "structlog.get_logger" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=method), args=args) if (
                    method in LOGGING | {"log"}
                ):
                    said = args[1] if method == "log" else args[0]
                    word = not isinstance(said, ast.Constant) or " " not in str(said.value)
                    if not (word or any(keyword.arg == "code" for keyword in node.keywords)):
                        bare.append(f"{path.name}:{node.lineno}")
    assert bare == []


# ---- heartbeats ----


def test_a_heartbeat_is_sent_twice_in_what_the_manager_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        clock = Clock()
        heart = Heartbeat(clock)
        for _ in range(300):
            heart.beat()
            clock.now_s += 0.1
        assert manager.recv(100) == manager.recv(100) == b"WATCHDOG=1"
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_service_manager_that_does_not_read_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        sent = [sdnotify.notify("WATCHDOG=1") for _ in range(10_000)]
    assert sent[0]
    assert not sent[-1]


@pytest.mark.parametrize(
    ("host", "way"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_a_daemon_probes_itself_where_it_listens(host: str, way: str) -> None:
    assert reachable(host) == way


# ---- tokens ----


def ring(directory: Path) -> tuple[Keyring, dict[Scope, str]]:
    directory.mkdir(mode=0o700)
    tokens = {scope: make_token(directory, f"user-{scope}", scope).read_text().strip() for scope in Scope}
    return Keyring.read("scheduler", "", str(directory)), tokens


def test_each_token_has_its_scope_and_no_other(tmp_path: Path) -> None:
    keys, tokens = ring(tmp_path / "tokens")
    assert keys
    for scope, token in tokens.items():
        assert keys.scope_of(f"Bearer {token}") == scope
        for wrong in (
            token,
            f"bearer {token}",
            f"Bearer {token[:-1]}",
            f"Bearer {token}x",
            f"Bearer  {token}",
        ):
            assert keys.scope_of(wrong) is None
    for wrong in ("", "Bearer ", "Bearer \udcff\udcfe", "Bearer " + "x" * 100_000):
        assert keys.scope_of(wrong) is None


def test_without_tokens_everybody_may(tmp_path: Path) -> None:
    assert not Keyring.read("scheduler", "", "")
    assert Keyring().scope_of("") == Scope.ADMIN
    (tmp_path / "one").write_text("secret")
    (tmp_path / "one").chmod(0o600)
    single = Keyring.read("scheduler", str(tmp_path / "one"), "")
    assert (single.scope_of("Bearer secret"), single.scope_of("")) == (Scope.ADMIN, None)


def test_a_ring_is_replaced_in_place(tmp_path: Path) -> None:
    keys, tokens = ring(tmp_path / "tokens")
    (tmp_path / "tokens" / f"user-{Scope.READ}.read").unlink()
    keys.replace(Keyring.read("scheduler", "", str(tmp_path / "tokens")))
    assert keys.scope_of(f"Bearer {tokens[Scope.READ]}") is None
    assert keys.scope_of(f"Bearer {tokens[Scope.ADMIN]}") == Scope.ADMIN


@pytest.mark.parametrize(
    ("name", "text", "mode", "why"),
    [
        ("a.read", "x" * 20, 0o640, "read by others"),
        ("a.read", "x" * 20, 0o604, "read by others"),
        ("a.read", "short", 0o600, "fewer than 16"),
        ("a.root", "x" * 20, 0o600, "ends in no scope"),
        ("read", "x" * 20, 0o600, "ends in no scope"),
        (".hidden.read", "x" * 20, 0o600, "holds no token"),
        ("a.read", "", 0o600, "is empty"),
    ],
)
def test_a_directory_of_tokens_that_is_not_safe_is_refused(
    tmp_path: Path, name: str, text: str, mode: int, why: str
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match=why):
        Keyring.read("relay", "", str(tmp_path))


def test_a_token_is_not_made_twice_and_is_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    path = make_token(tmp_path / "tokens", "a", Scope.READ)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="is there already"):
        make_token(tmp_path / "tokens", "a", Scope.READ)


def test_a_token_for_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path / "typo", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match="no such directory") as refusal:
            make_token(directory, "a", Scope.READ)
        assert refusal.value.code == Exit.USAGE
        assert not directory.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        make_token(tmp_path / "file", "a", Scope.READ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_makes_for_a_daemon_is_the_daemons(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 65534, 65533)
    for path in (make_token(tmp_path, "a", Scope.READ), switch.put(tmp_path, off=True)):
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (65534, 65533)


# ---- reload ----


def test_what_a_reload_cannot_change_is_named() -> None:
    old = Config()
    new = Config(node=NodeConfig(tick_ms=20), admission=AdmissionConfig(mode="slack"))
    assert changed_keys(old, new) == ["node.tick_ms", "admission.mode"]
    assert changed_keys(old, new, ("admission.mode",)) == ["node.tick_ms"]
    assert changed_keys(old, old) == []


# ---- state ----


def test_a_new_directory_and_one_without_a_number_are_of_this_layout(tmp_path: Path) -> None:
    assert claim(tmp_path) == 1
    assert json.loads((tmp_path / statedir.NAME).read_text()) == {"layout": statedir.LAYOUT}
    assert claim(tmp_path) == statedir.LAYOUT


def test_every_layout_has_a_way_to_the_present_one() -> None:
    assert set(statedir.MIGRATIONS) == set(range(1, statedir.LAYOUT))


def test_an_old_layout_is_migrated_step_by_step_and_goes_on_after_a_cut(tmp_path: Path) -> None:
    claim(tmp_path)
    done: list[int] = []
    broken = True

    def step(number: int) -> None:
        if number == 2 and broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(number)

    migrations = {1: lambda _: step(1), 2: lambda _: step(2)}
    with pytest.raises(RoseError, match="No space left"):
        claim(tmp_path, 3, migrations)
    broken = False
    assert claim(tmp_path, 3, migrations) == 2
    assert done == [1, 2]
    assert claim(tmp_path, 3, migrations) == 3


@pytest.mark.parametrize("text", ['{"layout": 99}', '{"layout": "x"}', "", "[]"])
def test_the_state_of_a_later_release_or_of_nobody_is_not_touched(tmp_path: Path, text: str) -> None:
    (tmp_path / statedir.NAME).write_text(text)
    with pytest.raises(ConfigError):
        claim(tmp_path)
    assert (tmp_path / statedir.NAME).read_text() == text


class FullDisk:
    """Takes the first bytes of what is written, and then no more, until there is room again."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.full = False
        self.fault = OSError(number, os.strerror(number))

    name = "journal.jsonl"

    def open(self, mode: str) -> object:
        disk, file = self, self.path.open(mode, buffering=0)

        class File:
            def tell(self) -> int:
                return file.tell()

            def write(self, data: bytes) -> int:
                if disk.full:
                    file.write(data[: len(data) // 2])
                    raise disk.fault
                return file.write(data)

            def flush(self) -> None:
                if disk.full:
                    raise disk.fault

            def close(self) -> None:
                file.close()

        return File()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_full_disk_costs_entries_and_leaves_the_journal_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "journal.jsonl"
    disk = FullDisk(path, number)
    journal = Journal(path, 1 << 20)
    journal.close()
    monkeypatch.setattr(journal, "_path", disk)
    journal.write(1, Tick(), ())
    journal.flush()
    disk.full = True
    for now_ns in range(2, 6):
        journal.write(now_ns, Tick(), ())
        journal.flush()
    assert journal.lost >= 4
    disk.full = False
    journal.write(6, Tick(), ())
    journal.flush()
    journal.close()
    assert read(path)[0] == [Entry(1, Tick(), ()), Entry(6, Tick(), ())]


@pytest.mark.parametrize(
    ("settings", "fine"),
    [
        ({}, False),
        ({"tokens_dir": "/t"}, False),
        ({"tls_cert": "/c", "tls_key": "/k"}, False),
        ({"tokens_dir": "/t", "tls_cert": "/c"}, False),
        ({"tokens_dir": "/t", "tls_cert": "/c", "tls_key": "/k"}, True),
        ({"token_file": "/t", "tls_cert": "/c", "tls_key": "/k"}, True),
        ({"token_file": "/t", "tls_elsewhere": True}, True),
    ],
)
def test_off_loopback_the_gateway_needs_tokens_and_tls(settings: dict[str, object], fine: bool) -> None:
    document = {"scheduler": {"gateway_host": "10.0.0.1", **settings}}
    if fine:
        build(document, "rose.toml")
        return
    with pytest.raises(ConfigError, match="scheduler"):
        build(document, "rose.toml")
