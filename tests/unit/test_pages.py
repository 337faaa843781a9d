"""What the pages under docs/ claim of the tests, and of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, name in re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        source = ROOT / "tests" / file
        assert source.is_file(), f"{page.name} names {file}"
        assert not name or f"def {name}(" in source.read_text(encoding="utf-8"), (
            f"{page.name}: {file}::{name}"
        )


def test_nothing_is_unpickled() -> None:
    """Unpickling runs code that the sender chose."""
    unsafe = re.compile(
        r"\b(pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load\(|yaml\.load\(|allow_pickle=True"
    )
    sources = [path for top in ("rose", "daemon", "kernels", "sim") for path in (ROOT / top).rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if unsafe.search(path.read_text(encoding="utf-8"))] == []
