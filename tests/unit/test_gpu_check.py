"""`make gpu-check` without a GPU: what it says, how checks are kept apart, and those that need none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rose_kernels import shared
from rose_kernels.delta import native

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "gpu"

MODULE = """
import os, subprocess, sys, time
from harness import Check, CheckFailed, Skipped, run_here

def passes(figures):
    print("chatter")
    figures["rate"] = 1234.5678

def skips(figures):
    raise Skipped("needs luck")

def fails(figures):
    figures["so far"] = 3
    raise CheckFailed("1 is not 2")

def crashes(figures):
    raise ZeroDivisionError("by nothing")

def dies(figures):
    os.abort()

def hangs(figures):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid} {os.environ['TMPDIR']}")
    time.sleep(60)

if __name__ == "__main__":
    run_here(Check(sys.argv[1], "", globals()[sys.argv[1]], 1))
"""


@pytest.fixture(scope="module")
def modules() -> Any:
    """The modules of tests/gpu, as `make gpu-check` sees them."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in ("check", "harness", "memory_checks", "sharing_checks")}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def harness(modules: dict[str, ModuleType]) -> Any:
    return modules["harness"]


def outcome_of(harness: Any, tmp_path: Path, name: str, limit_s: float = 30) -> Any:
    script = tmp_path / "some_checks.py"
    script.write_text(MODULE)
    check = harness.Check(name, f"what {name} does", None, limit_s)
    return harness.run_apart(check, [sys.executable, str(script), name], limit_s)


def gpu_check(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "check.py"), *arguments]
    env = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_is_skipped_in_one_line_and_succeeds(tmp_path: Path) -> None:
    done = gpu_check("--json", str(tmp_path / "report.json"))
    assert done.returncode == 0
    assert done.stdout.startswith("gpu-check: skipped, no usable NVIDIA GPU here")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert not (tmp_path / "report.json").exists()


def test_a_name_that_is_no_check_is_a_usage_error() -> None:
    assert gpu_check("--only", "nonsense").returncode == 2


def test_it_takes_eight_minutes_at_most(modules: dict[str, ModuleType]) -> None:
    check = modules["check"]
    assert sum(each.limit_s for each in check.CHECKS) <= check.TOTAL_S <= 480
    assert len({each.name for each in check.CHECKS}) == len(check.CHECKS)


def test_libraries_that_are_missing_are_built_with_a_compiler_alone(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "kernels" / "csrc", tmp_path / "kernels" / "csrc")
    package = tmp_path / "kernels" / "rose_kernels"
    package.mkdir()
    build = modules["check"].build_libraries
    assert build(tmp_path) == ""
    assert shared.load(package / "_rose_shared.so")
    assert native.load(package / "_rose_delta.so")
    assert len(list(package.iterdir())) == 2
    (package / "_rose_delta.so").unlink()
    monkeypatch.setenv("PATH", "")
    assert "_rose_delta was not built" in build(tmp_path)


# ---- checks are kept apart --------------------------------------------------------------------------


def test_a_check_that_passes_brings_its_figures(harness: Any, tmp_path: Path) -> None:
    outcome = outcome_of(harness, tmp_path, "passes")
    assert (outcome.status, outcome.figures, outcome.detail) == ("passed", {"rate": 1234.5678}, "")


def test_a_check_that_cannot_run_says_what_is_missing(harness: Any, tmp_path: Path) -> None:
    outcome = outcome_of(harness, tmp_path, "skips")
    assert (outcome.status, outcome.detail) == ("skipped", "needs luck")


def test_a_check_that_fails_keeps_what_it_measured(harness: Any, tmp_path: Path) -> None:
    outcome = outcome_of(harness, tmp_path, "fails")
    assert (outcome.status, outcome.figures, outcome.detail) == ("failed", {"so far": 3}, "1 is not 2")


def test_a_check_that_breaks_says_why(harness: Any, tmp_path: Path) -> None:
    outcome = outcome_of(harness, tmp_path, "crashes")
    assert (outcome.status, outcome.detail) == ("failed", "ZeroDivisionError: by nothing")


def test_a_check_that_dies_is_a_failure(harness: Any, tmp_path: Path) -> None:
    outcome = outcome_of(harness, tmp_path, "dies")
    assert outcome.status == "failed"
    assert outcome.detail


