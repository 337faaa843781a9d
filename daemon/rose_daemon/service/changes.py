"""What differs between the settings that a daemon runs with and those that it reads again."""

from __future__ import annotations

from typing import Any

import msgspec


def changed_keys(old: msgspec.Struct, new: msgspec.Struct, live: tuple[str, ...] = ()) -> list[str]:
    """Keys whose values differ, such as `node.tick_ms`, but those in `live`."""
    before, after = _flat(old), _flat(new)
    return [key for key in before if before[key] != after.get(key) and key not in live]


def _flat(settings: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in settings.__struct_fields__:
        value = getattr(settings, key)
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, msgspec.Struct) else {prefix + key: value}
        )
    return flat
