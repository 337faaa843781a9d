"""The manual page and the completion of shells, made from the commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rose.cli import main as cli
from rose.cli.manual import EXIT_CODES, Page, Shell, manual, pages, script
from rose.errors import Exit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> list[Page]:
    return pages()


def test_every_command_is_there_with_what_it_says_of_itself(found: list[Page]) -> None:
    named = {page.path: page for page in found}
    assert {"rose", "rose weights pull", "rose bench coserve", "rose scheduler"} <= set(named)
    assert not [name for name in cli._SUMMARY if f"rose {name}" not in named]
    assert not [page.path for page in found if "Usage: rose" not in page.help]
    assert len(named) == len(found)


def test_the_exit_codes_are_the_same_everywhere() -> None:
    assert [code for code, _ in EXIT_CODES] == [*(code.value for code in Exit), 130]
    for page in ("README.md", "docs/reference-cli.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for code, meaning in EXIT_CODES:
            assert f"{code} {meaning}" in text, page


def test_troff_takes_the_page_without_a_warning(found: list[Page], tmp_path: Path) -> None:
    page = tmp_path / "rose.1"
    page.write_text(manual(found))
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("needs man and groff")
    shown = subprocess.run(
        ["man", "--warnings", "-l", str(page)],
        env={"PATH": "/usr/bin:/bin", "MANWIDTH": "100", "LC_ALL": "C.UTF-8"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert shown.stderr == ""
    plain = re.sub(r".\x08", "", shown.stdout)
    for heading in ("rose weights pull", "EXIT STATUS", "/etc/rose/rose.toml", "ROSE_CONFIG"):
        assert heading in plain
    # What a command says stands there to the letter.
    flat = " ".join(plain.split())
    for each in found:
        assert " ".join(each.help.split()) in flat, each.path


def test_a_line_cannot_order_troff_about() -> None:
    text = manual([Page("rose", ".br\n'so /etc/passwd\n\\fBx-y", (), ())])
    assert "\n\\&.br\n\\&'so /etc/passwd\n\\efBx\\-y\n" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("rose", "st"), "status"),
        (("rose", "weights", "pu"), "pull publish"),
        (("rose", "events", "--level", ""), "info warning error"),
        (("rose", "--version", "lend", "o"), "on off"),
        (("rose", "gate", "replica-1", "c"), "closed"),
        (("rose", "lend", "off", "--r"), "--reset"),
        (("rose", "token", "bob", "s"), "submit"),
        (("rose", "nothing", "x"), ""),
    ],
)
@pytest.mark.parametrize("shell", [Shell.bash, Shell.zsh])
def test_what_completes_a_command(
    found: list[Page], tmp_path: Path, shell: Shell, words: tuple[str, ...], expected: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "rose").write_text(script(shell, found))
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rose; echo "${COMPREPLY[*]}"'
    if shell is Shell.zsh:  # as its bashcompinit has it
        ask = f'ask() {{ emulate -L sh; setopt kshglob noshglob braceexpand ksharrays; {ask}; }}; ask "$@"'
    done = subprocess.run(
        [shell, "-uc", f'source "$0"; {ask}', str(tmp_path / "rose"), *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    offered = [word for word in done.stdout.split() if word.startswith(words[-1])]  # zsh chooses by itself
    assert offered == expected.split()


@pytest.mark.parametrize("shell", [Shell.zsh, Shell.fish])
def test_other_shells_can_read_theirs(found: list[Page], tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / f"rose.{shell}"
    path.write_text(script(shell, found))
    assert "rose weights" in path.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    read = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (read.returncode, read.stderr) == (0, "")
