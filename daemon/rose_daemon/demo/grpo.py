"""Group-relative policy optimisation (GRPO; Shao et al., DeepSeekMath, arXiv 2402.03300) on tiny batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rose_daemon.demo.training import Sample

CLIP = 0.2
_ROWS_MAX = 16
"""Sequences of one forward pass."""


def batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples of similar length together, so that little is padded."""
    by_length = sorted(samples, key=lambda sample: len(sample.prompt) + len(sample.output))
    for start in range(0, len(by_length), _ROWS_MAX):
        yield by_length[start : start + _ROWS_MAX]


def accumulate_gradient(model: Any, samples: Sequence[Sample]) -> float:
    """Add the gradient of the GRPO loss over all samples to the model's; the loss.

    The batch is on-policy and used once, so the ratio of new to old probability is 1 in value and carries the
    gradient; the mean is over output tokens (as DAPO does), no KL term.
    """
    tokens = sum(len(sample.output) for sample in samples)
    total = 0.0
    for batch in batches(samples):
        loss = _batch_loss(model, batch) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _batch_loss(model: Any, batch: Sequence[Sample]) -> torch.Tensor:
    """Sum of the token losses of a batch."""
    width = max(len(sample.prompt) + len(sample.output) for sample in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    attention = torch.zeros((len(batch), width), dtype=torch.long)
    credit = torch.zeros((len(batch), width), dtype=torch.float32)
    for row, sample in enumerate(batch):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.output)
        ids[row, :end] = torch.tensor(sample.prompt + sample.output)
        attention[row, :end] = 1
        credit[row, start:end] = sample.advantage
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    targets, weight = ids[:, 1:], credit[:, 1:]
    log_probability = -torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), targets, reduction="none"
    )
    ratio = torch.exp(log_probability - log_probability.detach())
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * weight, clipped * weight).sum()