def test_a_check_that_hangs_is_ended_with_all_it_started(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    outcome = outcome_of(harness, tmp_path, "hangs", limit_s=2)
    assert (outcome.status, outcome.detail) == ("timed out", "not done within 2 s")
    *pids, scratch = (tmp_path / "pids").read_text().split()
    assert not Path(scratch).exists()
    deadline = time.monotonic() + 10
    for pid in pids:
        while running(int(pid)):
            assert time.monotonic() < deadline


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_bad_check_hides_no_other(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    check, harness = modules["check"], modules["harness"]
    names = ("dies", "passes", "skips", "fails")
    monkeypatch.setattr(check, "CHECKS", tuple(harness.Check(name, "", None, 30) for name in names))
    monkeypatch.setattr(check, "devices", lambda: ["GPU 0: NVIDIA Fake, 80 GiB"])
    monkeypatch.setattr(
        check, "run_apart", lambda each, command, limit_s: outcome_of(harness, tmp_path, each.name)
    )
    report = tmp_path / "out" / "report.json"
    assert check.main(["--json", str(report)]) == 1
    said = json.loads(report.read_text())
    assert [each["status"] for each in said["checks"]] == ["failed", "passed", "skipped", "failed"]
    assert said["devices"] == ["GPU 0: NVIDIA Fake, 80 GiB"]
    printed = capsys.readouterr().out
    assert "1,235" in printed
    assert "2 failed, 1 passed, 1 skipped" in printed
    assert check.main(["--json", str(report), "--only", "passes", "--only", "skips"]) == 0


def test_checks_for_which_no_time_is_left_are_named(modules: dict[str, ModuleType]) -> None:
    check, harness = modules["check"], modules["harness"]
    (outcome,) = check.run_all([harness.Check("late", "too late", None, 30)], total_s=0)
    assert (outcome.status, outcome.detail) == ("timed out", "no time was left for it")


def test_the_table_has_a_line_for_each_check_and_each_figure(harness: Any) -> None:
    outcomes = [
        harness.Outcome("arena", "maps", "passed", 1.25, {"ms/GiB": 0.123456, "name": "H200"}, ""),
        harness.Outcome("mps", "shares", "skipped", 0.0, {}, "not installed"),
    ]
    lines = harness.table(outcomes).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["passed", "arena", "1.2", "s", "maps"]
    assert lines[1].split() == ["ms/GiB", "0.1235"]
    assert lines[3].endswith("shares  not installed")


# ---- checks that need no GPU --------------------------------------------------------------------------


def test_every_check_says_plainly_what_it_lacks_here(modules: dict[str, ModuleType]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    skipped = modules["harness"].Skipped
    checks = {each.name: each for each in modules["check"].CHECKS}
    for name in checks.keys() - {"contention", "readings"}:
        with pytest.raises(skipped, match=r"GPU|needs|release|installed"):
            checks[name].run({})


def test_the_ledger_under_contention(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", modules["harness"].environment()["PYTHONPATH"])
    figures: dict[str, float] = {}
    modules["memory_checks"].contention(figures, processes=3, duration_s=0.5)
    assert figures["operations/s"] > 100


def test_two_processes_exchange_the_memory_of_the_host(modules: dict[str, ModuleType]) -> None:
    """The same code as on a GPU, over the CPU's arena."""
    figures: dict[str, float] = {}
    modules["memory_checks"].exchange(figures, device="cpu", size=32 << 20)
    assert figures["GiB in use at the most"] <= 32 / 1024 + 0.5
    assert figures["s to take from a killed process"] > 0


def test_a_rollout_loop_is_gated_by_the_real_board(modules: dict[str, ModuleType]) -> None:
    """The same code as on a GPU, with small matrices on the CPU."""
    pytest.importorskip("torch")
    figures: dict[str, float] = {}
    modules["sharing_checks"].gate(figures, device="cpu", width=128, bursts=1)
    assert figures["rollout tokens/s, gated"] > 0
    assert figures["asking p50 µs"] > 0


def test_the_kernels_of_the_delta_bring_their_own_check(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = modules["sharing_checks"]
    kernels = ModuleType("rose_kernels.delta.cuda")
    kernels.gpu_check = lambda: {"GB/s": 5.0}  # type: ignore[attr-defined]
    monkeypatch.setattr(checks, "need_cuda", lambda: None)
    monkeypatch.setattr(checks, "need", lambda module, package="": kernels)
    figures: dict[str, float] = {}
    checks.delta(figures)
    assert figures == {"GB/s": 5.0}
