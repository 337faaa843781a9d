"""`rose man` and `rose completion`: manual page and completion of shells, made from the commands themselves.

Completion is a script with all words in it, so that a press of TAB starts no Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from rose import __version__
from rose.errors import RoseError

man_app = typer.Typer(rich_markup_mode=None, add_completion=False)
completion_app = typer.Typer(rich_markup_mode=None, add_completion=False)

_WIDTH = 80

EXIT_CODES = (
    (0, "done"),
    (1, "failed"),
    (2, "wrong usage or configuration"),
    (3, "not ready"),
    (4, "not found"),
    (5, "serving budget broken"),
    (6, "version conflict"),
    (7, "timed out"),
    (130, "interrupted"),
)
_FILES = (
    ("/etc/rose/rose.toml", "configuration, after $ROSE_CONFIG and ./rose.toml"),
    ("/etc/rose/rose.env", "environment of the services"),
    ("/var/lib/rose", "state of the daemons"),
    ("/dev/shm/rose", "boards that engines and rosed share"),
)


class Shell(StrEnum):
    """Shells that there is completion for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


class Page(NamedTuple):
    """What a command says of itself."""

    path: str
    """Such as `rose weights push`."""
    help: str
    words: tuple[str, ...]
    """What may stand after it: commands, options, values of arguments."""
    values: tuple[tuple[str, tuple[str, ...]], ...]
    """Options that take one of some words."""


def pages() -> list[Page]:
    """Every command that can be loaded here, `rose` first."""
    from rose.cli.main import app  # noqa: PLC0415 (it lists this module among the commands)

    root = get_command(app)
    return list(_walk("rose", root, root.context_class(root, info_name="rose", terminal_width=_WIDTH)))


def _walk(path: str, command: Any, context: Any) -> Iterator[Page]:
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    words, values = list(names), []
    for parameter in command.get_params(context):
        offered = parameter.shell_complete(context, "")
        choices = tuple(item.value for item in offered if item.type == "plain" and item.value)
        if parameter.param_type_name == "argument":
            words += choices
        else:
            flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--")]
            words += flags
            values += [(flag, choices) for flag in flags if choices]
    yield Page(path, command.get_help(context), tuple(words), tuple(values))
    for name in names:
        try:
            below = command.get_command(context, name)
        except RoseError:  # it needs a library that is not installed
            continue
        inside = below.context_class(below, info_name=name, parent=context, terminal_width=_WIDTH)
        yield from _walk(f"{path} {name}", below, inside)


# ---- the manual page ------------------------------------------------------------------------------


@man_app.command()
def man() -> None:
    """Print the manual page: `rose man | man -l -`."""
    print(manual(pages()), end="")


def manual(found: list[Page]) -> str:
    """The page rose(1), for man."""
    root, *commands = found
    lines = [
        f'.TH ROSE 1 "" "ROSE {__version__}" "User Commands"',
        ".SH NAME",
        "rose, rosed \\- agentic\\-RL rollouts on serving GPUs, without hurting the serving SLO",
        ".SH SYNOPSIS",
        ".B rose",
        ".I COMMAND",
        "[\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...",
        ".br",
        ".B rosed",
        "[\\fB\\-\\-config\\fR \\fIFILE\\fR] [\\fB\\-\\-check\\fR]",
        ".SH DESCRIPTION",
        *_literal(root.help),
        ".SH COMMANDS",
    ]
    for page in commands:
        lines += [f".SS {_plain(page.path)}", *_literal(page.help)]
    lines.append(".SH EXIT STATUS")
    for code, text in EXIT_CODES:
        lines += [".TP", f".B {code}", _plain(text)]
    lines.append(".SH FILES")
    for path, text in _FILES:
        lines += [".TP", f".I {_plain(path)}", _plain(text)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        ".B ROSE_CONFIG",
        _plain("the rose.toml to read"),
        ".TP",
        ".BI ROSE_ SECTION __ KEY",
        _plain("a key of rose.toml"),
        ".TP",
        ".B NO_COLOR",
        _plain("print without colours"),
    ]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> list[str]:
    """Text as it stands."""
    return [".nf", *(_plain(line) for line in text.strip("\n").splitlines()), ".fi"]


def _plain(text: str) -> str:
    """A line without meaning to troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


# ---- completion -----------------------------------------------------------------------------------


@completion_app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="For which shell.")]) -> None:
    """Print the completion of a shell: `source <(rose completion bash)`."""
    print(script(shell, pages()), end="")


def script(shell: Shell, found: list[Page]) -> str:
    """The completion of a shell."""
    table = {page.path: page.words for page in found}
    table |= {f"{page.path} {flag}": words for page in found for flag, words in page.values}
    if shell is Shell.fish:
        rows = [f'        case "{key}"\n            printf "%s\\n" {" ".join(table[key])}' for key in table]
        return _FISH.replace("ROWS", "\n".join(rows))
    rows = [f'        "{key}") echo "{" ".join(table[key])}" ;;' for key in table]
    begin = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if shell is Shell.zsh else ""
    return begin + _BASH.replace("ROWS", "\n".join(rows))


_BASH = """\
_rose_words() {
    case "$1" in
ROWS
        *) return 1 ;;
    esac
}

_rose() {
    local word path=rose current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[$((COMP_CWORD - 1))]}"
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
        case "$word" in
            -*) ;;
            *) if _rose_words "$path $word" >/dev/null; then path="$path $word"; fi ;;
        esac
    done
    case "$before" in
        -*) if _rose_words "$path $before" >/dev/null; then path="$path $before"; fi ;;
    esac
    COMPREPLY=($(compgen -W "$(_rose_words "$path")" -- "$current"))
}

complete -o default -F _rose rose
"""

_FISH = """\
function __rose_words
    switch "$argv"
ROWS
        case '*'
            return 1
    end
end

function __rose_complete
    set -l path rose
    set -l words (commandline -opc)
    for word in $words[2..-1]
        if not string match -q -- '-*' $word; and __rose_words "$path $word" >/dev/null
            set path "$path $word"
        end
    end
    if string match -q -- '-*' $words[-1]; and __rose_words "$path $words[-1]" >/dev/null
        set path "$path $words[-1]"
    end
    __rose_words $path
end

complete -c rose -a '(__rose_complete)'
"""
