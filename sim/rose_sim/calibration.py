"""`rose sim calibrate`: fits the cost model to a measured run of `rose bench coserve`.

Everything comes from the run's own records: step times from the step logs, time in the API server from
requests against steps, and what sharing the core costs from steps beside which the other engine worked.
What is predicted with it is another run: see `rose_sim.fidelity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose.core.attribution import Coverage, Span
from rose.core.readings import StepRecord
from rose.errors import ConfigError
from rose_sim.costs import BATCH_MAX, StepCost, exact
from rose_sim.loop import PS_PER_NS
from rose_sim.measured import ALONE, ROLLOUT_ALONE, Measured, MeasuredRun

SCHEMA = 1
BESIDE_MIN = 0.5
"""A step beside which the other engine worked for this share of it ran beside it."""
DECODES_MAX = 24
"""Steps of up to so many tokens are decodes (the benchmark's prompts are chunked into larger steps)."""
STEPS_MIN = 30
SLOW_SHARE = 0.1
"""Steps beyond that quantile of their kind are slow."""
SAMPLES = 256
"""Steps kept for the engines' own latency models."""
QUANTILES = 400
"""Kept of a distribution; the most extreme lie half a share inside, so that one hiccup weighs as one."""
Floats = NDArray[np.float64]


class Stretch(msgspec.Struct, frozen=True):
    """Measured over fitted time of steps: quantiles, evenly spaced."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    after: tuple[float, ...] = ()
    """Of decode steps right after a prefill, whose caches are full of other things; empty: as `decode`."""


class ModeFit(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on the mode: the API server and the load generator share a core with other things."""

    api_in_ms: tuple[float, ...]
    """From sending a request to its first step, with the engine idle: quantiles, evenly spaced."""
    api_out_ms: tuple[float, ...]
    """From the end of the step to the arrival of its first token."""
    wake_ms: float
    """From the end of serving's work to the next rollout step; 0 where rollout never stops."""
    serving_alone: Stretch
    serving_shared: Stretch
    """While the rollout engine had a step in flight on the same core."""
    rollout: Stretch
    """While serving had none."""
    persistence: float = SLOW_SHARE
    """Probability that a serving step is among the longest of its kind (SLOW_SHARE) when the one before was:
    the operating system keeps an engine from its core for spells, not for single steps."""
    held: float = 1.0
    """Share of a serving step for which rollout does without the core: serving pauses within its steps."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The cost model of one machine and pair of models, as it was measured."""

    schema: int = SCHEMA
    source: str
    rounds: tuple[int, ...]
    serving: StepCost
    rollout: StepCost
    turnaround_ms: float
    """From an answer of the rollout engine to the client's next request in it."""
    modes: dict[str, ModeFit]
    serving_steps: tuple[tuple[int, int, int], ...]
    """(prompt tokens, decodes, ns): where the serving engine's latency model starts from."""
    rollout_steps: tuple[tuple[int, int], ...]
    errors: dict[str, float]
    """Median relative error of the fitted step times against the measured ones."""


class Samples(NamedTuple):
    """Steps of one engine: tokens, milliseconds, and the share of each beside which the other worked."""

    tokens: Floats
    ms: Floats
    beside: Floats
    after: NDArray[np.bool_]
    """Whether the step before was a prefill."""
    gaps_ms: Floats
    """Between steps that follow each other at once."""

    def alone(self) -> Samples:
        """Those that had the core for themselves."""
        return self._where(self.beside <= 0.01)

    def shared(self) -> Samples:
        """Those that did not."""
        return self._where(self.beside >= BESIDE_MIN)

    def _where(self, mask: NDArray[np.bool_]) -> Samples:
        return Samples(self.tokens[mask], self.ms[mask], self.beside[mask], self.after[mask], self.gaps_ms)


def calibrate(measured: Measured, source: Path) -> Calibration:
    """Fit.  Raises ConfigError when a mode that is needed was not measured."""
    for mode in (ALONE, ROLLOUT_ALONE):
        if not measured.of(mode):
            raise ConfigError(
                f"{source}: mode {mode} was not measured", "run `rose bench coserve --modes all`"
            )
    serving = _samples(measured.of(ALONE), of_rollout=False)
    # Gated modes have steps of sizes that rollout alone never takes, many of them while serving was idle.
    rollout = _samples(measured.runs, of_rollout=True)
    serving_cost, rollout_cost = _fit(serving, "serving"), _fit(rollout, "rollout")
    base = (_stretch(serving, serving_cost), _stretch(rollout, rollout_cost))
    modes = {mode: _mode(measured, mode, serving_cost, rollout_cost, base) for mode in measured.modes}
    return Calibration(
        source=str(source),
        rounds=tuple(sorted({run.round for run in measured.runs})),
        serving=serving_cost,
        rollout=rollout_cost,
        turnaround_ms=0.0,
        modes=modes,
        serving_steps=_serving_steps(serving),
        rollout_steps=_rollout_steps(rollout),
        errors={"serving": _error(serving, serving_cost), "rollout": _error(rollout, rollout_cost)},
    )


def predicted_ms(cost: StepCost, tokens: float) -> float:
    """A step of so many tokens: decodes up to DECODES_MAX, a prefill beyond."""
    count = round(tokens)
    work_ps = cost.decode_ps(count, 0) if count <= DECODES_MAX else cost.prefill_ps(count)
    return (work_ps - cost.overhead) / 1e9


# ---- steps -----------------------------------------------------------------------------------------


def _samples(runs: Sequence[MeasuredRun], *, of_rollout: bool) -> Samples:
    tokens: list[float] = []
    ms: list[float] = []
    beside: list[float] = []
    after: list[bool] = []
    gaps: list[float] = []
    for run in runs:
        steps = run.rollout_steps if of_rollout else run.serving_steps
        others = run.serving_steps if of_rollout else run.rollout_steps
        busy = Coverage(Span(step.start_ns, step.end_ns) for step in others)
        for number, step in enumerate(steps):
            span_ns = step.end_ns - step.start_ns
            if span_ns <= 0 or step.tokens <= 0:
                continue
            tokens.append(step.tokens)
            ms.append(span_ns / 1e6)
            beside.append(busy.within_ns(step.start_ns, step.end_ns) / span_ns)
            after.append(bool(number) and steps[number - 1].tokens > DECODES_MAX)
            if number:
                gaps.append((step.start_ns - steps[number - 1].end_ns) / 1e6)
    return Samples(
        np.array(tokens, dtype=np.float64),
        np.array(ms, dtype=np.float64),
        np.array(beside, dtype=np.float64),
        np.array(after, dtype=np.bool_),
        np.array(gaps, dtype=np.float64),
    )


def _fit(samples: Samples, name: str) -> StepCost:
    """Coefficients from steps that had the core alone."""
    alone = samples.alone()
    decodes, prefills = alone.tokens <= DECODES_MAX, alone.tokens > DECODES_MAX
    if decodes.sum() < STEPS_MIN or prefills.sum() < STEPS_MIN:
        raise ConfigError(
            f"{name}: {decodes.sum()} decode and {prefills.sum()} prefill steps are too few to fit",
            f"measure at least {STEPS_MIN} of each",
        )
    base, token, attention = fit_prefill(alone.tokens[prefills], alone.ms[prefills])
    batch = _decode(alone.tokens[decodes], alone.ms[decodes])
    gap_ms = float(np.median(np.maximum(0.0, samples.gaps_ms[samples.gaps_ms < 10.0])))
    return StepCost(
        base=exact(base * 1e9),
        token=exact(token * 1e9),
        attention=exact(attention * 1e9),
        floor=exact(batch[1] * 1e9),
        batch=tuple(exact(value * 1e9) for value in batch),
        context=(4,) * (BATCH_MAX + 1),
        overhead=exact(gap_ms * 1e9),
    )


def fit_prefill(tokens: Floats, times: Floats) -> tuple[float, float, float]:
    """base + token * n + attention * n^2 / 2, least squares of relative errors, none below zero."""
    from scipy.optimize import nnls  # noqa: PLC0415 (slow to import, and needed here alone)

    columns = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    found, _ = nnls(columns / times[:, None], np.ones_like(times))
    return float(found[0]), float(found[1]), float(found[2])


def _decode(tokens: Floats, ms: Floats) -> list[float]:
    """Means by batch where enough were seen, a line elsewhere; never falling."""
    slope, start = np.polyfit(tokens, ms, 1) if len(np.unique(tokens)) > 1 else (0.0, float(ms.mean()))
    if slope < 0 or start < 0:  # too few kinds of batch to tell
        slope, start = 0.0, _mean(ms)
    values = start + slope * np.arange(BATCH_MAX + 1)
    for batch in np.unique(tokens).astype(int):
        of_batch = ms[tokens == batch]
        if len(of_batch) >= STEPS_MIN:
            values[batch] = _mean(of_batch)
    return [float(value) for value in np.maximum.accumulate(values)]


def _mean(values: Floats) -> float:
    """Without the highest and lowest hundredth: one hiccup of the host is no property of the model."""
    low, high = np.percentile(values, (1, 99))
    return float(values[(values >= low) & (values <= high)].mean())


def _error(samples: Samples, cost: StepCost) -> float:
    alone = samples.alone()
    predicted = np.array([predicted_ms(cost, tokens) for tokens in alone.tokens])
    return round(float(np.median(np.abs(predicted / alone.ms - 1))), 4)


def _serving_steps(samples: Samples) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (0, tokens, ns) if tokens <= DECODES_MAX else (tokens, 0, ns)
        for tokens, ns in _rollout_steps(samples)
    )


