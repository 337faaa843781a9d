"""How long steps take: affine models of their load, calibrated online.

T(load) ~ a + b * load, with a, b >= 0 (paper: the profiled T-hat; the online fit is ours).  The load is the
tokens of a rollout step (T_rollout), the prompt tokens of a prefill (T_prefill), or the sequences of a decode
step (T_decode).  Plain integers and floats: a call costs a few microseconds, and the same observations
always give the same predictions.
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
DRIFT_WINDOW = 32
"""Latest steps whose durations are held against their predictions."""
DRIFT_PERMILLE = (800, 1250)
"""Within these, measured over predicted time is no drift."""
_NO_DRIFT = 1000


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
        return self.at(self._quantile)

    def at(self, quantile: float) -> int:
        """As `value`, for another share in (0, 1]."""
        if not self._sorted:
            return 0
        return self._sorted[ceil(quantile * len(self._sorted)) - 1]


class StepLatency:
    """Duration of a step as a function of its tokens.

    Samples are windowed per size class, so that a long decode phase (a few tokens a step) does not push
    out what is known of prefill chunks (hundreds).  Least squares over all kept samples; the sums are
    exact integers, so they do not wander.  Where the sizes differ too little to tell a from b, everything is
    charged to the tokens, which overestimates larger steps rather than underestimating them.
    """

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[int, int]]] = {}
        self._errors = WindowQuantile(ERROR_WINDOW, ERROR_QUANTILE)
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_predicted_ns = self._recent_measured_ns = 0
        self._drift_permille = _NO_DRIFT
        self._margin_ns = 0
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
            self._judge(predicted_ns, duration_ns)
        samples = self._classes.setdefault(tokens.bit_length(), deque())
        if len(samples) == CLASS_WINDOW:
            self._count_in(*samples.popleft(), sign=-1)
        samples.append((tokens, duration_ns))
        self._count_in(tokens, duration_ns, sign=1)
        self._fit()

    def _judge(self, predicted_ns: int, duration_ns: int) -> None:
        """Hold a step against what was predicted of it."""
        self._errors.add(max(0, duration_ns - predicted_ns))
        if len(self._recent) == DRIFT_WINDOW:
            old_predicted_ns, old_measured_ns = self._recent.popleft()
            self._recent_predicted_ns -= old_predicted_ns
            self._recent_measured_ns -= old_measured_ns
        self._recent.append((predicted_ns, duration_ns))
        self._recent_predicted_ns += predicted_ns
        self._recent_measured_ns += duration_ns
        if len(self._recent) == DRIFT_WINDOW and self._recent_predicted_ns:
            self._drift_permille = 1000 * self._recent_measured_ns // self._recent_predicted_ns
        self._margin_ns = self._errors.value()
        if self.drifting:
            latest = (measured_ns - expected_ns for expected_ns, measured_ns in self._recent)
            self._margin_ns = max(self._margin_ns, *latest)

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

    @property
    def drift_permille(self) -> int:
        """Measured over predicted time of the latest DRIFT_WINDOW steps, times 1000; 1000 before so many."""
        return self._drift_permille

    @property
    def drifting(self) -> bool:
        """Whether the model lags behind an engine that became slower or faster."""
        lowest, highest = DRIFT_PERMILLE
        return not lowest <= self.drift_permille <= highest

    def margin_ns(self) -> int:
        """By how much steps outlasted their prediction (upper quantile).

        While the model drifts, the worst of the latest steps counts.
        """
        return self._margin_ns

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


class SharedStepLatency:
    """T-hat of one kind of step, with the load that ran beside it as an argument.

    Two models: of steps that had the device alone, and of steps beside which the other engine ran.  Where
    engines take turns (time-slice), a step's own need is what it takes alone, as the other's time is counted
    apart; where they overlap (MPS), it is what it takes beside the other.
    """

    def __init__(self) -> None:
        self._alone = StepLatency()
        self._beside = StepLatency()

    def observe(self, load: int, duration_ns: int, *, co_running: int = 0) -> None:
        """Learn from one step; `co_running` is the other engine's load meanwhile, 0 if it was idle."""
        (self._beside if co_running else self._alone).observe(load, duration_ns)

    def model(self, *, co_running: int = 0) -> StepLatency:
        """The model for steps beside such a load.

        For steps alone, what was seen beside the other engine stands in (it can only be longer) until enough
        of them were seen; never the other way round.
        """
        if co_running or (self._beside.calibrated and not self._alone.calibrated):
            return self._beside
        return self._alone


class ServingLatency:
    """T_prefill and T_decode of a serving engine whose steps take at most `step_tokens_max` tokens.

    Where engines overlap on the device (`overlaps`), predictions are for steps beside rollout, as soon as
    enough of those were seen.
    """

    def __init__(self, step_tokens_max: int, *, overlaps: bool = False) -> None:
        if step_tokens_max <= 0:
            raise ValueError(f"a step must take a token, not {step_tokens_max=}")
        self._step_tokens_max = step_tokens_max
        self._overlaps = overlaps
        self.prefill = SharedStepLatency()
        self.decode = SharedStepLatency()
        self.drift_permille = _NO_DRIFT
        """That of the model, of the two, which is further off."""

    def observe(self, prompt_tokens: int, decodes: int, duration_ns: int, *, co_running: int = 0) -> None:
        """Learn from one step.  Decodes that rode along with a prefill count as part of its cost."""
        if prompt_tokens > 0:
            self.prefill.observe(prompt_tokens, duration_ns, co_running=co_running)
        else:
            self.decode.observe(decodes, duration_ns, co_running=co_running)
        drifts = (self._model(self.prefill).drift_permille, self._model(self.decode).drift_permille)
        self.drift_permille = max(drifts, key=lambda drift: abs(drift - _NO_DRIFT))

    def _model(self, kind: SharedStepLatency, co_running: int = 0) -> StepLatency:
        beside = kind.model(co_running=1)
        return beside if co_running or (self._overlaps and beside.calibrated) else kind.model()

    def prefill_margin_ns(self) -> int:
        """By how much prefills outlast their prediction."""
        return self._model(self.prefill).margin_ns()

    def decode_margin_ns(self) -> int:
        """By how much decode steps outlast their prediction."""
        return self._model(self.decode).margin_ns()

    def prefill_ns(self, prompt_tokens: int, *, co_running: int = 0) -> int:
        """T_prefill: how long these prompt tokens take, in as many steps as they need; 0 if not known."""
        model = self._model(self.prefill, co_running)
        if not model.calibrated:
            return 0
        full, rest = divmod(max(0, prompt_tokens), self._step_tokens_max)
        return (full * model.predict_ns(self._step_tokens_max) if full else 0) + model.predict_ns(rest)

    def decode_ns(self, batch: int, *, co_running: int = 0) -> int:
        """T_decode: how long a step with `batch` decoding sequences takes; 0 if not known."""
        model = self._model(self.decode, co_running)
        return model.predict_ns(batch) if model.calibrated else 0
