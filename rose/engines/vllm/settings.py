"""Settings that rosed (or an operator) hands to the plugin inside an engine, through its environment.

No vLLM import here: rosed writes these, the engine's processes read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from rose.boards import BoardPaths
from rose.core.slo import SloBudgets, SloTable
from rose.errors import ConfigError
from rose.profile import Fingerprint, Profile
from rose.profile import load as load_profile
from rose.secret import read_secret
from rose.units import ms_to_ns

_SLO_CLASS = re.compile(
    r"((?:[^/=,\s]+/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}|[^/=,\s]+/)=(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)"
)


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plugin of one engine needs to know.  Each field is the variable ROSE_ENGINE_<FIELD>."""

    PREFIX: ClassVar[str] = "ROSE_ENGINE_"

    role: Literal["serving", "rollout"]
    name: str
    """Name of the serving engine, or id of the replica: names its board."""
    run_dir: str
    token_file: str
    """File that holds the bearer token of our endpoints (mode 0600)."""
    serving_name: str = ""
    """Rollout only: the serving engine whose slack is obeyed, or several, comma-separated, for a replica over
    several devices; empty for a dedicated replica."""
    ttft_slo_ms: float = 250
    tpot_slo_ms: float = 60
    slo_classes: str = ""
    """Serving only: budgets of request classes, `name=TTFT/TPOT` in milliseconds, comma-separated; a name may
    be `adapter/class`, or `adapter/` for an adapter's requests of no class.  See `rose.core.slo.SloTable`."""
    slo_token_file: str = ""
    """Serving only: file with the token of callers whose classes are honoured; empty: the engines' own."""
    board_stale_ms: float = 1000
    """Age at which a board is unknown."""
    slack_stale_ms: float = 0
    """Rollout only: age at which a serving engine's board is unknown; 0: as every board."""
    worker_cpus: str = ""
    """Cores of the worker processes, comma-separated; empty leaves their affinity alone."""
    worker_idle_priority: bool = False
    """Run the workers under SCHED_IDLE."""
    api_cpus: str = ""
    """Cores of the API server and the core loop, comma-separated; empty leaves their affinity alone."""
    weight_version: int = 0
    """Rollout only: the version that the checkpoint holds; above 0 if it is the host's copy."""
    profile_file: str = ""
    """Latency profile to start from; empty: none."""
    step_log: bool = False
    """Log every step in a ring in `run_dir` (`rose bench coserve` reads it)."""
    lent_log: bool = False
    """Rollout only: log every step in another ring, which rosed reads to know whom rollout made late."""
    kv_shared_bytes: int = 0
    """KV memory that the engines of this device share, all of them started with the same number: the serving
    engine lends what it leaves unused.  0: each has its own."""
    kv_headroom_share: float = 0.2
    """Rollout only: share of it that is left free for serving."""
    overlaps: bool = False
    """Serving and rollout run on the device at the same time (MPS), instead of taking turns: predictions are
    for steps that have it together."""
    allow_untested: bool = False
    """Load beside a vLLM release that was not tested."""

    @property
    def serving_names(self) -> tuple[str, ...]:
        """The serving engines (or ranks) whose slack boards are obeyed.

        An empty name among them is kept: a board that is never there closes the gate, none at all opens it.
        """
        return tuple(self.serving_name.split(",")) if self.serving_name else ()

    @property
    def slo_table(self) -> SloTable:
        """Budgets by model and request class.  Raises ConfigError."""
        default = self._budgets(self.ttft_slo_ms, self.tpot_slo_ms, "ttft_slo_ms and tpot_slo_ms")
        classes: dict[str, SloBudgets] = {}
        for text in self.slo_classes.split(",") if self.slo_classes else ():
            match = _SLO_CLASS.fullmatch(text.strip())
            if match is None:
                raise ConfigError(
                    f"{self.PREFIX}SLO_CLASSES: {text!r} is not a class and its budgets",
                    "such as premium=100/30, or adapter/premium=100/30: TTFT/TPOT in milliseconds",
                )
            name, ttft_ms, tpot_ms = match.groups()
            if name in classes:
                raise ConfigError(f"{self.PREFIX}SLO_CLASSES: {name} is there twice")
            classes[name] = self._budgets(float(ttft_ms), float(tpot_ms), f"slo_classes: {name}")
        return SloTable(default, classes)

    def _budgets(self, ttft_ms: float, tpot_ms: float, what: str) -> SloBudgets:
        try:
            return SloBudgets(ms_to_ns(ttft_ms), ms_to_ns(tpot_ms))
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self.PREFIX}*: {what}: {error}") from None

    @property
    def worker_cores(self) -> frozenset[int]:
        """`worker_cpus` as numbers.  Raises ConfigError."""
        return _cores("worker_cpus", self.worker_cpus)

    @property
    def api_cores(self) -> frozenset[int]:
        """`api_cpus` as numbers.  Raises ConfigError."""
        return _cores("api_cpus", self.api_cpus)

    def profile(self, vllm_config: Any) -> Profile | None:
        """The latency profile for an engine of that configuration, if one is named.  Raises ConfigError."""
        if not self.profile_file:
            return None
        device: Literal["cpu", "cuda"] = "cpu" if vllm_config.device_config.device_type == "cpu" else "cuda"
        model = Path(vllm_config.model_config.model)
        return load_profile(Path(self.profile_file), Fingerprint.here(device, len(self.worker_cores), model))

    @property
    def boards(self) -> BoardPaths:
        """Paths of this host's boards."""
        return BoardPaths(Path(self.run_dir))

    def to_environ(self) -> dict[str, str]:
        """The variables to start the engine with."""
        texts: dict[str, str] = {}
        for field in self.__struct_fields__:
            value = getattr(self, field)
            texts[self.PREFIX + field.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
        return texts

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> PluginSettings | None:
        """The settings, or None when this engine was not started with ROSE.  Raises ConfigError."""
        fields = {
            name.removeprefix(cls.PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(cls.PREFIX)
        }
        if not fields:
            return None
        try:
            return msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{cls.PREFIX}*: {error}") from None

    @classmethod
    def require(cls, role: Literal["serving", "rollout"]) -> PluginSettings:
        """The settings of an engine in that role.  Raises ConfigError if it was started otherwise."""
        settings = cls.from_environ()
        if settings is None or settings.role != role:
            raise ConfigError(
                f"this is the scheduler of a {role} engine, but {cls.PREFIX}ROLE says otherwise",
                "start engines with the command that rose.engines.vllm.launch builds",
            )
        return settings


def read_token(path: Path) -> bytes:
    """The token in a file.  Raises ConfigError when there is none."""
    return read_secret(path, "the engines' token").encode()


def _cores(field: str, text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(",") if part)
    except ValueError:
        name = PluginSettings.PREFIX + field.upper()
        raise ConfigError(f"{name}: {text!r} is not a comma-separated list of cores") from None
