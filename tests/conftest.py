"""Fixtures that several suites share: the small models, and real engines started as in production.

Whatever a fixture starts it also ends, process group and all, however the tests went.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_world import TOKEN, Engine, EnginePair, Gatekeeper, unused_port
from hypothesis import HealthCheck, settings

from rose.boards import BoardPaths
from rose.config import Config, NodeConfig, ReplicaConfig, ServingConfig
from rose.engines.vllm.launch import EngineShape, rollout_command, serving_command
from rose.units import ReplicaId


def pytest_configure() -> None:
    """No test may depend on how fast the machine is, or on how few files it may open.

    Property tests on whole engines leave thousands of boards open until Python collects them.
    """
    settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-machine")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        enough = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `engine` need vLLM; say so where it is missing."""
    if importlib.util.find_spec("vllm") is None:
        missing = pytest.mark.skip(reason="vLLM is not installed")
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(missing)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives free ports."""
    return unused_port


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoint directories of the two small models (`.serving`, `.rollout`)."""
    from rose_daemon.demo.models import make_models  # noqa: PLC0415 (imports torch)

    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A directory for boards."""
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def engine_pair(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    """Both engines, up and answering (about a minute); a test that moves the gate opens it again."""
    root = tmp_path_factory.mktemp("engines")
    run_dir, token_file = root / "run", root / "engine.token"
    run_dir.mkdir()
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    cores = sorted(os.sched_getaffinity(0))
    worker_cpus, api_cpus = (cores[0],), (cores[-1],)
    ports = unused_port(), unused_port()
    replica = ReplicaConfig(
        id=ReplicaId("r0"),
        kind="opportunistic",
        model=str(demo_models.rollout),
        cpus=worker_cpus,
        api_cpus=api_cpus,
        kv_blocks=256,
    )
    config = Config(
        node=NodeConfig(state_dir=str(root), run_dir=str(run_dir), token_file=str(token_file)),
        serving=ServingConfig(url=f"http://127.0.0.1:{ports[0]}"),
        replicas=(replica,),
    )
    serving = serving_command(
        model=str(demo_models.serving),
        port=ports[0],
        run_dir=str(run_dir),
        token_file=str(token_file),
        cpus=worker_cpus,
        api_cpus=api_cpus,
        slo_classes="premium=100/30",
        shape=EngineShape(kv_blocks=256),
    )
    with ExitStack() as stack:
        engines = [
            Engine(serving, ports[0], root / "serving.log", TOKEN),
            Engine(rollout_command(replica, config, port=ports[1]), ports[1], root / "rollout.log", TOKEN),
        ]
        for engine in engines:
            stack.callback(engine.stop)
        for engine in engines:
            engine.wait_ready()
        # The first prompt of a CPU engine must be allowed to be short (see rose.engines.vllm.cpu_worker).
        engines[0].complete("serving", [3, 4, 5], 2)
        boards = BoardPaths(run_dir)
        gate = Gatekeeper(boards, "r0")
        stack.callback(gate.close)
        yield EnginePair(engines[0], engines[1], gate, boards, demo_models, worker_cpus, api_cpus)
