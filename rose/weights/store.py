"""Weight versions on this host: `<state_dir>/weights/<job>/v<version>`, verified before they are named so."""

from __future__ import annotations

import re
import shutil
from collections.abc import Container
from pathlib import Path

from rose.errors import ConfigError, CorruptDelta, NotFound, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import container, files
from rose.weights.manifest import VERSION_MAX, Manifest, valid_job

_VERSION_NAME = re.compile(r"v(0|[1-9][0-9]{0,15})")
_PIN = "pin"
_HIDDEN_NAME = re.compile(r"\.v(0|[1-9][0-9]{0,15})\.(?:partial|stale|lock)")


class WeightStore:
    """The versions staged under a state directory.  Names from outside never lead out of it."""

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "weights"

    def directory(self, job: JobId) -> Path:
        """Where a job's versions lie; it need not exist yet.  Raises ConfigError for what is no job id."""
        if not valid_job(job):
            raise ConfigError(f"{job!r} is not a job id", "letters, digits, dot, dash and underscore")
        return self._root / job

    def versions(self, job: JobId) -> tuple[WeightVersion, ...]:
        """The staged versions, in order."""
        directory = self.directory(job)
        if not directory.is_dir():
            return ()
        found = (
            _VERSION_NAME.fullmatch(entry.name) for entry in directory.iterdir() if _is_real_directory(entry)
        )
        return tuple(sorted(WeightVersion(int(match[1])) for match in found if match))

    def destination(self, job: JobId, version: WeightVersion) -> Path:
        """Where a version is to be staged.  Raises ConfigError for what is no job id or no version."""
        return self.directory(job) / version_name(version)

    def path(self, job: JobId, version: WeightVersion) -> Path:
        """The directory of a staged version.  Raises NotFound."""
        path = self.destination(job, version)
        if not _is_real_directory(path):
            raise NotFound(f"version {version} of {job} is not staged on this host")
        return path

    def manifest(self, job: JobId, version: WeightVersion) -> Manifest:
        """The manifest of a staged version.  Raises NotFound, CorruptDelta."""
        return container.read_manifest(self.path(job, version))

    def holds(self, manifest: Manifest) -> bool:
        """Whether the very version is staged."""
        try:
            return self.manifest(manifest.job, manifest.version) == manifest
        except (NotFound, CorruptDelta):
            return False

    def chain(self, job: JobId, held: WeightVersion, target: WeightVersion) -> list[Path]:
        """Directories to apply in order to go from `held` to `target`; an anchor on the way starts afresh.

        Raises NotFound if a version is not staged, WrongBase if the deltas do not lead back to `held`.
        """
        paths: list[Path] = []
        version = target
        while version != held:
            manifest = self.manifest(job, version)
            paths.append(self.path(job, version))
            if manifest.base_version is None:
                break
            if manifest.base_version < held:
                raise WrongBase(f"version {target} of {job} is not built on version {held}")
            version = manifest.base_version
        return paths[::-1]

    def pin(self, job: JobId) -> WeightVersion | None:
        """The version that the operator holds this host's engines at, or None.  Raises ConfigError."""
        path = self.directory(job) / _PIN
        try:
            text = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        if not text.isdecimal() or int(text) > VERSION_MAX:
            raise ConfigError(
                f"{path}: {text[:40]!r} is not a weight version", "delete it to follow new versions"
            )
        return WeightVersion(int(text))

    def set_pin(self, job: JobId, version: WeightVersion | None) -> None:
        """Hold engines at `version` from now on, restarts of rosed included; None lets them follow."""
        directory = self.directory(job)
        directory.mkdir(parents=True, exist_ok=True)
        if version is None:
            (directory / _PIN).unlink(missing_ok=True)
            files.sync_directory(directory)
        else:
            files.replace_durably(directory / _PIN, f"{version}\n".encode())

    def prune(self, job: JobId, keep: int, held: Container[int] = ()) -> tuple[WeightVersion, ...]:
        """Delete all but the newest `keep` versions and those `held`; answers the deleted ones.

        Leftovers of unfinished pulls of versions older than the newest one, and not held, go too.
        """
        versions = self.versions(job)
        doomed = [version for version in versions[: max(0, len(versions) - keep)] if version not in held]
        for version in doomed:
            _remove(self.path(job, version))
        if versions:
            for entry in self.directory(job).iterdir():
                match = _HIDDEN_NAME.fullmatch(entry.name)
                if match and int(match[1]) < versions[-1] and int(match[1]) not in held:
                    _remove(entry)
        return tuple(doomed)


def version_name(version: WeightVersion) -> str:
    """Name of a version's directory.  Raises ConfigError for what is no version."""
    if not 0 <= version <= VERSION_MAX:
        raise ConfigError(f"{version} is not a weight version")
    return f"v{version}"


def _is_real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    """Remove a file or directory; a directory loses its name first, so that no half of it is ever seen."""
    if not _is_real_directory(path):
        path.unlink(missing_ok=True)
        return
    if _VERSION_NAME.fullmatch(path.name):
        path = path.rename(path.with_name(f".{path.name}.stale"))
    shutil.rmtree(path)
