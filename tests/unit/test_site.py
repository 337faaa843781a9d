"""The site of docs/: what the code fills in is complete, and MkDocs, where it is, builds it strictly."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from rose.cli.main import app
from rose.core.lifecycle import ReplicaState
from rose.core.membership import NodeState
from rose.core.memory import MemoryState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "site"))
    return {name: importlib.import_module(name) for name in ("diagrams", "reference", "hooks")}


def test_diagrams_show_every_state_and_no_way_that_the_machine_does_not_go(
    tools: dict[str, ModuleType],
) -> None:
    diagrams = tools["diagrams"]

    def states(name: str) -> set[str]:
        return {state for start, _, end in diagrams.DIAGRAMS[name]() for state in (start, end)}

    assert states("engine") == {"stopped", "starting", "running", "stopping", "backoff"}
    assert states("replica") == {state.value for state in ReplicaState}
    assert states("node") == {state.value for state in NodeState}
    assert states("memory") == {state.value for state in MemoryState}
    ways = {(start, end) for start, _, end in diagrams.DIAGRAMS["engine"]()}
    assert ("starting", "running") in ways
    assert ("stopping", "running") not in ways


def test_the_reference_names_every_key_and_command(tools: dict[str, ModuleType]) -> None:
    text = tools["reference"].config()
    for key in ("`tick_ms`", "`tokens_dir`", "`ttft_slo_ms`", "[[replicas]]"):
        assert key in text
    commands = tools["reference"].cli()
    names = get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert len(names) > 10
    assert not [name for name in names if f"## rose {name}\n" not in commands]
    assert "rose weights pull" in commands


def test_every_mark_of_a_page_is_filled_in(tools: dict[str, ModuleType]) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert "<!-- diagram:" not in tools["hooks"].on_page_markdown(page.read_text(encoding="utf-8"))


def test_mkdocs_builds_it_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("needs requirements/docs.txt; `make docs` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference-cli.html").is_file()
