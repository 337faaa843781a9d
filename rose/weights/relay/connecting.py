"""A client of whichever relay is configured."""

from __future__ import annotations

from rose.config import RelayConfig
from rose.weights.relay import Relay
from rose.weights.relay.local import RelayClient
from rose.weights.relay.mooncake import MooncakeRelay


def connect(config: RelayConfig, *, timeout_s: float = 60) -> Relay:
    """A client of the configured relay, for use within one event loop; nothing is sent before the first call.

    `timeout_s` bounds each call, retries included.  Raises ConfigError if the token or the certificates
    cannot be read.
    """
    if config.kind == "mooncake":
        return MooncakeRelay.from_config(config, timeout_s=timeout_s)
    return RelayClient.from_config(config, timeout_s=timeout_s)
