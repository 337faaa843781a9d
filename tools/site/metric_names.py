"""The Prometheus metrics that the daemons show, read from their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DAEMONS = Path(__file__).parents[2] / "daemon" / "rose_daemon"
_KINDS = {
    "GaugeMetricFamily": "gauge",
    "CounterMetricFamily": "counter",
    "HistogramMetricFamily": "histogram",
    "Gauge": "gauge",
    "Counter": "counter",
    "Histogram": "histogram",
}


class Family(NamedTuple):
    """One metric, as the source names it; `pattern` matches its names as they are scraped."""

    daemon: str
    kind: str
    pattern: str
    text: str

    @property
    def name(self) -> str:
        """For people; parts that the source fills in stand as `*`."""
        return self.pattern.replace("[a-z_]+", "*")

    def matches(self, name: str) -> bool:
        """Whether this is the family of that name."""
        return re.fullmatch(self.pattern, name) is not None


def families() -> Iterator[Family]:
    """All of them, in the order of files and lines."""
    for path in sorted(DAEMONS.rglob("*.py")):
        daemon = path.relative_to(DAEMONS).parts[0]
        source = path.read_text(encoding="utf-8")
        for node in (
            ast.walk(ast.parse(source)) if "prometheus_client" in source or daemon == "scheduler" else ()
        ):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[first, *rest]) if kind in _KINDS:
                    yield from _family(daemon, _KINDS[kind], first, rest)
                case ast.Tuple(elts=[ast.Constant(value=str(name)), ast.Constant(value=str(text))]) if (
                    name.startswith("rose_")
                ):
                    yield Family(daemon, "gauge", name, text)
                case ast.Dict(keys=keys):
                    for key in keys:
                        if isinstance(key, ast.Constant) and str(key.value).startswith("rose_"):
                            yield Family(daemon, "gauge", str(key.value), "")


def _family(daemon: str, kind: str, first: ast.expr, rest: list[ast.expr]) -> Iterator[Family]:
    match first:
        case ast.Constant(value=str(name)):
            pattern = name
        case ast.JoinedStr(values=parts):
            pattern = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "[a-z_]+" for part in parts
            )
        case _:
            return  # a name from a table, which is found as a pair of strings
    if not pattern.startswith("rose_"):
        return
    text = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
    suffix = "_total" if kind == "counter" and not pattern.endswith("_total") else ""
    yield Family(daemon, kind, pattern + suffix, str(text))


def listing(documented: frozenset[str]) -> str:
    """A table of those that `documented` does not name."""
    rows = [
        f"| `{each.name}` | {each.daemon} | {each.kind} | {each.text} |"
        for each in families()
        if not any(each.matches(name) for name in documented)
    ]
    if not rows:
        return "None."
    return "\n".join(["| name | daemon | type | |", "|---|---|---|---|", *dict.fromkeys(rows)])
