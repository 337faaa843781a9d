"""vLLM's interface to `rose.engines.live`: `--weight-transfer-config '{"backend":"rose"}'`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.engines.live import LiveWeights
from rose.engines.ranks import OneRank, Ranks, TorchRanks
from rose.engines.vllm.settings import PluginSettings
from rose.errors import RoseError


@dataclass
class RoseInitInfo(WeightTransferInitInfo):
    """Nothing to set up: versions come as files on this host."""


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):
    """One staged version directory."""

    path: str
    version: int
    base_version: int


class RoseWeightTransferEngine(WeightTransferEngine[RoseInitInfo, RoseUpdateInfo]):
    """Backend `rose`.  Through vLLM's own calls it stages and applies in one go, while paused."""

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        settings = PluginSettings.from_environ()
        version = settings.weight_version if settings else 0
        self.live = LiveWeights(model, ranks=_ranks(vllm_config.parallel_config), version=version)

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Parameters are written in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its device synchronisation: our writes are on the current stream."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Stage and apply.  Raises WrongBase, CorruptDelta or ApplyFailed, with nothing changed on this rank.

        ROSE itself goes by its own endpoints, which have all ranks change or none.
        """
        self.live.apply(
            self.live.stage(Path(update_info.path), update_info.version, update_info.base_version)
        )
        self.live.settle()

    def finish_weight_update(self) -> None:
        """Everything is written already."""

    def shutdown(self) -> None:
        """End the background thread."""
        self.live.close()


def _ranks(parallel: Any) -> Ranks:
    """How this worker talks to the others about weights.  Raises RoseError where that is not supported."""
    if parallel.pipeline_parallel_size > 1:
        raise RoseError(
            f"live weights with pipeline_parallel_size={parallel.pipeline_parallel_size} are not supported",
            "cut the model by tensor_parallel_size alone",
        )
    if parallel.tensor_parallel_size == 1:
        return OneRank()
    if parallel.data_parallel_size > 1:
        raise RoseError(
            "live weights with tensor and data parallelism together are not supported",
            "run one engine for each data-parallel rank",
        )
    return TorchRanks()
