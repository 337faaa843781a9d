"""What a service manager is told, and when: ready once the daemon's own probes pass, alive from its own loop,
reloading on SIGHUP.  Without a service manager all of it does nothing."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import aiohttp
import structlog

from rose.errors import RoseError
from rose_daemon import sdnotify

_PROBE_TIMEOUT_S = 5.0
_PROBE_PAUSE_S = 0.1
_PATIENCE_S = 10.0
"""After so long without a probe that passed, the log says what is waited for."""

log = structlog.get_logger("rose.service")


class Heartbeat:
    """WATCHDOG=1, twice in the time that the service manager allows.

    `beat` belongs into the loop that does the daemon's work: if that hangs, nobody beats.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._period_s = sdnotify.watchdog_period_s()
        self._due_s = clock_s()

    def beat(self) -> None:
        """The loop is alive."""
        if self._period_s is not None and (now_s := self._clock_s()) >= self._due_s:
            sdnotify.notify("WATCHDOG=1")
            self._due_s = now_s + self._period_s


async def announce(probe: Callable[[], Awaitable[str]]) -> None:
    """Send READY=1 once `probe` answers "": until then it says what is not ready yet."""
    patience_s = time.monotonic() + _PATIENCE_S
    while True:
        fault = await probe()
        if not fault and (sdnotify.notify("READY=1") or not sdnotify.supervised()):
            return
        if fault and time.monotonic() >= patience_s:
            log.warning("not ready yet", code="not_ready", text=fault)
            patience_s = time.monotonic() + _PATIENCE_S
        await asyncio.sleep(_PROBE_PAUSE_S)


async def probe_http(url: str) -> str:
    """Ask a server of this very process for its health; "" if it answers 200."""
    # Our own port on our own host: there is nobody to be mistaken for, and nothing is told.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, ssl=context) as answer:
            return "" if answer.status == 200 else f"{url} answers {answer.status}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"{url}: {error!r}"


def reachable(host: str) -> str:
    """An address by which this host reaches what listens on `host`, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def on_reload(reload: Callable[[], Sequence[str]]) -> None:
    """Call `reload` on SIGHUP, in the running loop.

    It answers the keys whose new values need a restart; it raises RoseError, having changed nothing, for
    settings that are not usable.
    """

    def act() -> None:
        sdnotify.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            waiting = reload()
        except RoseError as error:
            log.error("settings are kept as they were", code="reload_refused", error=str(error))
        else:
            log.info("settings were read again", code="reloaded", needs_restart=", ".join(waiting))
        sdnotify.notify("READY=1")

    with suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)
