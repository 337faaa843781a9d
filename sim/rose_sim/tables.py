"""Profiled step times that the cost model is fitted to.

Computed with aiconfigurator 0.12.0 (vLLM silicon database, bf16): the output of a model of measured
operators, not a measurement of ours.  Milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple

PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 8, 16, 32, 64, 128)


class Profile(NamedTuple):
    """Step times of one model on one kind of GPU."""

    model: str
    gpu: str
    tp: int
    prefill_ms: tuple[float, ...]
    """For PREFILL_TOKENS, batch 1."""
    decode_ms: dict[int, tuple[float, ...]]
    """Context tokens -> for BATCHES."""


PROFILES = (
    Profile("Qwen3-8B", "H100", 1, (12.9, 22.7, 44.5, 91.5, 204, 449, 1122), {
        1024: (6.4, 6.9, 7.9, 8.7, 11.0, 13.6),
        8192: (6.6, 9.8, 14.2, 19.3, 31.5, 56.0),
        16384: (7.3, 13.7, 19.8, 31.4, 56.3, 105),
    }),
    Profile("Qwen3-8B", "H200", 1, (12.6, 22.1, 42.3, 91.2, 202, 455, 1177), {
        1024: (5.1, 5.3, 5.9, 6.6, 8.0, 10.7),
        8192: (5.3, 7.6, 10.2, 14.5, 22.9, 40.5),
        16384: (5.8, 10.1, 14.5, 22.7, 40.3, 75.1),
    }),
    Profile("Qwen3-8B", "A100", 1, (37, 66, 127, 261, 568, 1355, 3610), {
        1024: (12.0, 12.9, 13.9, 16.4, 18.8, 26.3),
    }),
    Profile("Qwen3-32B", "H100", 4, (21.9, 36.2, 65.5, 134, 274, 594, 1426), {
        1024: (8.2, 8.5, 9.1, 9.8, 11.5, 13.2),
        8192: (8.4, 9.9, 11.9, 15.1, 20.8, 32.0),
        16384: (8.6, 11.3, 14.6, 20.5, 31.8, 54.3),
    }),
    Profile("Qwen3-32B", "H200", 4, (20.7, 34.5, 65.1, 131, 281, 600, 1380), {
        1024: (7.0, 7.1, 7.5, 8.0, 9.1, 11.2),
        8192: (7.2, 8.1, 9.5, 11.7, 15.9, 24.4),
    }),
    Profile("Qwen3-32B", "A100", 4, (50, 97, 173, 330, 711, 1578, 3950), {}),
)  # fmt: skip
