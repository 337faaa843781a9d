"""`rose install` and `rose uninstall`: what is done is said, and undone to the byte."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rose_daemon.install import command
from rose_daemon.install.machine import Machine
from rose_daemon.install.plan import CONFIG, RECORD, UNITS, targets
from typer.main import get_command

from rose.config import load
from rose.errors import ConfigError, NotFound, RoseError

ALL = tuple(UNITS)
SCORE_MAX = 3.0


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (
            path.read_bytes() if path.is_file() else b"",
            stat.S_IMODE(path.stat().st_mode),
        )
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image of a system: an older unit of the operator's is there, and a file beside."""
    system = tmp_path / "root"
    units = system / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / "rosed.service").write_text("[Service]\nExecStart=/opt/rosed\n")
    (units / "rosed.service").chmod(0o600)
    (units / "vllm.service").write_text("[Service]\nExecStart=/opt/vllm\n")
    (system / "dev").mkdir()
    return system


def run(app: str, *arguments: str) -> None:
    get_command(getattr(command, f"{app}_app")).main([*arguments], standalone_mode=False)


def test_what_was_there_is_back_to_the_byte(root: Path) -> None:
    before = snapshot(root)
    run("install", *ALL, "--root", str(root))
    after = snapshot(root)
    assert b"Type=notify" in after["etc/systemd/system/rosed.service"][0]
    assert after["etc/systemd/system/vllm.service"] == before["etc/systemd/system/vllm.service"]
    load(root / str(CONFIG).lstrip("/"), {})
    run("uninstall", "--root", str(root))
    assert snapshot(root) == before