def _rollout_steps(samples: Samples) -> tuple[tuple[int, int], ...]:
    alone = samples.alone()
    chosen = np.linspace(0, len(alone.ms) - 1, min(SAMPLES, len(alone.ms))).astype(int)
    return tuple((int(alone.tokens[index]), round(alone.ms[index] * 1e6)) for index in chosen)


# ---- what depends on the mode ----------------------------------------------------------------------


def _mode(
    measured: Measured, mode: str, serving: StepCost, rollout: StepCost, base: tuple[Stretch, Stretch]
) -> ModeFit:
    runs = measured.of(mode)
    ways_in, ways_out = _api_ms(runs if mode != ROLLOUT_ALONE else measured.of(ALONE))
    of_serving, of_rollout = _samples(runs, of_rollout=False), _samples(runs, of_rollout=True)
    alone = _stretch(of_serving.alone(), serving, base[0])
    shared = _stretch(of_serving.shared(), serving, alone)
    # A gate that was closed for a prefill opens within the step after it: whether the core is shared by then
    # cannot be told when that step begins, and depends on the mode alone.
    after = _stretch(of_serving, serving, alone).after
    return ModeFit(
        api_in_ms=_quantiles(ways_in),
        api_out_ms=_quantiles(ways_out),
        wake_ms=_wake_ms(runs) if mode not in {ALONE, ROLLOUT_ALONE} else 0.0,
        serving_alone=msgspec.structs.replace(alone, after=after),
        serving_shared=msgspec.structs.replace(shared, after=after),
        rollout=_stretch(of_rollout.alone(), rollout, base[1]),
        persistence=_persistence(of_serving, serving),
    )


