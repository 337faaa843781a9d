"""The text of a commented `rose.toml`, made from the sections of `rose.config`.

Each key's documentation is the docstring under it in the source, so the two cannot drift apart.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec

from rose import config as config_module
from rose import config_lending
from rose.config import SCHEMA, Config, ReplicaConfig

_WIDTH = 100
_HEAD = """\
# rose.toml: configuration of rosed, rose-scheduler and the relay.
#
# Each key is shown with its default.  ROSE_<SECTION>__<KEY> in the environment goes before this file,
# as in ROSE_NODE__TICK_MS=20.  `rosed --check` reads the file and says what is wrong with it.
"""
_EXAMPLES: dict[str, Any] = {"id": "rollout-0", "kind": "opportunistic", "model": "/path/to/checkpoint"}
"""Values shown for the keys of a replica that have no default."""


def render() -> str:
    """A complete `rose.toml` that loads to the defaults; the one replica in it is commented out."""
    docs = _Documentation.read()
    parts = [_HEAD, f"schema = {SCHEMA}\n"]
    defaults = Config()
    for name in Config.__struct_fields__:
        value = getattr(defaults, name)
        if name == "replicas":
            parts.append(_replica(docs))
        elif isinstance(value, msgspec.Struct):
            parts.append(_section(f"[{name}]", type(value), value, docs))
    return "\n".join(parts)


class _Documentation:
    """Docstrings of the configuration's classes, and of the keys in them."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.sections: dict[str, str] = {}
        self.keys: dict[tuple[str, str], str] = {}
        for node in (node for tree in trees for node in tree.body):
            if isinstance(node, ast.ClassDef):
                self.sections[node.name] = ast.get_docstring(node) or ""
                self._read_keys(node)

    @classmethod
    def read(cls) -> _Documentation:
        return cls(ast.parse(inspect.getsource(module)) for module in (config_module, config_lending))

    def _read_keys(self, section: ast.ClassDef) -> None:
        for field, text in zip(section.body, section.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    self.keys[section.name, key] = inspect.cleandoc(doc)


def _section(title: str, kind: type[msgspec.Struct], values: Any, docs: _Documentation) -> str:
    lines = [*_comment(docs.sections[kind.__name__]), title]
    for key in kind.__struct_fields__:
        lines += _comment(docs.keys[kind.__name__, key])
        lines.append(f"{key} = {_toml(getattr(values, key))}")
    return "\n".join(lines) + "\n"


def _replica(docs: _Documentation) -> str:
    example = ReplicaConfig(**_EXAMPLES)
    text = _section("[[replicas]]", ReplicaConfig, example, docs)
    lines = ["# Uncomment for each rollout engine of this host.", *text.splitlines()]
    return "\n".join(line if line.startswith("#") else f"#{line}" for line in lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _toml(value: Any) -> str:
    """A value as TOML writes it; JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)
