"""Files that commands write what they found to."""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError


def check_report_path(path: Path | None) -> None:
    """Raise ConfigError when no report could be written to `path`: before the run rather than after it."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise unusable(path, error) from None


def unusable(path: Path, error: OSError) -> ConfigError:
    """What to raise when a report cannot be written."""
    return ConfigError(f"{path}: the report cannot be written: {error.strerror}", "name another file")