def _persistence(samples: Samples, cost: StepCost) -> float:
    """How often a step among the longest of its kind follows another one; SLOW_SHARE if too few were seen."""
    fitted = np.array([predicted_ms(cost, tokens) for tokens in samples.tokens])
    decodes, shared = samples.tokens <= DECODES_MAX, samples.beside >= BESIDE_MIN
    shares = np.full(len(fitted), np.nan)
    for kind in (~decodes, decodes & ~samples.after, decodes & samples.after):
        for mask in (kind & shared, kind & (samples.beside <= 0.01)):
            if mask.sum() >= STEPS_MIN:
                ranks = np.argsort(np.argsort(samples.ms[mask] / fitted[mask]))
                shares[mask] = (ranks + 0.5) / mask.sum()
    slow = shares[:-1] > 1 - SLOW_SHARE
    known = slow & ~np.isnan(shares[1:])
    if known.sum() < STEPS_MIN:
        return SLOW_SHARE
    return round(max(SLOW_SHARE, float((shares[1:][known] > 1 - SLOW_SHARE).mean())), 3)


def _stretch(samples: Samples, cost: StepCost, otherwise: Stretch | None = None) -> Stretch:
    """How steps differ from the fit; where too few were seen, `otherwise`."""
    found = []
    decodes = samples.tokens <= DECODES_MAX
    kinds = (("prefill", ~decodes), ("decode", decodes & ~samples.after), ("after", decodes & samples.after))
    for kind, mask in kinds:
        if mask.sum() < STEPS_MIN:
            unknown = () if kind == "after" else (1.0,)
            found.append(unknown if otherwise is None else getattr(otherwise, kind))
            continue
        fitted = np.array([predicted_ms(cost, tokens) for tokens in samples.tokens[mask]])
        found.append(_quantiles(samples.ms[mask] / fitted))
    return Stretch(*found)


