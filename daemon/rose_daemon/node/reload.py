"""SIGHUP: what of a `rose.toml` that was read again counts without a restart."""

from __future__ import annotations

import msgspec

from rose.config import Config
from rose.core.events import PolicyChanged
from rose_daemon.node.driver import NodeDriver
from rose_daemon.node.settings import node_settings
from rose_daemon.service.changes import changed_keys

_LIVE = (
    "admission.mode", "admission.token_cap", "admission.margin_ms", "lending.hours", "lending.harm_share_max",
    "lending.harm_requests_min", "lending.harm_window_s", "lending.switchback_share",
    "lending.switchback_window_s", "lending.drill_period_s", "lending.drill_share_max",
)  # fmt: skip


def reconfigure(driver: NodeDriver, config: Config) -> list[str]:
    """Follow `[admission]` and `[lending]` of `config`; answers the keys that need a restart.

    `lending.mode` is one of those, as it says which engines are started; but one of `observe` stops lending.
    """
    settings = node_settings(msgspec.structs.replace(driver.config, admission=config.admission))
    driver.emit(PolicyChanged(int(settings.gate_mode), settings.token_cap, settings.margin_ns))
    driver.lending.reconfigure(config)
    ports = {each.id: each.port for each in driver.config.replicas}
    replicas = tuple(  # a port that any will do for was chosen at the start
        each if each.port else msgspec.structs.replace(each, port=ports.get(each.id, 0))
        for each in config.replicas
    )
    return changed_keys(driver.config, msgspec.structs.replace(config, replicas=replicas), _LIVE)
