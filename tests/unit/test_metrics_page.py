"""docs/metrics.md: names that are promised exist, with their types; nothing else is asked for."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
RULES = ROOT / "deploy" / "prometheus" / "rose.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "rose.json"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metric_names", ROOT / "tools" / "site" / "metric_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["metric_names"] = module
    spec.loader.exec_module(module)
    return module


FAMILIES = list(load().families())


def promised() -> dict[str, str]:
    """Name -> type."""
    return dict(re.findall(r"^\| `(rose_\w+)` \| (\w+) \|", PAGE, flags=re.MULTILINE))


def test_every_name_that_is_promised_is_shown_with_its_type() -> None:
    names = promised()
    assert len(names) > 20
    for name, kind in names.items():
        kinds = {each.kind for each in FAMILIES if each.matches(name)}
        assert kinds == {kind}, f"{name}: the sources say {kinds or 'nothing'}, docs/metrics.md says {kind}"


def test_names_say_their_units() -> None:
    for each in FAMILIES:
        assert (each.kind == "counter") == each.pattern.endswith("_total"), each.name
        assert not re.search(r"_(ms|us|ns|kb|mb|mib|gib|percent)(_|$)", each.pattern), each.name


def asked(expression: str) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\brose_\w+", expression)}


def expressions() -> list[str]:
    found = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        found += [target["expr"] for target in panel.get("targets", ())]
    return found


def test_dashboard_and_rules_ask_for_promised_names_only() -> None:
    found = expressions()
    assert len(found) > 15
    for expression in found:
        unknown = asked(expression) - set(promised()) - {"rose_turn_counts"}
        assert not unknown, f"{expression}: docs/metrics.md does not promise {unknown}"
        assert expression.count("(") == expression.count(")"), expression


def test_every_alert_says_what_it_means_and_whom_it_concerns() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "warning")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 30


def test_the_dashboard_is_laid_out_without_overlap() -> None:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_promtool_accepts_the_rules() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("needs promtool, of Debian's package prometheus")
    done = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
