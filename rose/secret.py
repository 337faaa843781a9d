"""Secrets in files: tokens, and who may read them."""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError


def read_secret(path: str | Path, what: str) -> str:
    """The ASCII text of a secret file without its line's end; `what` names it in errors.

    Raises ConfigError when it cannot be read, is empty, or can be read by other users.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: {path} is not ASCII text") from None
    if not text:
        raise ConfigError(f"{what}: {path} is empty")
    refuse_open(path, mode, what)
    return text


def refuse_open(path: Path, mode: int, what: str) -> None:
    """Raises ConfigError when `mode` lets others than the owner read the file."""
    if mode & 0o077:
        raise ConfigError(f"{what}: {path} can be read by others", f"chmod 600 {path}")
