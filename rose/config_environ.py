"""Settings from the environment, and errors of `rose.toml` in the words of its reader."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.config import Config

_PREFIX = "ROSE_"


def with_environment(
    document: dict[str, Any], environ: Mapping[str, str], defaults: Config
) -> dict[str, Any]:
    """The document, with ROSE_<SECTION>__<KEY> of the environment put over it.  Raises ConfigError."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in document.items()}
    for name in sorted(environ):
        if not name.startswith(_PREFIX):
            continue
        if "__" not in name:
            _refuse_near_miss(name, defaults)
            continue
        section, _, key = name[len(_PREFIX) :].lower().partition("__")
        if section not in defaults.__struct_fields__ or section in ("schema", "replicas"):
            raise ConfigError(f"{name}: `{section}` cannot be set from the environment", "unset it")
        part = merged.setdefault(section, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{section}: expected a table, [{section}]")
        part[key] = _value(environ[name], getattr(getattr(defaults, section), key, None))
    return merged


def _refuse_near_miss(name: str, defaults: Config) -> None:
    """Raise ConfigError for ROSE_NODE_TICK_MS, which would be ignored where ROSE_NODE__TICK_MS was meant."""
    words = name[len(_PREFIX) :].lower()
    for section in defaults.__struct_fields__:
        keys = getattr(getattr(defaults, section), "__struct_fields__", ())
        if words.startswith(f"{section}_") and (key := words[len(section) + 1 :]) in keys:
            meant = f"{_PREFIX}{section}__{key}".upper()
            raise ConfigError(f"{name}: no such setting", f"did you mean {meant}?")


def _value(text: str, default: Any) -> Any:
    """An environment value as TOML would read it, or else (or where text is wanted) as it stands."""
    if isinstance(default, str) and text[:1] not in ("'", '"'):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def readable(error: str) -> str:
    """msgspec says "... - at `$.serving.port`"; put the key first, as an operator reads it."""
    text, _, where = error.partition(" - at `$.")
    text = text.replace("Object contains unknown field", "unknown key")
    text = text.replace("Object missing required field", "missing key")
    return f"{where.rstrip('`')}: {text}" if where else text
