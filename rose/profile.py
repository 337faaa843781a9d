"""Latency profiles: how long steps of one model take on one kind of hardware, measured beforehand.

A profile is where an engine's latency model starts from; what it sees itself takes over step by step.  It
carries a fingerprint of hardware and model, and one that fits neither is refused: a model that is wrong by a
factor would open gates that must be closed.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from rose.errors import ConfigError

SCHEMA = 1
_HINT = "measure one with `rose profile`, or leave the profile out"
_PROC_CPUINFO = Path("/proc/cpuinfo")
_PROC_NVIDIA = Path("/proc/driver/nvidia/gpus")


class Fingerprint(msgspec.Struct, frozen=True):
    """What a profile holds for."""

    device: Literal["cpu", "cuda"]
    processor: str
    """Name of the processor, or of the GPU."""
    cores: int
    """Cores the worker may use; 0 for a GPU."""
    model: str
    """Digest of the checkpoint's config.json: its shape, whatever its weights."""

    @classmethod
    def here(cls, device: Literal["cpu", "cuda"], cores: int, model: Path) -> Fingerprint:
        """That of this host.  Raises ConfigError when the model or the device cannot be told."""
        try:
            shape = xxhash.xxh3_128_hexdigest((model / "config.json").read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{model}/config.json: {error.strerror}", "name a checkpoint directory"
            ) from None
        return cls(device, _processor(device), cores if device == "cpu" else 0, shape)

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, for people."""
        return [
            f"{field} {getattr(other, field)!r} instead of {getattr(self, field)!r}"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step that was measured: prompt tokens of a prefill, or sequences of a decode."""

    load: int
    duration_ns: int


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured steps of an engine that had the device alone."""

    schema: int = SCHEMA
    fingerprint: Fingerprint
    prefill: tuple[Step, ...]
    decode: tuple[Step, ...]

    def save(self, path: Path) -> None:
        """Write it.  Raises ConfigError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def load(path: Path, expected: Fingerprint) -> Profile:
    """The profile in a file.  Raises ConfigError if there is none, it is damaged, or not for this host."""
    profile = read(path)
    if differences := profile.fingerprint.differences(expected):
        raise ConfigError(f"{path} is a profile of something else: {', '.join(differences)}", _HINT)
    return profile


def read(path: Path) -> Profile:
    """The profile in a file, whatever it was measured on.  Raises ConfigError as `load`."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", _HINT) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a latency profile: {error}", _HINT) from None
    if profile.schema != SCHEMA:
        raise ConfigError(f"{path}: schema {profile.schema} is not supported", _HINT)
    for step in (*profile.prefill, *profile.decode):
        if step.load <= 0 or step.duration_ns <= 0:
            raise ConfigError(f"{path}: {step} cannot be", _HINT)
    return profile


def _processor(device: str) -> str:
    if device == "cpu":
        return _field(r"model name\s*:\s*(.+)", [_PROC_CPUINFO]) or platform.machine()
    name = _field(r"Model:\s*(.+)", sorted(_PROC_NVIDIA.glob("*/information")))
    if not name:
        raise ConfigError("no NVIDIA GPU is to be seen", f"{_PROC_NVIDIA} is read")
    return name


def _field(pattern: str, files: Iterable[Path]) -> str:
    for file in files:
        try:
            found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found:
            return found.group(1).strip()
    return ""
