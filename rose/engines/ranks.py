"""How the workers of one engine agree about weights: each holds a part, and a digest is of the whole.

`OneRank` is an engine of one worker.  `TorchRanks` talks through a process group of its own, so that it can
be used by a background thread while the model's own groups are at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed

_SILENCE_MAX_S = 120.0
"""A rank that is silent this long is taken for dead; a large parameter takes a second or two."""


class Ranks(Protocol):
    """All ranks make the same calls in the same order; each call is collective."""

    index: int
    size: int

    def agree(self, mine: bytes) -> list[bytes]:
        """What every rank gave, in order of rank; at least one byte."""
        ...

    def gather(self, part: torch.Tensor, sizes: Sequence[int], owner: int) -> list[torch.Tensor]:
        """At `owner` the flat parts of all ranks, which have these sizes; elsewhere nothing."""
        ...


class OneRank:
    """An engine of one worker."""

    index = 0
    size = 1

    def agree(self, mine: bytes) -> list[bytes]:
        """What it gave itself."""
        return [mine]

    def gather(self, part: torch.Tensor, sizes: Sequence[int], owner: int) -> list[torch.Tensor]:
        """Its own part."""
        assert list(sizes) == [part.numel()]
        assert owner == 0
        return [part]


class TorchRanks:
    """The ranks of torch's default process group, over a new gloo group; making one is collective too.

    Calls raise RuntimeError when a rank is gone or silent for two minutes.
    """

    def __init__(self, silence_max_s: float = _SILENCE_MAX_S) -> None:
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=silence_max_s))
        self.index = torch.distributed.get_rank(self._group)
        self.size = torch.distributed.get_world_size(self._group)

    def agree(self, mine: bytes) -> list[bytes]:
        """As Ranks.  Not by torch's exchange of objects, which runs what comes as code."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        answers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        torch.distributed.all_gather(answers, padded, group=self._group)
        pairs = zip(answers, sizes, strict=True)
        return [answer.numpy().tobytes()[: int(size)] for answer, size in pairs]

    def gather(self, part: torch.Tensor, sizes: Sequence[int], owner: int) -> list[torch.Tensor]:
        """As Ranks.  Gloo's own gather wants parts of one size."""
        part = part.cpu()
        if self.index != owner:
            if part.numel():
                torch.distributed.send(part.view(torch.uint8), owner, group=self._group)
            return []
        parts: list[torch.Tensor] = []
        for rank, size in enumerate(sizes):
            if rank == owner:
                parts.append(part)
                continue
            other = torch.empty(size, dtype=part.dtype)
            if size:
                torch.distributed.recv(other.view(torch.uint8), rank, group=self._group)
            parts.append(other)
        return parts
