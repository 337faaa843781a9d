"""`rose sim` as a user meets it: reports, tables, pages, and what goes wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rose_sim import reproduce as reproduction
from rose_sim.command import app
from rose_sim.html import reproduction_page
from rose_sim.reports import show_reproduction
from rose_sim.risk import Lateness, Risk
from rose_sim.systems import SYSTEMS
from rose_sim.whatif import Question, answer
from rose_sim.world import World
from typer.testing import CliRunner

from rose.errors import ConfigError

runner = CliRunner()

SCENARIO = """
name = "tiny"
systems = ["rose", "roll"]
[serving]
model = "Qwen2.5-7B"
gpus = 2
ttft_ms = 500
tpot_ms = 150
rate_rps = 0.5
[rollout]
model = "Qwen3-8B"
dedicated_gpus = 1
borrowed_gpus_max = 2
[rl]
groups = 2
group_size = 8
steps = 1
train_s = 5
[trajectories]
turns_median = 3
turns_sigma = 0.4
turns_max = 6
prompt_tokens = 500
response_median = 60
response_sigma = 0.5
observation_median = 40
env_s_median = 0.5
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    return path


def test_a_run_reports_the_stable_keys_and_draws_a_page_of_its_own(scenario: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    result = runner.invoke(app, ["run", str(scenario), "--json", str(report), "--html", str(page)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert {"schema", "command", "systems", "wall_s", "events"} <= found.keys()
    assert set(found["systems"]) == {"rose", "roll"}
    for system in found["systems"].values():
        keys = {"throughput", "rollout_s", "ttft_ms", "tpot_ms", "slo_ok", "allocation_overhead"}
        assert keys <= system.keys()
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text


def test_the_same_run_twice_differs_in_costs_only(scenario: Path) -> None:
    def report() -> dict[str, object]:
        result = runner.invoke(app, ["run", str(scenario), "--json", "-"])
        found = json.loads(result.stdout)
        return {key: value for key, value in found.items() if key not in {"wall_s", "peak_rss_bytes"}}

    assert report() == report()


def test_single_steps_give_the_same_systems(scenario: Path) -> None:
    def systems(*options: str) -> dict[str, dict[str, object]]:
        found = json.loads(runner.invoke(app, ["run", str(scenario), "--json", "-", *options]).stdout)[
            "systems"
        ]
        return {name: {**each, "events": 0} for name, each in found.items()}

    assert systems() == systems("--single-steps")


def test_an_unknown_system_is_refused_before_anything_runs(scenario: Path) -> None:
    result = runner.invoke(app, ["run", str(scenario), "--system", "nothing"])
    assert isinstance(result.exception, ConfigError)
    assert "nothing" in result.exception.what


def test_whatif_answers_hours_risk_and_advice(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = "".join(f"2024-05-10 00:{at // 60:02d}:{at % 60:02d}+00:00,800,40\n" for at in range(0, 360, 2))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    report = tmp_path / "w.json"
    arguments = [
        "whatif", "--trace", str(trace), "--gpus", "2", "--gpu-type", "H100", "--serving-model", "Qwen2.5-7B",
        "--rollout-model", "Qwen3-8B", "--ttft-ms", "500", "--tpot-ms", "100", "--hours", "0.1",
    ]  # fmt: skip
    result = runner.invoke(app, [*arguments, "--json", str(report)])
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(report.read_text())
    assert found["rollout_tokens_per_s"] > 100
    assert 0 < found["lendable_gpu_hours"] < 0.2
    low, high = found["slo"]["broken_share_ci"]
    assert 0 <= low <= found["slo"]["broken_share"] <= high < 0.1
    assert found["slo"]["requests"] >= 175
    assert found["recommended"]["n_serving"] == 2
    assert [each["token_cap"] for each in found["candidates"]] == found["searched"]["token_cap"]
    chosen = found["recommended"]["token_cap"]
    most = max(each["rollout_tokens_per_s"] for each in found["candidates"] if each["meets"])
    (candidate,) = [each for each in found["candidates"] if each["token_cap"] == chosen]
    assert candidate["rollout_tokens_per_s"] >= 0.995 * most
    assert any("requests show nothing below" in note for note in found["notes"])
    for caps in ("0", "many", ""):
        refused = runner.invoke(app, [*arguments, "--caps", caps])
        assert isinstance(refused.exception, ConfigError)
    refused = runner.invoke(app, [*arguments, "--rate", "50"])
    assert isinstance(refused.exception, ConfigError)
    too_large = ["Qwen2.5-32B" if one == "Qwen2.5-7B" else one for one in arguments]
    refused = runner.invoke(app, too_large)
    assert isinstance(refused.exception, ConfigError)
    assert "fits no engine" in refused.exception.what
    trace.write_text(f"{trace.read_text()}2024-05-10 00:05:59+00:00,9000000,40\n")
    refused = runner.invoke(app, arguments)
    assert isinstance(refused.exception, ConfigError)
    assert "9000000 + 40 tokens fits no engine" in refused.exception.what


def test_whatif_lends_less_where_lending_breaks_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First by a smaller cap, then by fewer GPUs, and in the end not at all."""
    trace = tmp_path / "azure.csv"
    rows = "".join(f"2024-05-10 00:{at // 60:02d}:{at % 60:02d}+00:00,800,40\n" for at in range(0, 360, 2))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    harm: dict[tuple[int, int], float] = {}

    def added(beside: Lateness, alone: Lateness, seed: int) -> Risk:
        world = worlds[-1].scenario.rollout
        high = harm.get((world.token_cap, world.borrowed_gpus_max), 0.5)
        return Risk(high / 2, 0.0, high)

    worlds: list[World] = []

    class Watched(World):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            worlds.append(self)

    monkeypatch.setattr("rose_sim.whatif.World", Watched)
    monkeypatch.setattr("rose_sim.whatif.added_share", added)
    question = Question(
        trace=trace, gpus=4, gpu="H100", tp=1, serving_model="Qwen2.5-7B", rollout_model="Qwen3-8B",
        ttft_ms=500, tpot_ms=100, rate_rps=None, hours=0.1, seed=1, caps=(128, 512), risk=0.05,
    )  # fmt: skip

    def advice() -> tuple[int, int]:
        found = answer(question)["recommended"]
        return found["token_cap"], found["n_serving"]

    harm[128, 4] = 0.01
    assert advice() == (128, 4)
    harm[128, 4], harm[128, 2] = 0.2, 0.01
    assert advice() == (128, 2)
    harm[128, 2] = 0.2
    assert advice()[1] == 0


@pytest.mark.parametrize("option", ["--json", "--html", "--png"])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    scenario: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_sim.reports.run_report", None)  # not called
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, ["run", str(scenario), option, str(tmp_path / "file" / "report")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in result.exception.what


def test_a_sweep_runs_all_combinations_in_order(scenario: Path) -> None:
    vary = ["--vary", "serving.rate_rps=0.2,0.4", "--vary", "rl.group_size=4,8", "--json", "-"]
    result = runner.invoke(app, ["sweep", str(scenario), *vary])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads(result.stdout[result.stdout.index("{") :])["rows"]
    assert len(rows) == 8
    assert [row["settings"]["serving.rate_rps"] for row in rows] == ["0.2"] * 4 + ["0.4"] * 4
    for bad in ("serving.rate_rps", "serving.rate_rps=", "=1"):
        assert isinstance(runner.invoke(app, ["sweep", str(scenario), "--vary", bad]).exception, ConfigError)


def test_systems_are_listed_with_their_sources() -> None:
    text = runner.invoke(app, ["systems"]).stdout
    for name, system in SYSTEMS.items():
        assert name in text
        assert system.source in text


def test_every_number_of_the_paper_s_scenarios_is_published_fitted_or_assumed() -> None:
    """And which it is, is said: nothing that rows depend on goes unnamed."""
    published = {
        "serving.gpus", "serving.tp", "serving.ttft_ms", "serving.tpot_ms", "rollout.tp",
        "rollout.dedicated_gpus", "rollout.borrowed_gpus_max", "rl.groups", "rl.group_size",
        "rl.training_gpus",
    }  # fmt: skip
    for model in ("8b", "32b"):
        text = (reproduction.SCENARIOS / f"paper-{model}.toml").read_text(encoding="utf-8")
        for table, keys in tomllib.loads(text).items():
            if not isinstance(keys, dict):
                continue
            numbers = {f"{table}.{key}" for key, value in keys.items() if isinstance(value, (int, float))}
            assert numbers <= published | set(reproduction.FITTED) | set(reproduction.ASSUMED)


def test_processes_share_the_sensitivity_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = reproduction.read(Path(__file__).with_name("tiny.toml"))
    monkeypatch.setattr(reproduction, "scenario", lambda model: tiny)
    monkeypatch.setattr(reproduction, "FITTED", ("serving.rate_rps",))
    assert reproduction._sensitivity(1, workers=2) == reproduction._sensitivity(1, workers=1)


def test_reproduction_marks_misses_and_fails_on_hard_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report from a few fast runs in place of the paper's: form, not figures."""
    monkeypatch.setattr(
        reproduction, "scenario", lambda model: reproduction.read(Path(__file__).with_name("tiny.toml"))
    )
    report = reproduction.reproduction(sensitivity=True)
    kinds = {row["kind"] for row in report["rows"]}
    assert kinds == {"hard", "soft", "fitted"}
    assert report["ok"] == all(row["ok"] for row in report["rows"] if row["kind"] == "hard")
    assert all({"name", "target", "value", "tolerance", "kind", "ok"} <= row.keys() for row in report["rows"])
    assert len({row["name"] for row in report["rows"]}) == len(report["rows"])
    assert len(report["fitted"]) == 2 * len(reproduction.FITTED)
    assert {row["input"] for row in report["sensitivity"]} == set(reproduction.FITTED)
    assert {name.partition(": ")[2] for name in report["assumed"]} > set(reproduction.ASSUMED)
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as shown:
        show_reproduction(report, console)
    assert "Fitted inputs" in shown.get()
    assert "MISS" in reproduction_page(report)
    assert isinstance(app, typer.Typer)
