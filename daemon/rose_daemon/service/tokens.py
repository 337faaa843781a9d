"""Who may do what over HTTP: tokens with a scope, read from files that nobody else can read.

    <tokens_dir>/<name>.read      may look: status, jobs, turns' ways; pull weights
    <tokens_dir>/<name>.submit    and use: turns, jobs, steps, exports; publish and delete weights
    <tokens_dir>/<name>.admin     and operate the fleet: drain replicas, register engines

A server keeps digests of the tokens only, and compares a caller's with all of them, so that how long it takes
tells nothing about any.  Files are read at the start and on SIGHUP: to replace a token, add the new one, move
its users over, remove the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

from rose.errors import ConfigError
from rose.secret import read_secret
from rose.weights import files

TOKEN_CHARS_MIN = 16
"""A token in a directory of tokens has at least so many characters."""
_SCHEME = "Bearer "


class Scope(IntEnum):
    """What a token allows; each includes those below it."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3


class _Held(NamedTuple):
    name: str
    scope: Scope
    digest: bytes


class Keyring:
    """The tokens that a server accepts; without any, everybody may do everything."""

    def __init__(self, held: tuple[_Held, ...] = ()) -> None:
        self._held = held

    @classmethod
    def read(cls, section: str, token_file: str, tokens_dir: str) -> Self:
        """The token of `token_file` (scope admin) and those of `tokens_dir`; either may be empty.

        `section` names the settings in errors.  Raises ConfigError.
        """
        held = []
        if token_file:
            token = read_secret(token_file, f"{section}.token_file")
            held.append(_Held("token_file", Scope.ADMIN, _digest(token)))
        if tokens_dir:
            held += _read_directory(Path(tokens_dir), f"{section}.tokens_dir")
        return cls(tuple(held))

    @classmethod
    def of(cls, token: str, scope: Scope = Scope.ADMIN) -> Self:
        """A ring of one token, or of none if it is empty."""
        return cls((_Held("token", scope, _digest(token)),) if token else ())

    def __bool__(self) -> bool:
        return bool(self._held)

    def replace(self, other: Keyring) -> None:
        """Accept what `other` accepts from now on."""
        self._held = other._held

    def scope_of(self, authorization: str) -> Scope | None:
        """The widest scope of the header `Authorization`; None for a token that is not held."""
        if not self._held:
            return Scope.ADMIN
        given = authorization.removeprefix(_SCHEME) if authorization.startswith(_SCHEME) else ""
        digest = _digest(given)
        # No early end: every token is compared, whichever fits.
        fits = [held.scope for held in self._held if hmac.compare_digest(held.digest, digest)]
        return max(fits, default=None)


def make_token(directory: Path, name: str, scope: Scope) -> Path:
    """Write a new token, which belongs to the directory's owner; answers its file.  Raises ConfigError."""
    path = directory / f"{name}.{scope.name.lower()}"
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
        files.give_to_owner(path)
    except FileNotFoundError:
        hint = f"make it, for the daemon's user alone: install -d -m 700 -o rose -g rose {directory}"
        raise ConfigError(f"{directory}: no such directory", hint) from None
    except FileExistsError:
        raise ConfigError(f"{path} is there already", "remove it to make a new one") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _read_directory(directory: Path, what: str) -> list[_Held]:
    try:
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{what}: {directory} cannot be read: {error.strerror}") from None
    scopes = {scope.name.lower(): scope for scope in Scope}
    held = []
    for path in paths:
        name, _, word = path.name.rpartition(".")
        if not name or word not in scopes:
            known = ", ".join(scopes)
            raise ConfigError(f"{what}: {path} ends in no scope", f"NAME.SCOPE, with one of {known}")
        token = read_secret(path, what)
        if len(token) < TOKEN_CHARS_MIN:
            raise ConfigError(
                f"{what}: {path} has fewer than {TOKEN_CHARS_MIN} characters", "make one with `rose token`"
            )
        held.append(_Held(name, scopes[word], _digest(token)))
    if not held:
        raise ConfigError(f"{what}: {directory} holds no token", "make one with `rose token`")
    return held


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
