"""Reference pages, from the code: the keys of `rose.toml`, and what every command says of itself."""

from __future__ import annotations

from typing import Any

import msgspec
from typer.main import get_command

from rose.cli import template
from rose.cli.main import app
from rose.config import Config, ReplicaConfig

_SHOWN: dict[str, Any] = {"terminal_width": 100}


def config() -> str:
    """Every section and key, in the order of the file."""
    docs = template._Documentation.read()
    parts: list[str] = []
    defaults = Config()
    for name in Config.__struct_fields__:
        value = getattr(defaults, name)
        if name == "replicas":
            parts += _section("[[replicas]]", ReplicaConfig, None, docs)
        elif isinstance(value, msgspec.Struct):
            parts += _section(f"[{name}]", type(value), value, docs)
    return "\n".join(parts)


def cli() -> str:
    """The help of `rose` and of every command below it."""
    root = get_command(app)
    return "\n".join(_command("rose", root, root.context_class(root, info_name="rose", **_SHOWN), level=2))


def _section(title: str, kind: type[msgspec.Struct], values: Any, docs: Any) -> list[str]:
    lines = [f"## {title}", "", docs.sections[kind.__name__], "", "| key | default | |", "|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        default = getattr(values, field.name) if values is not None else field.default
        shown = "required" if default is msgspec.NODEFAULT else f"`{msgspec.json.encode(default).decode()}`"
        text = " ".join(docs.keys[kind.__name__, field.name].split()).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {shown} | {_cell(text)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """Angle brackets would be taken for HTML outside code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _command(path: str, command: Any, context: Any, level: int) -> list[str]:
    lines = [f"{'#' * min(level, 4)} {path}", "", "```", command.get_help(context), "```", ""]
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        if below is not None and not below.hidden:
            inside = below.context_class(below, info_name=name, parent=context, **_SHOWN)
            lines += _command(f"{path} {name}", below, inside, level + 1)
    return lines
