"""`rose install` and `rose uninstall`: ROSE's daemons as services of this machine, and away again.

Nothing of the serving engine is touched by either, and nothing is started or enabled unless asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from rose import __version__
from rose import config as configuration
from rose.config import Config, MpsConfig
from rose.errors import ConfigError, NotFound
from rose_daemon.install.machine import Machine
from rose_daemon.install.plan import (
    CONFIG,
    RECORD,
    SOCKET,
    SYSUSERS,
    TMPFILES,
    UNIT_DIRECTORY,
    UNITS,
    FileRecord,
    MpsRecord,
    Record,
    Target,
    digest,
    read_record,
    targets,
)
from rose_daemon.mps.control import MpsControl, open_control

install_app = typer.Typer(rich_markup_mode=None, add_completion=False)
uninstall_app = typer.Typer(rich_markup_mode=None, add_completion=False)

DaemonsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="DAEMON...", help=f"Which of {', '.join(UNITS)}.")
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
RootOption = Annotated[
    Path, typer.Option("--root", help="Install into an image of a system; its services are left alone.")
]


@install_app.command()
def install(
    daemons: DaemonsArgument = None,
    dry_run: DryOption = False,
    root: RootOption = Path("/"),
    enable: Annotated[bool, typer.Option("--enable", help="Have them started at boot.")] = False,
    activate: Annotated[
        bool,
        typer.Option("--socket", help="Have systemd hold rosed's control socket, and start rosed by it."),
    ] = False,
) -> None:
    """Make ROSE's daemons services of this machine; say each thing that is done."""
    wanted = tuple(dict.fromkeys(daemons or ()))
    if not wanted:
        hint = "`rose install rosed` on a serving host; --dry-run says what would be done"
        raise ConfigError(f"name what to install: {', '.join(UNITS)}", hint)
    if unknown := [name for name in wanted if name not in UNITS]:
        raise ConfigError(f"{unknown[0]!r} is no daemon of ROSE", f"one of {', '.join(UNITS)}")
    if activate and "rosed" not in wanted:
        raise ConfigError("--socket goes with rosed")
    machine = Machine(root, print, dry=dry_run)
    before = read_record(machine.at(RECORD))
    control_socket = _control_socket(machine.at(CONFIG)) if activate else None
    files = targets(wanted, Path(sys.executable).parent, control_socket=control_socket)
    plan = [each for each in files if not _in_place(machine, each, before)]
    units = [*([SOCKET] if activate else []), *(UNITS[name] for name in wanted)]
    record = _recorded(machine, before, plan, units)
    known = {each.unit for each in before.units}
    replaces_unit = any(each.path.parent == UNIT_DIRECTORY and machine.found(each.path) for each in plan)
    machine.keep_record(RECORD, record)
    for directory in _missing(machine, plan):
        machine.make_directory(directory)
    for target in plan:
        machine.write(target.path, target.content, target.mode)
    machine.act("systemd-sysusers", str(SYSUSERS), why="the user rose")
    machine.act("systemd-tmpfiles", "--create", str(TMPFILES), why="directories on tmpfs")
    if replaces_unit:
        _reload(machine)
    for unit in units:
        if enable:
            # A unit that systemd has not loaded yet needs no reload, and enabling must not do one unasked.
            machine.act("systemctl", "--no-reload", "enable", unit, why="started at boot")
    if not known:
        machine.note(f"next: edit {machine.at(CONFIG)}, then `systemctl start {units[0]}`")


@uninstall_app.command()
def uninstall(
    dry_run: DryOption = False,
    root: RootOption = Path("/"),
    force: Annotated[bool, typer.Option("--force", help="Files that were edited since as well.")] = False,
) -> None:
    """Stop ROSE's services and put back what `rose install` found; state in /var/lib/rose is kept."""
    machine = Machine(root, print, dry=dry_run)
    record = read_record(machine.at(RECORD))
    if not record.release:
        raise NotFound(f"{machine.at(RECORD)} is not there: ROSE was not installed by `rose install`")
    # Sockets first: one would start the daemon anew that was stopped before it.
    for unit in sorted(record.units, key=lambda each: not each.unit.endswith(".socket")):
        machine.act("systemctl", "stop", unit.unit, why="it ends its engines; serving goes on")
        if unit.enabled != "enabled":
            machine.act("systemctl", "--no-reload", "disable", unit.unit, why="as it was found")
    _restore_mps(machine, record)
    for file in reversed(record.files):
        _restore(machine, file, force=force)
    for unit in record.units:
        if unit.active:
            machine.act("systemctl", "start", unit.unit, why="it ran before ROSE was installed")
    machine.remove(RECORD)
    for directory in reversed(record.directories):
        machine.remove_directory(directory)
    machine.note("kept: /var/lib/rose with its state, and the user rose, who owns it")


