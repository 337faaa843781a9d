"""CURVE on the control plane: nobody listens in, and a node speaks for itself alone.

Keys are files of one directory, `scheduler.curve_dir`, made by `rose keys`:

    scheduler's host:  scheduler.key_secret, and nodes/<node id>.key of every node that may connect
    a node's host:     node.key_secret, and scheduler.key

Secret keys must not be readable by others.  A node's public key is known by the node's id, so that no node
can report, or take leases, in the name of another.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import structlog
import zmq
import zmq.asyncio
from zmq import auth
from zmq.auth.asyncio import AsyncioAuthenticator

from rose.config_rules import is_loopback
from rose.errors import ConfigError
from rose.secret import refuse_open

SCHEDULER = "scheduler"
NODE = "node"
NODES_DIR = "nodes"
_HINT = "make it with `rose keys`, see docs/security.md"

log = structlog.get_logger("rose.curve")


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Write `<name>.key` and `<name>.key_secret` (mode 0600).  Raises ConfigError."""
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} is there already", "move it away to make a new one")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret.touch(mode=0o600)
        auth.create_certificates(directory, name)
        if name == SCHEDULER:
            (directory / NODES_DIR).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: keys cannot be written: {error.strerror}") from None
    return public, secret


def require_private(address: str, curve_dir: str) -> None:
    """Refuse a control address that other hosts can reach without CURVE.  Raises ConfigError."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and parts.path:
        return
    try:
        usable = parts.scheme == "tcp" and parts.port is not None
        private = is_loopback(parts.hostname or "")
    except ValueError:
        usable = private = False
    if not usable:
        raise ConfigError(
            f"scheduler.control: {address!r} is not a ZMQ address", "such as tcp://127.0.0.1:7701"
        )
    if not private and not curve_dir:
        raise ConfigError(
            f"scheduler.control: {address!r} is not a loopback address", "set scheduler.curve_dir; " + _HINT
        )


class Nodes:
    """The scheduler's side: only nodes whose public keys are in `<directory>/nodes` are let in."""

    def __init__(self, directory: Path, context: zmq.asyncio.Context) -> None:
        self._directory = directory / NODES_DIR
        self._pair = _secret(directory, SCHEDULER)
        self._authenticator = AsyncioAuthenticator(context)
        self._ids: dict[str, str] = {}
        self._listed: frozenset[tuple[str, int]] = frozenset()

    def secure(self, socket: zmq.asyncio.Socket) -> None:
        """To be called before `bind`, in a running event loop.  Raises ConfigError."""
        self._authenticator.start()
        self.refresh()
        socket.curve_publickey, socket.curve_secretkey = self._pair
        socket.curve_server = True

    def refresh(self) -> None:
        """Read the keys of nodes anew if any came, went or changed.  Raises ConfigError."""
        try:
            files = sorted(self._directory.glob("*.key"))
            listed = frozenset((path.name, path.stat().st_mtime_ns) for path in files)
        except OSError as error:
            raise ConfigError(f"{self._directory} cannot be read: {error.strerror}", _HINT) from None
        if listed == self._listed and self._ids:
            return
        self._listed = listed
        self._ids = {_public(path).decode("ascii"): path.stem for path in files}
        self._authenticator.configure_curve(domain="*", location=str(self._directory))
        log.info("keys of nodes read", code="curve_keys", nodes=len(self._ids))

    def node_of(self, frame: zmq.Frame) -> str | None:
        """Id of the node that sent a message, by the key of its connection."""
        return self._ids.get(str(frame.get("User-Id")))

    def close(self) -> None:
        """Stop answering."""
        self._authenticator.stop()


def secure_node(socket: zmq.asyncio.Socket, directory: Path) -> None:
    """The node's side, to be called before `connect`.  Raises ConfigError."""
    socket.curve_publickey, socket.curve_secretkey = _secret(directory, NODE)
    socket.curve_serverkey = _public(directory / f"{SCHEDULER}.key")


def _secret(directory: Path, name: str) -> tuple[bytes, bytes]:
    path = directory / f"{name}.key_secret"
    try:
        refuse_open(path, path.stat().st_mode, "scheduler.curve_dir")
    except OSError as error:
        raise ConfigError(f"scheduler.curve_dir: {path}: {error.strerror}", _HINT) from None
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"scheduler.curve_dir: {path} holds no secret key", _HINT)
    return public, secret


def _public(path: Path) -> bytes:
    return _load(path)[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"scheduler.curve_dir: {path} is not a key file: {error}", _HINT) from None
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise ConfigError(f"scheduler.curve_dir: {path}: a key is not 40 characters long", _HINT)
    return public, secret
