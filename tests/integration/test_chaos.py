"""A short `make chaos`: one killed scheduler, one killed engine, one killed rosed, under load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "chaos"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"chaos_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"chaos_{name}", module)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_lost_while_processes_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load("run", monkeypatch)
    faults = ("scheduler killed", "engine or warden killed", "rosed killed")
    fell = run.chaos(seconds=5, seed=1, hosts=2, agents=4, faults=faults)
    assert sum(fell.values()) >= 1


def test_the_soak_sees_what_grows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = load("soak", monkeypatch)
    flat = [soak.Sample((100 << 20) + (n % 7) * 4096, 50 + n % 3, 8) for n in range(90)]
    assert soak.growth(flat) == []
    warming = [soak.Sample(min(n, 20) << 20, 50, 8) for n in range(90)]
    assert soak.growth(warming) == []
    for leak in (
        [soak.Sample((100 << 20) + n * (1 << 20), 50, 8) for n in range(90)],
        [soak.Sample(100 << 20, 50 + n, 8) for n in range(90)],
        [soak.Sample(100 << 20, 50, 8 + n) for n in range(90)],
    ):
        assert len(soak.growth(leak)) == 1