def _control_socket(config: Path) -> Path:
    """Where rosed listens by the configuration that is there, or else by the one that is installed."""
    return (configuration.load(config, {}) if config.exists() else Config()).control_socket


def _in_place(machine: Machine, target: Target, before: Record) -> bool:
    found = machine.found(target.path)
    if found is None:
        return False
    if target.keep:
        machine.note(f"keep {machine.at(target.path)}, as it is there")
        return True
    return found.data == target.content and before.file(target.path) is not None


def _recorded(machine: Machine, before: Record, plan: list[Target], units: list[str]) -> Record:
    """The record after this install: of what an earlier one wrote, it is what that one found that counts."""
    written = {each.path: each for each in before.files}
    for target in plan:
        earlier = before.file(target.path)
        found = earlier.found if earlier else machine.found(target.path)
        written[str(target.path)] = FileRecord(str(target.path), digest(target.content), found)
    missing = [*machine.missing_directories(RECORD), *_missing(machine, plan)]
    known = {each.unit for each in before.units}
    return Record(
        release=__version__,
        files=tuple(written.values()),
        directories=tuple(dict.fromkeys((*before.directories, *missing))),
        units=(*before.units, *(machine.unit(unit) for unit in units if unit not in known)),
        mps=before.mps or _mps_found(machine),
    )


def _missing(machine: Machine, plan: list[Target]) -> list[str]:
    return list(dict.fromkeys(each for target in plan for each in machine.missing_directories(target.path)))


def _restore(machine: Machine, file: FileRecord, *, force: bool) -> None:
    path = PurePosixPath(file.path)
    now = machine.found(path)
    if now is not None and digest(now.data) != file.written and not force:
        machine.note(f"keep {machine.at(path)}, as it was edited since (--force takes it away)")
    elif file.found is not None:
        machine.restore(path, file.found)
    elif now is not None:
        machine.remove(path)


def _reload(machine: Machine) -> None:
    if devices := machine.unlinked_devices():
        machine.note(
            f"not done: `systemctl daemon-reload`.  {devices[0]} has no link in /dev/char, so that "
            "containers would lose the GPU.  "
            "Run `nvidia-ctk system create-dev-char-symlinks --create-all` first"
        )
        return
    machine.act("systemctl", "daemon-reload", why="a unit that was there has changed")


# ---- MPS ------------------------------------------------------------------------------------------


def _mps_found(machine: Machine) -> MpsRecord:
    """Whether a control daemon of ROSE's runs already.

    Where `rose.toml` does not say which GPU, one whose pipes are there counts as running, and is left
    alone later.
    """
    if (control := _control(machine)) is not None:
        return MpsRecord(ran=control.clients() is not None)
    return MpsRecord(ran=any(machine.at(MpsConfig().run_dir).glob("*/pipe")))


def _restore_mps(machine: Machine, record: Record) -> None:
    control = _control(machine)
    if control is None:
        return
    ran = record.mps is None or record.mps.ran
    runs = control.clients() is not None
    if runs and not ran:
        machine.note(f"stop MPS on {control.plan.pipe_directory}: it did not run before")
        if not machine.dry:
            control.stop()
    elif ran and not runs:
        machine.note(f"start MPS on {control.plan.pipe_directory}: it ran before")
        if not machine.dry:
            control.start()


def _control(machine: Machine) -> MpsControl | None:
    config = _config(machine)
    return open_control(config) if config is not None and config.mps.enabled else None


def _config(machine: Machine) -> Config | None:
    path = machine.at(CONFIG)
    if not path.exists():
        return None
    try:
        return configuration.load(path, {})
    except ConfigError as error:
        machine.note(f"MPS is left alone, as rose.toml cannot be read: {error.what}")
        return None
