"""sd_notify(3) in a few lines: tell systemd that we are ready, alive, or stopping."""

from __future__ import annotations

import contextlib
import os
import socket


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
