"""Settings of the sockets that buckets travel on."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from rose.config import RelayConfig
from rose.errors import ConfigError

_SO_MAX_PACING_RATE = 47
"""Linux; Python's socket module has no name for it."""


@dataclass(frozen=True, slots=True)
class Sending:
    """How a connection sends.  The kernel's doing: nothing here waits."""

    pace_bytes_per_s: int = 0
    """No faster than this; 0 sets no limit."""
    congestion: str = ""
    """Congestion control; empty leaves the system's."""

    @classmethod
    def from_config(cls, config: RelayConfig) -> Sending:
        """As configured.  Raises ConfigError if this kernel cannot."""
        sending = cls(config.pace_bytes_per_s, config.congestion)
        with socket.socket() as probe:
            sending.apply(probe)
        return sending

    def apply(self, sock: socket.socket) -> None:
        """Set it on a TCP socket.  Raises ConfigError."""
        if self.pace_bytes_per_s:
            rate = self.pace_bytes_per_s.to_bytes(8, "little")
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
        if not self.congestion:
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())
        except OSError as error:
            raise ConfigError(
                f"relay.congestion: {self.congestion} cannot be used: {error.strerror}",
                "see `sysctl net.ipv4.tcp_allowed_congestion_control`; some need a module of the kernel",
            ) from None

    def apply_to(self, descriptor: int) -> None:
        """Set it on a TCP socket that an event loop owns."""
        if self != AS_THE_SYSTEM_DOES:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                self.apply(sock)


AS_THE_SYSTEM_DOES = Sending()
