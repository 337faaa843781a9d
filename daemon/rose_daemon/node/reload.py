"""SIGHUP: what of a `rose.toml` that was read again counts without a restart."""

from __future__ import annotations

import msgspec

from rose.config import Config
from rose.core.events import PolicyChanged
from rose_daemon.node.driver import NodeDriver
from rose_daemon.node.settings import node_settings
from rose_daemon.service.changes import changed_keys

_LIVE = ("admission.mode", "admission.token_cap", "admission.margin_ms")


def reconfigure(driver: NodeDriver, config: Config) -> list[str]:
    """Have the gates follow `[admission]` of `config`; answers the keys that need a restart."""
    settings = node_settings(msgspec.structs.replace(driver.config, admission=config.admission))
    driver.emit(PolicyChanged(int(settings.gate_mode), settings.token_cap, settings.margin_ns))
    ports = {each.id: each.port for each in driver.config.replicas}
    replicas = tuple(  # a port that any will do for was chosen at the start
        each if each.port else msgspec.structs.replace(each, port=ports.get(each.id, 0))
        for each in config.replicas
    )
    return changed_keys(driver.config, msgspec.structs.replace(config, replicas=replicas), _LIVE)
