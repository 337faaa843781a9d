"""Hooks of MkDocs: the order of the pages, and what the code says itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import diagrams
import metric_names
import reference

_MARK = re.compile(r"^<!-- (diagram|reference): (\w+) -->$", re.MULTILINE)
_SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("index", "tutorial", "gpu-host", "kubernetes"),
    "Run": ("operate", "tune", "security", "metrics", "traces", "doctor", "slo", "lending"),
    "Use": ("api", "integrate", "weights", "relay", "simulator"),
    "Understand": ("concepts", "gate", "kv-memory", "faults", "delta-format", "vllm-internals"),
    "Look up": ("reference-config", "reference-cli"),
}
"""Pages that are not named here come last, under the heading of their folder."""


def on_config(config: Any) -> Any:
    """Order the pages that there are."""
    docs = Path(config["docs_dir"])
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    nav: list[dict[str, Any]] = []
    for title, names in _SECTIONS.items():
        nav.append({title: [f"{name}.md" for name in names if name in pages]})
        pages -= set(names)
    for title, wanted in (("Measured", "bench-"), ("Decisions", "adr/"), ("More", "")):
        found = sorted(name for name in pages if name.startswith(wanted))
        pages -= set(found)
        if found:
            nav.append({title: [f"{name}.md" for name in found]})
    config["nav"] = nav
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page leaves to the code.  Raises KeyError for what nobody makes."""
    return _MARK.sub(lambda mark: _made(mark, markdown), markdown)


def _made(mark: re.Match[str], page: str) -> str:
    kind, name = mark.groups()
    if name == "metrics":
        return metric_names.listing(frozenset(re.findall(r"^\| `(rose_\w+)`", page, re.MULTILINE)))
    if kind == "diagram":
        return diagrams.mermaid(diagrams.DIAGRAMS[name]())
    return {"config": reference.config, "cli": reference.cli}[name]()