def _api_ms(runs: Sequence[MeasuredRun]) -> tuple[Floats, Floats]:
    """Ways in of requests that found the engine idle, and ways out of first tokens."""
    ways_in: list[float] = []
    ways_out: list[float] = []
    for run in runs:
        starts = np.array([step.start_ns for step in run.serving_steps])
        ends = np.array([step.end_ns for step in run.serving_steps])
        if not len(starts):
            continue
        for record in run.answered:
            following = int(np.searchsorted(starts, record.sent_ns))
            idle = following == 0 or ends[following - 1] <= record.sent_ns
            if idle and following < len(starts):
                ways_in.append((starts[following] - record.sent_ns) / 1e6)
            before = int(np.searchsorted(ends, record.token_ns[0], side="right")) - 1
            if before >= 0 and ends[before] > record.sent_ns:
                ways_out.append((record.token_ns[0] - ends[before]) / 1e6)
    return np.array(ways_in), np.array(ways_out)


def _wake_ms(runs: Sequence[MeasuredRun]) -> float:
    """Median time from the end of serving's work to the next rollout step that began while it was idle."""
    found: list[float] = []
    for run in runs:
        starts = np.array([step.start_ns for step in run.rollout_steps])
        steps: list[StepRecord] = run.serving_steps
        for step, following in pairwise(steps):
            index = int(np.searchsorted(starts, step.end_ns))
            if (
                index < len(starts)
                and starts[index] < following.start_ns
                and (index == 0 or run.rollout_steps[index - 1].end_ns <= step.end_ns)
            ):
                found.append((starts[index] - step.end_ns) / 1e6)
    return float(np.median(found)) if len(found) >= STEPS_MIN else 0.0


def _quantiles(values: Floats) -> tuple[float, ...]:
    if not len(values):
        return (0.0,)
    shares = (np.arange(min(QUANTILES, len(values))) + 0.5) / min(QUANTILES, len(values))
    return tuple(round(float(each), 4) for each in np.quantile(values, shares))


def to_ps(ms: float) -> int:
    """Milliseconds to whole picoseconds."""
    return round(ms * 1e6) * PS_PER_NS


# ---- files -----------------------------------------------------------------------------------------


def write(path: Path, calibration: Calibration) -> None:
    """Write a calibration.  Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> Calibration:
    """Read a calibration.  Raises ConfigError."""
    hint = "`rose sim calibrate` makes one"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no calibration: {error}", hint) from None
    if found.schema != SCHEMA:
        raise ConfigError(f"{path}: schema {found.schema} is not supported", hint)
    return found
