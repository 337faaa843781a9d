"""One rank of an FSDP2 trainer: `fsdp_trainer.py RELAY_URL RENDEZVOUS RANK WORLD OUT`.

Publishes three versions of a module that `fully_shard` spread over the ranks, and leaves what the whole model
was at each version, gathered for the test only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rose.config import RelayConfig
from rose.units import JobId, WeightVersion
from rose.weights import ShardedPublisher, Sharding

VERSIONS = 3


class Model(torch.nn.Module):
    """Rows that two ranks share unevenly, a vector, and a buffer that is on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(33, 16)
        self.up = torch.nn.Linear(16, 65, bias=True)
        self.down = torch.nn.Linear(65, 16, bias=False)
        self.register_buffer("scale", torch.ones(7))


def main(url: str, rendezvous: str, rank: int, world: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def exchange(mine: bytes) -> Sequence[bytes]:
        answers: list[bytes] = [b""] * world
        dist.all_gather_object(answers, mine)
        return answers

    def keep(version: int) -> None:
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in model.state_dict().items()
        }
        if rank == 0:
            save_file(whole, out / f"v{version}.safetensors")

    keep(0)
    state = model.state_dict()
    sharding = Sharding.of_tensors(state, world)
    publisher = ShardedPublisher.connect(
        RelayConfig(url=url), JobId("fsdp"), state, sharding, rank, exchange, timeout_s=60
    )
    with publisher, torch.no_grad():
        for version in range(1, VERSIONS + 1):
            for parameter in model.parameters():
                local = parameter.to_local()  # type: ignore[attr-defined]
                local[..., version::9] *= 1.5
            publisher.publish(WeightVersion(version), model.state_dict())
            keep(version)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
