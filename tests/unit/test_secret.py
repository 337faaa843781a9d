"""Secrets in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.secret import read_secret


def test_the_text_without_the_line_s_end(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("s3cret\n")
    (tmp_path / "t").chmod(0o600)
    assert read_secret(tmp_path / "t", "x.token_file") == "s3cret"
    (tmp_path / "t").chmod(0o400)
    assert read_secret(str(tmp_path / "t"), "x.token_file") == "s3cret"


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [
        (None, 0, "No such file"),
        (b"", 0o600, "is empty"),
        (b" \n", 0o600, "is empty"),
        ("ünicode".encode(), 0o600, "not ASCII"),
        (b"s3cret", 0o644, "read by others"),
        (b"s3cret", 0o640, "read by others"),
        (b"s3cret", 0o602, "read by others"),
    ],
)
def test_what_is_no_secret(tmp_path: Path, content: bytes | None, mode: int, word: str) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=word) as refusal:
        read_secret(path, "x.token_file")
    assert refusal.value.what.startswith(f"x.token_file: {path}")
