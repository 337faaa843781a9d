"""What has to hold for the repository as a whole: packaging, pins, layering at run time, no leftovers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from rose import config
from rose.cli.main import app
from rose.engines.vllm.launch import serving_command
from rose.engines.vllm.settings import PluginSettings

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rose", "daemon/rose_daemon", "kernels/rose_kernels", "sim/rose_sim")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULE_LINES_MAX = 450
"""About 400 is the aim; beyond this a module has more than one purpose."""
HEAVY = {"torch", "vllm", "transformers", "gymnasium", "openai", "scipy", "matplotlib"}

_TEXT = {".py", ".md", ".toml", ".txt", ".in", ".sh", ".service", ".cfg", ".yml", ".yaml", ""}
# Written in two halves, so that this file does not contain what it looks for.
_FORBIDDEN = [
    "/wo" + "rk/main",
    "/wo" + "rk/shared",
    "find-" + "links =",
    "files.python" + "hosted",
    "T" + "ODO",
    "FIX" + "ME",
]


def sources() -> list[Path]:
    """Modules of the four packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def tracked_texts() -> list[Path]:
    """Text files under version control, or of an unpacked archive where there is none."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and path.suffix in _TEXT]


def pins(name: str) -> dict[str, list[str]]:
    """Package -> hashes, of a locked requirements file; fails on a line that is neither."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        text = line.rstrip("\\").strip()
        if not text or text.startswith("#"):
            continue
        if digest := re.fullmatch(r"--hash=sha256:([0-9a-f]{64})", text):
            found[current].append(digest[1])
        else:
            pin = re.fullmatch(r"([A-Za-z0-9._-]+)==[^\s*]+", text)
            assert pin, f"{name}: {text!r} is not an exact pin"
            current = normal(pin[1])
            assert current not in found, f"{name}: {current} is pinned twice"
            found[current] = []
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_by(*argv: str) -> set[str]:
    """Heavy packages that a run of `rose` with these arguments has imported by its end."""
    code = (
        "import sys\n"
        "from rose.cli.main import main\n"
        f"sys.argv = {['rose', *argv]!r}\n"
        "try:\n    main()\n"
        "finally:\n    print('MODULES', *sorted(sys.modules), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    line = next((text for text in result.stderr.splitlines() if text.startswith("MODULES ")), None)
    assert line is not None, result.stderr
    return {module.partition(".")[0] for module in line.split()} & HEAVY


def test_distribution_is_installed_under_its_name_and_version() -> None:
    metadata = importlib.metadata.metadata("rose-coserve")
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"gpu", "mooncake", "demo", "dev"} <= set(metadata.get_all("Provides-Extra") or [])


@pytest.mark.parametrize("package", ["rose", "rose_daemon", "rose_kernels", "rose_sim"])
def test_each_package_is_found_where_it_lies(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert ROOT in Path(spec.origin).resolve().parents


def test_no_folder_is_a_package_that_shadows_an_installed_one() -> None:
    assert not [name for name in ("daemon", "kernels", "sim") if (ROOT / name / "__init__.py").exists()]


@pytest.mark.parametrize(
    "entry",
    [
        entry
        for group in ("console_scripts", "rose.commands", "vllm.general_plugins", "vllm.endpoint_plugins")
        for entry in importlib.metadata.entry_points(group=group)
        if entry.dist is not None and entry.dist.name == "rose-coserve"
    ],
    ids=lambda entry: f"{entry.group}:{entry.name}",
)
def test_entry_point_resolves(entry: importlib.metadata.EntryPoint) -> None:
    assert callable(entry.load())


def test_every_entry_point_of_the_project_is_installed() -> None:
    installed = {
        (entry.group, entry.name, entry.value)
        for entry in importlib.metadata.distribution("rose-coserve").entry_points
    }
    declared = {("console_scripts", name, value) for name, value in PROJECT["scripts"].items()} | {
        (group, name, value)
        for group, entries in PROJECT["entry-points"].items()
        for name, value in entries.items()
    }
    assert installed == declared, "run `make install`: pyproject.toml has changed"


@pytest.mark.parametrize("argv", [["--help"], ["status", "--help"], ["init", "--stdout"]], ids=" ".join)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    assert imported_by(*argv) == set()


def test_help_names_the_commands_of_the_daemon_package() -> None:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "rose.cli.main", "--help"],
        check=False, capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    missing = [name for name in PROJECT["entry-points"]["rose.commands"] if name not in result.stdout]
    assert not missing


@pytest.mark.parametrize("name", ["cpu", "dev", "docs", "audit", "mooncake"])
def test_locked_requirements_match_their_source_and_carry_hashes(name: str) -> None:
    locked = pins(f"{name}.txt")
    assert list(locked) == list(pins(f"{name}.in")), "run `make lock`"
    assert not [package for package, hashes in locked.items() if not hashes]


def test_torch_is_pinned_to_the_cpu_build_and_nowhere_else() -> None:
    lines = (ROOT / "requirements/torch.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0+cpu"]
    broken_beside_it = {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert not broken_beside_it & (set(pins("cpu.txt")) | set(pins("dev.txt")))


def test_every_dependency_of_the_project_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["demo"] + extras["plot"] + extras["otel"]
    names = {normal(re.split(r"[<>=!~\[ ]", text, maxsplit=1)[0]) for text in wanted}
    assert names <= set(pins("cpu.txt"))
    tools = {
        normal(re.split(r"[<>=!~\[ ]", text, maxsplit=1)[0])
        for text in PROJECT["optional-dependencies"]["dev"]
    }
    assert tools <= set(pins("dev.txt"))
    (mooncake,) = PROJECT["optional-dependencies"]["mooncake"]
    assert mooncake in (ROOT / "requirements/mooncake.in").read_text(encoding="utf-8").splitlines()


def test_modules_stay_short() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()
    }
    assert not {str(path): lines for path, lines in lengths.items() if lines > MODULE_LINES_MAX}


def test_nothing_of_a_development_machine_is_left_in_the_files() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in tracked_texts()
        for text in _FORBIDDEN
        if text in path.read_text(encoding="utf-8")
    ]
    assert not found


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    source = ROOT / page
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", source.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (source.parent / target).exists()]


def test_the_configuration_in_the_readme_is_accepted() -> None:
    blocks = re.findall(
        r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert blocks
    for block in blocks:
        config.build(tomllib.loads(block), "README.md")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_serving_engine_in_the_readme_is_the_one_rose_would_start(device: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    environ = dict(re.findall(r"(ROSE_ENGINE_\w+)=(\S+)", text))
    settings = PluginSettings.from_environ(environ)
    assert settings is not None
    command = serving_command(
        model="m", port=1, run_dir=settings.run_dir, token_file=settings.token_file, device=device
    )
    assert PluginSettings.from_environ(command.env) == settings
    for option in ("--scheduler-cls", "--worker-cls"):
        assert command.argv[command.argv.index(option) + 1].rpartition(".")[2] in text


def test_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = get_command(app).list_commands(None)
    assert not [name for name in commands if f"rose {name}" not in text]


def test_readme_names_every_make_target_a_newcomer_needs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert {"demo", "test", "check", "fmt", "bench", "gpu-check"} <= targets
    mentioned = set(re.findall(r"`?make ([a-z][a-z-]*)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert mentioned <= targets