@pytest.mark.parametrize("app", ["install", "uninstall"])
def test_a_dry_run_says_each_action_and_does_none(
    root: Path, app: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if app == "uninstall":
        run("install", *ALL, "--root", str(root))
        capsys.readouterr()
    before = snapshot(root)
    run(app, *(ALL if app == "install" else ()), "--root", str(root), "--dry-run")
    dry = capsys.readouterr().out
    assert snapshot(root) == before
    run(app, *(ALL if app == "install" else ()), "--root", str(root))
    real = capsys.readouterr().out
    verbs = ("write ", "remove ", "make ", "run ", "skip")
    for line in real.splitlines():
        if line.startswith(verbs) and "record.json" not in line:
            assert line in dry or f"{line}, if it is empty by then" in dry, line


def test_installing_twice_still_restores_what_was_found_first(root: Path) -> None:
    before = snapshot(root)
    run("install", "rosed", "--root", str(root))
    run("install", *ALL, "--root", str(root))
    once = snapshot(root)
    run("install", *ALL, "--root", str(root))
    assert snapshot(root) == once
    run("uninstall", "--root", str(root))
    assert snapshot(root) == before


def test_what_the_operator_edited_since_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("install", "rosed", "--root", str(root))
    config, unit = root / "etc/rose/rose.toml", root / "etc/systemd/system/rosed.service"
    config.write_text("schema = 1\n")
    unit.write_text("[Service]\nExecStart=/mine\n")
    run("uninstall", "--root", str(root))
    assert config.read_text() == "schema = 1\n"
    assert unit.read_text().endswith("/mine\n")
    assert "edited since" in capsys.readouterr().out


def test_a_configuration_that_is_there_stays_and_is_not_removed(root: Path) -> None:
    config = root / "etc/rose/rose.toml"
    config.parent.mkdir()
    config.write_text("schema = 1\n")
    before = snapshot(root)
    run("install", "rosed", "--root", str(root))
    assert config.read_text() == "schema = 1\n"
    run("uninstall", "--root", str(root), "--force")
    assert snapshot(root) == before


def test_an_install_that_was_cut_short_can_be_undone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(root)
    write = Machine.write

    def failing(self: Machine, path: object, content: bytes, mode: int) -> None:
        if str(path).endswith("rose-relay.service"):
            raise RoseError("no space left")
        write(self, path, content, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(Machine, "write", failing)
    with pytest.raises(RoseError):
        run("install", *ALL, "--root", str(root))
    monkeypatch.undo()
    run("uninstall", "--root", str(root))
    assert snapshot(root) == before


def test_refusals_change_nothing(root: Path) -> None:
    with pytest.raises(NotFound):
        run("uninstall", "--root", str(root))
    with pytest.raises(ConfigError, match="no daemon"):
        run("install", "vllm", "--root", str(root))
    with pytest.raises(ConfigError, match="name what to install: rosed, scheduler, relay"):
        run("install", "--root", str(root))
    unit = root / "etc/systemd/system/rosed.service"
    unit.unlink()
    unit.symlink_to("/dev/null")  # masked by the operator
    before = snapshot(root)
    with pytest.raises(RoseError, match="not a plain file"):
        run("install", "rosed", "--root", str(root))
    assert snapshot(root) == before


def test_the_record_is_where_only_root_writes(root: Path) -> None:
    run("install", "rosed", "--root", str(root))
    record = root / str(RECORD).lstrip("/")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    assert "/var/lib/rose/" not in str(RECORD)
    assert json.loads(record.read_text())["schema"] == 1


# ---- a live machine, with a systemctl of ours ----


@pytest.fixture
def live(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """`root` is taken for the running system; answers the commands that were run since."""
    calls, binaries = tmp_path / "calls", tmp_path / "bin"
    binaries.mkdir()
    for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles"):
        script = binaries / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{calls}\n'
            'case "$1 $2" in "is-enabled rosed.service") echo enabled;; '
            '"is-active rosed.service") echo active;; '
            '"is-enabled "*) echo disabled; exit 1;; "is-active "*) echo inactive; exit 3;; esac\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")

    class Live(Machine):
        def __init__(self, root: Path, say: Callable[[str], None], *, dry: bool) -> None:
            super().__init__(root, say, dry=dry)
            self.live = True

    (root / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setattr(command, "Machine", Live)
    monkeypatch.setattr(os, "chown", lambda *_: None)

    def since() -> list[str]:
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return lines

    return since


def test_services_are_put_back_as_they_were(root: Path, live: Callable[[], list[str]]) -> None:
    run("install", "rosed", "relay", "--enable", "--root", str(root))
    assert live() == [
        "systemctl is-enabled rosed.service",
        "systemctl is-active rosed.service",
        "systemctl is-enabled rose-relay.service",
        "systemctl is-active rose-relay.service",
        "systemd-sysusers /etc/sysusers.d/rose.conf",
        "systemd-tmpfiles --create /etc/tmpfiles.d/rose.conf",
        "systemctl daemon-reload",
        "systemctl --no-reload enable rosed.service",
        "systemctl --no-reload enable rose-relay.service",
    ]
    run("uninstall", "--root", str(root))
    assert live() == [
        "systemctl stop rosed.service",
        "systemctl stop rose-relay.service",
        "systemctl --no-reload disable rose-relay.service",
        "systemctl start rosed.service",
    ]


def test_where_systemd_does_not_run_it_is_not_asked(
    root: Path, live: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "run/systemd/system").rmdir()
    before = snapshot(root)
    run("install", "rosed", "relay", "--root", str(root))
    run("uninstall", "--root", str(root))
    assert snapshot(root) == before
    words = {word for line in live() if line.startswith("systemctl") for word in line.split()}
    assert not words & {"start", "stop", "daemon-reload"}
    assert "skip, as systemd does not run here: systemctl stop rosed.service" in capsys.readouterr().out


def test_a_first_install_reloads_nothing(root: Path, live: Callable[[], list[str]]) -> None:
    (root / "etc/systemd/system/rosed.service").unlink()
    run("install", *ALL, "--enable", "--root", str(root))
    assert "systemctl daemon-reload" not in live()


def test_nothing_is_reloaded_where_containers_would_lose_the_gpu(
    root: Path, live: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        os.mknod(root / "dev/nvidia0", 0o600 | stat.S_IFCHR, os.makedev(195, 0))
    except PermissionError:
        pytest.skip("only root may make device nodes")
    run("install", "rosed", "--root", str(root))
    assert "systemctl daemon-reload" not in live()
    assert "nvidia-ctk system create-dev-char-symlinks" in capsys.readouterr().out
    run("uninstall", "--root", str(root))
    (root / "dev/char").mkdir()
    (root / "dev/char/195:0").symlink_to("../nvidia0")
    live()
    run("install", "rosed", "--root", str(root))
    assert ("systemctl daemon-reload" in live()) == (root / "dev/char/195:0").exists()


# ---- MPS ----


@pytest.fixture
def gpu(root: Path, tmp_path: Path) -> Path:
    """A GPU under MPS by rose.toml; answers the folder of its control daemon."""
    fake = tmp_path / "mps-control"
    shutil.copy(Path(__file__).parents[1] / "fake_mps_control.py", fake)
    fake.write_text(fake.read_text().replace("#!/usr/bin/env python3", f"#!{sys.executable}", 1))
    fake.chmod(0o755)
    (root / "etc/rose").mkdir()
    (root / "etc/rose/rose.toml").write_text(
        f'[device]\nkind = "cuda"\ngpu = "GPU-1"\n[mps]\nenabled = true\nrun_dir = "{tmp_path / "mps"}"\n'
        f'control = "{fake}"\n'
    )
    home = tmp_path / "mps" / "GPU-1"
    (home / "pipe").mkdir(parents=True)
    (home / "log").mkdir()
    return home


def test_mps_that_did_not_run_before_is_stopped(root: Path, gpu: Path) -> None:
    run("install", "rosed", "--root", str(root))
    (gpu / "servers").write_text("{}")  # `rose mps start`
    run("uninstall", "--root", str(root), "--dry-run")
    assert (gpu / "servers").exists()
    run("uninstall", "--root", str(root))
    assert not (gpu / "servers").exists()


def test_mps_that_ran_before_runs_after(root: Path, gpu: Path) -> None:
    (gpu / "servers").write_text("{}")
    run("install", "rosed", "--root", str(root))
    run("uninstall", "--root", str(root))
    assert (gpu / "servers").exists()
    run("install", "rosed", "--root", str(root))
    (gpu / "servers").unlink()
    run("uninstall", "--root", str(root))
    assert (gpu / "servers").exists()


def test_mps_with_processes_on_it_is_not_taken_from_them(root: Path, gpu: Path) -> None:
    run("install", "rosed", "--root", str(root))
    (gpu / "servers").write_text(json.dumps({"1": [os.getpid()]}))
    with pytest.raises(RoseError, match="are on it"):
        run("uninstall", "--root", str(root))
    (gpu / "servers").write_text("{}")
    run("uninstall", "--root", str(root))


# ---- the units ----


def texts() -> dict[str, str]:
    return {
        target.path.name: target.content.decode()
        for target in targets(ALL, Path("/opt/rose/bin"))
        if target.path.name.endswith(".service")
    }


@pytest.mark.parametrize("unit", UNITS.values())
def test_a_unit_is_supervised_contained_and_not_root(unit: str) -> None:
    lines = texts()[unit].splitlines()
    for wanted in (
        "Type=notify", "User=rose", "WatchdogSec=30", "ExecReload=/bin/kill -HUP $MAINPID",
        "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict",
        "EnvironmentFile=-/etc/rose/rose.env",
        "RestartPreventExitStatus=2",
    ):  # fmt: skip
        assert wanted in lines
    assert "/opt/rose/bin/rose" in texts()[unit]
    # It would delete the boards of the serving engine from /dev/shm when a unit stops.
    assert not any(line.startswith("RemoveIPC") for line in lines)
    assert "@" not in texts()[unit].replace("@system-service", "").replace("~@privileged", "").replace(
        " @raw-io @swap @reboot @obsolete", ""
    ).replace(" @resources @obsolete", "")


def test_systemd_holds_the_control_socket_for_who_wants_it(root: Path, live: Callable[[], list[str]]) -> None:
    with pytest.raises(ConfigError, match="goes with rosed"):
        run("install", "relay", "--socket", "--root", str(root))
    before = snapshot(root)
    run("install", "rosed", "--root", str(root))
    assert not (root / "etc/systemd/system/rosed.socket").exists()
    config = root / "etc/rose/rose.toml"
    text = config.read_text()
    config.write_text(text.replace('control_socket = ""', 'control_socket = "/run/rose/control.sock"'))
    run("install", "rosed", "--socket", "--enable", "--root", str(root))
    unit = (root / "etc/systemd/system/rosed.socket").read_text()
    assert "ListenStream=/run/rose/control.sock\nSocketUser=rose\n" in unit
    assert "SocketMode=0600" in unit
    assert "systemctl --no-reload enable rosed.socket" in live()
    config.write_text(text)
    run("uninstall", "--root", str(root))
    stops = [line for line in live() if line.startswith("systemctl stop")]
    assert stops == ["systemctl stop rosed.socket", "systemctl stop rosed.service"]
    assert snapshot(root) == before


def test_systemd_accepts_the_socket(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    for target in targets(("rosed",), Path("/bin"), control_socket=Path("/var/lib/rose/rosed.sock")):
        if target.path.name in {"rosed.socket", "rosed.service"}:
            (tmp_path / target.path.name).write_text(
                target.content.decode().replace("/bin/rosed", "/bin/true")
            )
    argv = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "rosed.socket")]
    checked = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert [line for line in checked.stderr.splitlines() if "rosed." in line] == []


def test_the_unit_that_starts_engines_leaves_them_the_gpu() -> None:
    lines = texts()["rosed.service"].splitlines()
    for closed in ("PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "DevicePolicy"):
        assert not any(line.startswith(closed) for line in lines)


@pytest.mark.parametrize("unit", UNITS.values())
def test_systemd_accepts_a_unit_and_finds_it_contained(unit: str, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    path = tmp_path / unit
    path.write_text(
        texts()[unit].replace("/opt/rose/bin/rosed", "/bin/true").replace("/opt/rose/bin/rose", "/bin/true")
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    about_it = [line for line in checked.stderr.splitlines() if unit in line]
    assert about_it == []
    offline = ["systemd-analyze", "security", "--offline=yes", f"--threshold={SCORE_MAX * 10:.0f}", str(path)]
    judged = subprocess.run(offline, capture_output=True, text=True, check=False, timeout=60)
    if "unrecognized option" in judged.stderr or "Unknown" in judged.stderr:
        pytest.skip("this systemd judges no unit offline")
    overall = next(
        (line for line in judged.stdout.splitlines() if "Overall exposure level" in line), judged.stderr
    )
    assert judged.returncode == 0, overall
