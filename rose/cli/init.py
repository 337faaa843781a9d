"""`rose init`: write a commented `rose.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose.cli.template import render
from rose.config import CONFIG_NAME
from rose.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(CONFIG_NAME),
    stdout: Annotated[bool, typer.Option("--stdout", help="Print it instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented rose.toml that holds every key with its default."""
    text = render()
    if stdout:
        print(text, end="")
        return
    target = path / CONFIG_NAME if path.is_dir() else path
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target} is there already", "--force replaces it") from None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
    print(f"wrote {target}; next: add [[replicas]], then `rosed --check --config {target}`")
