"""Entry point `vllm.general_plugins`: runs in the API server, the core loop and every worker process.

vLLM calls `register` in each of its processes.  Without ROSE_ENGINE_* variables it does nothing, so an
environment that merely has ROSE installed is unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slo_class import carry_classes
from rose.errors import RoseError

TESTED_SERIES = "0.32"
"""The vLLM releases whose internals docs/vllm-internals.md lists and tests/drift compares."""

_SPIN_SLEEP_S = 100e-6
_SPIN_QUICK_S = 0.001
_SPIN_POLL_MS = 10


def register() -> None:
    """Prepare this process.  Raises RoseError beside an untested vLLM, ConfigError for a bad setting."""
    settings = PluginSettings.from_environ()
    if settings is None:
        return
    check_version(settings)
    bind_process(settings.api_cores)
    _register_weight_backend()
    _calm_queue_readers()
    _tell_scheduler_of_weight_versions()
    if settings.slo_classes:
        carry_classes()
    if settings.role == "rollout":
        keep_cpu_weights_in_place()


def check_version(settings: PluginSettings) -> None:
    """Refuse a vLLM whose internals were not compared.  Raises RoseError."""
    from vllm.version import __version__ as version  # noqa: PLC0415 (only engines have vLLM)

    if version.split("+")[0].split(".")[:2] != TESTED_SERIES.split(".") and not settings.allow_untested:
        raise RoseError(
            f"vLLM {version} was not tested with this release of ROSE, which supports {TESTED_SERIES}.x",
            f"install vllm=={TESTED_SERIES}.*, or set {settings.PREFIX}ALLOW_UNTESTED=1",
        )


def bind_process(cores: Iterable[int], *, idle_priority: bool = False) -> None:
    """Bind every thread of this process to `cores` (none: leave them), if asked under SCHED_IDLE.

    Threads and processes made later inherit both.  Raises RoseError where the host has no such core.
    """
    wanted = set(cores)
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        try:
            if wanted:
                os.sched_setaffinity(thread, wanted)
            if idle_priority:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except ProcessLookupError:
            continue  # that thread ended meanwhile
        except OSError as error:
            raise RoseError(
                f"cannot bind process {os.getpid()} to cores {sorted(wanted)}: {error}",
                f"this process may use cores {sorted(os.sched_getaffinity(0))}",
            ) from None


def cores_of_rank(cores: Iterable[int], rank: int, ranks: int) -> frozenset[int]:
    """A rank's share of the workers' cores; all of them where there are fewer than ranks."""
    ordered = sorted(cores)
    if len(ordered) < ranks:
        return frozenset(ordered)
    return frozenset(ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks])


def _register_weight_backend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415

    if "rose" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "rose", "rose.engines.vllm.weights", "RoseWeightTransferEngine"
        )


def _calm_queue_readers() -> None:
    """Let readers of vLLM's shared-memory queues sleep instead of spinning for a second.

    After each message a reader yields in a loop for `busy_loop_s` (1 s), which burns the core that workers
    share.  Here it naps for 100 us during the first millisecond (the next step of a busy engine comes within
    that), then waits for the writer's notification: 10 ms at most, as those may get lost in that second.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    if hasattr(SpinCondition, "_rose_original_wait"):
        return
    original = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        quiet_s = time.monotonic() - self.last_read
        if quiet_s <= _SPIN_QUICK_S:
            time.sleep(_SPIN_SLEEP_S)
        elif quiet_s <= self.busy_loop_s:
            busy_loop_s, self.busy_loop_s = self.busy_loop_s, 0
            try:
                original(self, _SPIN_POLL_MS if timeout_ms is None else min(_SPIN_POLL_MS, timeout_ms))
            finally:
                self.busy_loop_s = busy_loop_s
        else:
            original(self, timeout_ms)

    SpinCondition._rose_original_wait = original
    SpinCondition.wait = wait


def _tell_scheduler_of_weight_versions() -> None:
    """Have the core loop pass a new weight version on to our scheduler, which salts prefix hashes with it.

    Runs in the thread that schedules, while generation is paused.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

    if hasattr(EngineCore, "_rose_original_set_weight_version"):
        return
    original = EngineCore.set_weight_version

    def set_weight_version(self: Any, weight_version: str) -> None:
        original(self, weight_version)
        tell = getattr(self.scheduler, "rose_set_weight_version", None)
        if tell is not None:
            tell(weight_version)

    EngineCore._rose_original_set_weight_version = original
    EngineCore.set_weight_version = set_weight_version


def keep_cpu_weights_in_place() -> None:
    """Have CPU layers compute from `layer.weight` itself.

    By default oneDNN (or the SGL kernels, where there is AMX) pack linear weights into a layout of their
    own, and an update of `layer.weight` would change nothing.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415

    if current_platform.is_cpu():
        from vllm import _custom_ops  # noqa: PLC0415
        from vllm.model_executor.layers import utils  # noqa: PLC0415

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
