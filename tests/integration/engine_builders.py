"""Stand-ins for real engines, for `rosed --engine-builder`: same environment, other program."""

from __future__ import annotations

import sys

from rose_daemon.bench.update_host import light_engine

from rose.config import Config, ReplicaConfig
from rose.engines.vllm.launch import EngineCommand, rollout_command


def mock(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """The mock engine."""
    real = rollout_command(replica, config)
    argv = (
        sys.executable,
        "-m",
        "rose_daemon.mock_engine",
        "--host",
        replica.host,
        "--port",
        str(replica.port),
    )
    return EngineCommand((*argv, "--served-model-name", replica.served_name), real.env)


vllm = rollout_command
"""The real thing."""


def steady(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """The mock engine at a pace at which hundreds of turns stay in flight for a while."""
    command = mock(replica, config)
    return EngineCommand((*command.argv, "--token-ms", "100"), command.env)


def obedient(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """The mock engine, which obeys the policy on its gate board and says so."""
    command = mock(replica, config)
    return EngineCommand((*command.argv, "--obey"), command.env)


applier = light_engine


def dying(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """An engine that ends before it is ready, and says why."""
    code = "import sys; print('ValueError: no such quantization'); sys.exit(3)"
    return EngineCommand((sys.executable, "-c", code), rollout_command(replica, config).env)


def hanging(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """An engine that never answers, and ignores SIGTERM."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{deaf}; print('up', flush=True); time.sleep(600)"
    return EngineCommand((sys.executable, "-c", code), rollout_command(replica, config).env)
