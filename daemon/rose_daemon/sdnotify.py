"""What passes between us and systemd, in a few lines: sd_notify(3) and the socket of sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from rose.errors import ConfigError

_LISTEN_FDS_START = 3


def notify(state: str) -> bool:
    """Send `state` (such as `READY=1`) to the service manager; False when there is none, or it is too busy.

    Never waits: a service manager that does not read would hold up the loop that renews the gates.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.sendto(state.encode(), address)
        return True
    return False


def supervised() -> bool:
    """Whether a service manager wants to be told."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def watchdog_period_s() -> float | None:
    """How often to send `WATCHDOG=1`: half of what systemd allows; None when it does not watch."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    return int(limit_us) / 2e6 if limit_us.isdigit() and int(limit_us) > 0 else None


def inherited_socket(path: Path) -> socket.socket | None:
    """The unix socket on `path` that the service manager listens on for us (sd_listen_fds(3)), if it does.

    Raises ConfigError where it listens on something else.  What it said stands in no child's environment.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return None
    held = [socket.socket(fileno=_LISTEN_FDS_START + number) for number in range(int(count))]
    for each in held:
        each.set_inheritable(False)
    ours = [each for each in held if each.family == socket.AF_UNIX and each.getsockname() == str(path)]
    if held and not ours:
        raise ConfigError(
            f"the service manager listens on {held[0].getsockname()}, and not on {path}",
            "ListenStream= of rosed.socket must be node.control_socket: `rose install rosed --socket` anew",
        )
    return ours[0] if ours else None
