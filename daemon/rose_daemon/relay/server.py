"""A relay that listens: its address, its TLS, its token, and the kind of memory it keeps versions in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rose.config import RelayConfig
from rose.config_rules import is_loopback
from rose.errors import ConfigError, NotReady
from rose.units import MIB
from rose.weights.relay.mooncake_store import MooncakeStore
from rose.weights.relay.sockets import Sending
from rose_daemon.relay.arena import ArenaPool
from rose_daemon.relay.handlers import CHUNK_BYTES, EmbeddedHandlers, RelayHandlers
from rose_daemon.relay.mooncake import MooncakeHandlers, MooncakePool
from rose_daemon.relay.pools import HeapPool, MemoryBlock, Pool
from rose_daemon.relay.vault import Vault
from rose_daemon.service.changes import changed_keys
from rose_daemon.service.tls import renew, server_context
from rose_daemon.service.tokens import Keyring

_SHUTDOWN_MAX_S = 2.0
_MARKS_BYTES = MIB
"""Lent to a Mooncake store beyond the capacity, for what `MooncakePool` itself puts there."""


class Listening(NamedTuple):
    """A relay that serves."""

    url: str
    port: int
    config: RelayConfig
    tokens: Keyring
    tls: ssl.SSLContext | None

    def reload(self, config: RelayConfig) -> list[str]:
        """Take over tokens and the certificate's files anew; answers the keys that need a restart.

        Connections that are open stay as they are.  Raises ConfigError, and changes nothing, if the settings
        are not usable.
        """
        check_exposure(config)
        tokens = _tokens(config)
        if self.tls is not None and config.tls_cert:
            renew(self.tls, "relay", config.tls_cert, config.tls_key)
        self.tokens.replace(tokens)
        live = ("tls_cert", "tls_key") if self.tls is not None and config.tls_cert else ()
        waiting = changed_keys(self.config, config, ("token_file", "tokens_dir", *live))
        return [f"relay.{key}" for key in waiting]


@contextlib.asynccontextmanager
async def serving(config: RelayConfig) -> AsyncIterator[str]:
    """Serve a relay; yields its URL.  As `listening`."""
    async with listening(config) as relay:
        yield relay.url


@contextlib.asynccontextmanager
async def listening(config: RelayConfig) -> AsyncIterator[Listening]:
    """Serve a relay of the configured kind (port 0 lets the system choose).

    Raises ConfigError for an address that would be exposed, NotReady if the port cannot be had or a Mooncake
    master does not answer.
    """
    tls = check_exposure(config)
    tokens = _tokens(config)
    async with _handlers(config, tokens) as handlers:
        runner = web.AppRunner(
            handlers.app(),
            access_log=None,
            shutdown_timeout=_SHUTDOWN_MAX_S,
            read_bufsize=CHUNK_BYTES,
            logger=_logger(),
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
            except OSError as error:
                raise NotReady(
                    f"the relay cannot listen on {config.host}:{config.port}: {error.strerror}",
                    "end the process that has the port, or choose another with --port",
                ) from None
            port = runner.addresses[0][1]
            host = f"[{config.host}]" if ":" in config.host else config.host
            url = f"{'https' if tls else 'http'}://{host}:{port}"
            yield Listening(url, port, config, tokens, tls)
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def _handlers(config: RelayConfig, tokens: Keyring) -> AsyncIterator[RelayHandlers[Any]]:
    epoch = secrets.token_hex(8)
    if config.kind == "embedded":
        arena = ArenaPool(config.capacity_bytes) if config.shared_memory else None
        pool: Pool[MemoryBlock] = arena or HeapPool()
        vault = Vault(config.capacity_bytes, config.stage_ttl_s, epoch, pool.allocate)
        yield EmbeddedHandlers(vault, pool, tokens, Sending.from_config(config))
        if arena is not None:
            arena.close()
        return
    lend_bytes = config.capacity_bytes + _MARKS_BYTES
    store = await asyncio.to_thread(MooncakeStore.connect, config, lend_bytes=lend_bytes)
    objects = MooncakePool(store, config, epoch)
    try:
        places = Vault(config.capacity_bytes, config.stage_ttl_s, epoch, objects.allocate)
        handlers = MooncakeHandlers(places, objects, tokens)
        await handlers.begin()
        yield handlers
    finally:
        await objects.end()
        await asyncio.to_thread(store.close)


def check_exposure(config: RelayConfig) -> ssl.SSLContext | None:
    """The TLS context, if configured.

    Raises ConfigError if the address is not loopback and TLS or the token is missing.
    """
    context = server_context("relay", config.tls_cert, config.tls_key)
    if not is_loopback(config.host) and not (config.tls_cert and (config.token_file or config.tokens_dir)):
        raise ConfigError(
            f"relay.host: {config.host} is not loopback: weights would be open to the network",
            "set relay.tls_cert, relay.tls_key and relay.token_file (or tokens_dir), or listen on 127.0.0.1",
        )
    return context


def _tokens(config: RelayConfig) -> Keyring:
    return Keyring.read("relay", config.token_file, config.tokens_dir)


def _logger() -> logging.Logger:
    """For faults of the server; what is no HTTP was answered with 400 and fills no log."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    logger = logging.getLogger("rose.relay")
    if not logger.filters:
        logger.addFilter(is_ours)
    return logger
