"""`rose mps`: what an operator does once to put the serving engine on MPS."""

from __future__ import annotations

import shlex

import typer

from rose import config as configuration
from rose.cli.options import ConfigOption
from rose.engines.vllm.settings import PluginSettings
from rose.errors import ConfigError
from rose_daemon.mps.control import MpsControl, open_control

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def mps() -> None:
    """Share the GPU through NVIDIA MPS: serving and rollout at once, instead of taking turns."""


@app.command()
def env(config: ConfigOption = None) -> None:
    """Print what the serving engine's environment needs: eval it before the engine is started."""
    overlaps = {f"{PluginSettings.PREFIX}OVERLAPS": "1"}  # predict steps that have the device together
    for name, value in (_control(config).plan.serving_environ() | overlaps).items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def start(config: ConfigOption = None) -> None:
    """Start the GPU's own control daemon, as the user that runs serving and rosed, before serving."""
    control = _control(config)
    control.start()
    print(f"MPS runs for {control.plan.uuid} on {control.plan.pipe_directory}")


@app.command()
def stop(config: ConfigOption = None) -> None:
    """Stop it; refused while a process is on it."""
    _control(config).stop()
    print("MPS is stopped")


def _control(config: ConfigOption) -> MpsControl:
    loaded = configuration.load(config)
    if not loaded.mps.enabled:
        raise ConfigError("mps.enabled is false", "set it to true in rose.toml first")
    return open_control(loaded)
