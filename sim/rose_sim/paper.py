"""Published figures of ROSE that the simulator is held against.

No full text or code is public; these come from summaries of arXiv 2605.06534 (v2) that agree with each
other.  The SLO budgets are those that agree with all rows of Table 1: TTFT 500 and TPOT 150 ms (8B), 1000 and
450 ms (32B).
"""

from __future__ import annotations

from typing import NamedTuple


class Figures(NamedTuple):
    """Of one model."""

    over_grpo: float
    over_dapo: float
    over_areal: float
    rlboost: float
    """Rollout time over ROSE's, as the next two."""
    serverless: float
    prism: float
    rollout_s: float
    share: float
    """Rollout's share of a step."""
    ttft_rise: float
    tpot_rise: float
    slo_kept: dict[str, bool]
    """Table 1: P99 of TTFT and TPOT both within budget."""
    p99_ms: dict[str, tuple[float, float]]
    """Table 1: P99 of TTFT and TPOT."""


_KEPT = {"rose": True, "serverlessllm": True, "serverlessllm+rollout": False, "prism": False}

PAPER = {
    "8b": Figures(1.31, 1.42, 1.44, 1.20, 1.31, 1.47, 496.3, 0.869, 0.074, 0.155, _KEPT, {
        "rose": (338.1, 136.1),
        "serverlessllm": (314.8, 117.8),
        "serverlessllm+rollout": (1166.1, 135.6),
        "prism": (973.2, 115.4),
    }),
    "32b": Figures(1.46, 3.31, 2.69, 1.26, 1.21, 1.36, 960.1, 0.705, 0.170, 0.273, _KEPT, {
        "rose": (837.5, 398.1),
        "serverlessllm": (716.1, 312.8),
        "serverlessllm+rollout": (2426.2, 565.3),
        "prism": (1625.4, 351.7),
    }),
}  # fmt: skip
