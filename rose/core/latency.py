"""How long a rollout step takes: an affine model of its tokens, calibrated online.

T_rollout(tokens) ~ a + b * tokens, with a, b >= 0 (paper: the profiled T-hat; the online fit is ours).
Plain integers and floats: a call costs a few microseconds, and the same observations always give the
same predictions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, isfinite

CLASS_WINDOW = 32
"""Samples kept per size class (powers of two of the token count)."""
SAMPLES_MIN = 8
"""Fewer samples than this do not make a model."""
ERROR_WINDOW = 256
ERROR_QUANTILE = 0.95
OUTLIER_FACTOR = 8
"""A duration beyond this many predictions is counted as this many (a compilation, a suspended host)."""


class WindowQuantile:
    """Upper quantile over the last `window` values, kept sorted so that reading it costs nothing."""

    def __init__(self, window: int, quantile: float) -> None:
        assert window > 0
        assert 0 < quantile <= 1
        self._quantile = quantile
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: int) -> None:
        """Take one value in; the oldest leaves when the window is full."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def value(self) -> int:
        """The smallest value that at least the given share of the window does not exceed; 0 when empty."""
        if not self._sorted:
            return 0
        return self._sorted[ceil(self._quantile * len(self._sorted)) - 1]


class StepLatency:
    """Duration of a step as a function of its tokens.

    Samples are windowed per size class, so that a long decode phase (a few tokens a step) does not push
    out what is known of prefill chunks (hundreds).  Least squares over all kept samples; the sums are
    exact integers, hence no drift.  Where the sizes differ too little to tell a from b, everything is
    charged to the tokens, which overestimates larger steps rather than underestimating them.
    """

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[int, int]]] = {}
        self._errors = WindowQuantile(ERROR_WINDOW, ERROR_QUANTILE)
        self._count = 0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0
        self._base_ns = 0.0
        self._token_ns = 0.0

    @property
    def calibrated(self) -> bool:
        """Whether enough steps were seen to predict one."""
        return self._count >= SAMPLES_MIN

    def observe(self, tokens: int, duration_ns: int) -> None:
        """Learn from one step; empty steps and impossible durations are ignored."""
        if tokens <= 0 or duration_ns <= 0:
            return
        if self.calibrated:
            predicted_ns = self.predict_ns(tokens)
            duration_ns = min(duration_ns, OUTLIER_FACTOR * max(predicted_ns, 1))
            self._errors.add(max(0, duration_ns - predicted_ns))
        samples = self._classes.setdefault(tokens.bit_length(), deque())
        if len(samples) == CLASS_WINDOW:
            self._count_in(*samples.popleft(), sign=-1)
        samples.append((tokens, duration_ns))
        self._count_in(tokens, duration_ns, sign=1)
        self._fit()

    def _count_in(self, tokens: int, duration_ns: int, *, sign: int) -> None:
        self._count += sign
        self._sum_x += sign * tokens
        self._sum_y += sign * duration_ns
        self._sum_xx += sign * tokens * tokens
        self._sum_xy += sign * tokens * duration_ns

    def _fit(self) -> None:
        """Non-negative least squares for two parameters."""
        spread = self._count * self._sum_xx - self._sum_x * self._sum_x
        through_origin = self._sum_xy / self._sum_xx
        if 16 * spread < self._sum_x * self._sum_x:  # deviation under a quarter of the mean
            self._base_ns, self._token_ns = 0.0, through_origin
            return
        slope = (self._count * self._sum_xy - self._sum_x * self._sum_y) / spread
        if slope <= 0:
            self._base_ns, self._token_ns = self._sum_y / self._count, 0.0
            return
        base = (self._sum_y - slope * self._sum_x) / self._count
        self._base_ns, self._token_ns = (base, slope) if base > 0 else (0.0, through_origin)

    def predict_ns(self, tokens: int) -> int:
        """Expected duration of a step of `tokens` tokens; 0 for an empty one, or before any sample."""
        if tokens <= 0:
            return 0
        predicted = self._base_ns + self._token_ns * tokens
        assert isfinite(predicted)
        return ceil(predicted)

    def margin_ns(self) -> int:
        """By how much recent steps outlasted their prediction (upper quantile)."""
        return self._errors.value()

    def largest_within(self, budget_ns: int, tokens_max: int) -> int:
        """Most tokens, up to `tokens_max`, whose predicted step fits in `budget_ns`; 0 if one does not."""
        if tokens_max <= 0 or self.predict_ns(1) > budget_ns:
            return 0
        if self.predict_ns(tokens_max) <= budget_ns:
            return tokens_max
        tokens = min(tokens_max, max(1, int((budget_ns - self._base_ns) / self._token_ns)))
        while self.predict_ns(tokens) > budget_ns:  # rounding is off by one or two
            tokens -= 1
        while self.predict_ns(tokens + 1) <= budget_ns:
            tokens += 1
        return tokens
