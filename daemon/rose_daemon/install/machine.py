"""The machine that ROSE is installed on: its files below a root, its services, its GPU's MPS daemon.

Every change goes through here, says what it does, and does it only if this is no dry run.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import msgspec

from rose.errors import RoseError
from rose_daemon.install.plan import FoundFile, Record, UnitRecord

_COMMAND_S = 60
_BOOTED = "/run/systemd/system"
"""There while systemd runs the machine (sd_booted(3))."""
_NEEDS_SYSTEMD = {"start", "stop", "daemon-reload"}
"""What `systemctl` asks of a running systemd; enabling only makes links."""

Say = Callable[[str], None]


class Machine:
    """Where `root` is not /, it is an image or a scratch folder: files are written, no service is touched."""

    def __init__(self, root: Path, say: Say, *, dry: bool) -> None:
        self.root = root
        self.live = root.resolve() == Path("/")
        self._say = say
        self.dry = dry

    def at(self, path: PurePosixPath | str) -> Path:
        """Where a path of the machine lies here."""
        return self.root / str(path).lstrip("/")

    # ---- files ----------------------------------------------------------------------------------

    def found(self, path: PurePosixPath) -> FoundFile | None:
        """A file as it is now; None if there is none.  Raises RoseError for what is no plain file."""
        place = self.at(path)
        try:
            if place.is_symlink() or (place.exists() and not place.is_file()):
                raise RoseError(f"{place} is not a plain file", "move it away first")
            status = place.stat()
            content = base64.b64encode(place.read_bytes()).decode("ascii")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RoseError(f"{place}: cannot be read: {error.strerror}", "run as root") from None
        return FoundFile(content, status.st_mode & 0o7777, status.st_uid, status.st_gid)

    def write(self, path: PurePosixPath, content: bytes, mode: int) -> None:
        """Put a file in place, at once and whole.  Raises RoseError."""
        place = self.at(path)
        self._say(f"write {place} ({len(content)} bytes, mode {mode:04o})")
        if self.dry:
            return
        part = place.with_name(f".{place.name}.part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.chmod(mode)
            part.replace(place)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RoseError(f"{place}: cannot be written: {error.strerror}", "run as root") from None

    def restore(self, path: PurePosixPath, found: FoundFile) -> None:
        """Put a file back as it was."""
        self.write(path, found.data, found.mode)
        if not self.dry and self.live:
            os.chown(self.at(path), found.uid, found.gid)

    def remove(self, path: PurePosixPath) -> None:
        """Take a file away."""
        self._say(f"remove {self.at(path)}")
        if not self.dry:
            self.at(path).unlink(missing_ok=True)

    def missing_directories(self, path: PurePosixPath) -> list[str]:
        """Parents of a path that are not there, the uppermost first."""
        return [str(each) for each in reversed(path.parents) if not self.at(each).exists()]

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        """Make a directory whose parent is there.  Raises RoseError."""
        self._say(f"make {self.at(path)}/")
        if self.dry:
            return
        try:
            self.at(path).mkdir(mode=mode, exist_ok=True)
        except OSError as error:
            raise RoseError(f"{self.at(path)}: cannot be made: {error.strerror}", "run as root") from None

    def remove_directory(self, path: str) -> None:
        """Take a directory away, unless something is in it."""
        place = self.at(path)
        if not place.is_dir():
            return
        left = [] if self.dry else sorted(each.name for each in place.iterdir())
        if left:
            self._say(f"keep {place}/, as {left[0]} is in it")
            return
        self._say(f"remove {place}/, if it is empty by then" if self.dry else f"remove {place}/")
        if not self.dry:
            place.rmdir()

    def keep_record(self, path: PurePosixPath, record: Record) -> None:
        """Write the record down, before anything that it tells of is changed."""
        for directory in self.missing_directories(path):
            self.make_directory(directory, 0o700 if directory == str(path.parent) else 0o755)
        self.write(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", 0o600)

    # ---- services -------------------------------------------------------------------------------

    def unit(self, unit: str) -> UnitRecord:
        """A unit as it is now; on an image nobody is asked."""
        if not self.live:
            return UnitRecord(unit, "", active=False)
        enabled = self._ask("systemctl", "is-enabled", unit)
        return UnitRecord(unit, enabled, active=self._ask("systemctl", "is-active", unit) == "active")

    def act(self, *argv: str, why: str) -> None:
        """Run a command on the live machine.  Raises RoseError if it fails."""
        text = f"{' '.join(argv)}    # {why}"
        if not self.live:
            self._say(f"skip, as this is not the running system: {text}")
            return
        if argv[0] == "systemctl" and argv[1] in _NEEDS_SYSTEMD and not self.at(_BOOTED).is_dir():
            self._say(f"skip, as systemd does not run here: {text}")
            return
        self._say(f"run {text}")
        if self.dry:
            return
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RoseError(f"{' '.join(argv)}: {error}") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RoseError(f"{' '.join(argv)}: {said[-1] if said else f'exit code {done.returncode}'}")

    def note(self, text: str) -> None:
        """Say something that is not done here."""
        self._say(text)

    def _ask(self, *argv: str) -> str:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()

    def unlinked_devices(self) -> list[str]:
        """NVIDIA's device nodes that /dev/char does not link to.

        Where a container runs beside such a node, `systemctl daemon-reload` takes the GPU from it for good.
        """
        found = []
        for node in sorted(self.at("/dev").glob("nvidia*")):
            try:
                number = node.stat().st_rdev
            except OSError:
                continue
            if number and not self.at(f"/dev/char/{os.major(number)}:{os.minor(number)}").exists():
                found.append(str(node))
        return found
