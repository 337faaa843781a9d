"""docs/security.md: every threat has a test, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def threats() -> list[list[str]]:
    table = PAGE.partition("## Threats")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    return [row for row in rows[2:] if len(row) == 3]


def test_every_threat_has_an_answer_and_a_test() -> None:
    rows = threats()
    assert len(rows) > 20
    bare = [
        threat for threat, answer, tests in rows if not answer or not (".py" in tests or "the same" in tests)
    ]
    assert bare == []


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`(\w+/\w+\.py)(?:::(\w+))?`", PAGE)
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / "tests" / file).is_file()
        or (name and f"def {name}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8"))
    ]
    assert missing == []
