"""Engines as they were measured, in place of what the roofline says of their model and GPU.

Two files will do: a latency profile (`rose profile`), which has steps of one engine that had the device
alone, and a calibration (`rose sim calibrate`), which has both engines of a measured co-serving run.  How
much KV memory there is, and what a token of context costs where a profile does not tell (it is measured with
short ones), comes from the model and the GPU that the scenario names.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from rose import profile as profiles
from rose.errors import ConfigError
from rose_sim import calibration
from rose_sim.costs import BATCH_MAX, StepCost, exact, step_cost
from rose_sim.hardware import gpu, model
from rose_sim.loop import PS_PER_NS
from rose_sim.scenario import Rollout, Scenario, Serving

Role = Literal["serving", "rollout"]
COST_MODEL = "cost model"
FLAT = 1.05
"""Prefills within so much of the shortest one are bound by the weights they read."""
HINT = "take the file of `rose profile`, or that of `rose sim calibrate`"


class Measured(NamedTuple):
    """What an engine's steps cost, and where that comes from."""

    cost: StepCost
    source: str


def engines_of(scenario: Scenario) -> tuple[Measured, Measured]:
    """The scenario's serving and rollout engines: as measured where it names a profile, else by the roofline.

    Raises ConfigError as `engine`.
    """
    roles: tuple[tuple[Role, Serving | Rollout], ...] = (
        ("serving", scenario.serving),
        ("rollout", scenario.rollout),
    )
    found = []
    for role, spec in roles:
        roofline = step_cost(model(spec.model), gpu(scenario.gpu), spec.tp)
        source = f"{COST_MODEL}: {spec.model} on {scenario.gpu}, TP {spec.tp}"
        found.append(engine(spec.profile, role, roofline) if spec.profile else Measured(roofline, source))
    serving, rollout = found
    return serving, rollout


@functools.lru_cache(maxsize=8)
def engine(path: str, role: Role, roofline: StepCost) -> Measured:
    """The measured engine in a file; `roofline` is the cost model's, for what the file does not tell.

    Raises ConfigError that names the file and what is wrong with it.
    """
    try:
        document = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", HINT) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", HINT) from None
    members = document.keys() if isinstance(document, dict) else ()
    if "fingerprint" in members:
        found = profiles.read(Path(path))
        print_of = found.fingerprint
        cores = f", {print_of.cores} cores" if print_of.cores else ""
        return Measured(_fitted(path, found, roofline), f"{path}: profile of {print_of.processor}{cores}")
    if "serving_steps" in members:
        measured = calibration.read(Path(path))
        cost = measured.serving if role == "serving" else measured.rollout
        if len(cost.batch) <= BATCH_MAX or len(cost.context) <= BATCH_MAX:
            raise ConfigError(f"{path}: step times of batches up to {BATCH_MAX} are needed", HINT)
        return Measured(cost, f"{path}: calibrated by {measured.source}")
    raise ConfigError(f"{path} is neither a profile nor a calibration", HINT)


def _fitted(path: str, profile: profiles.Profile, roofline: StepCost) -> StepCost:
    prefill, decode = _medians(profile.prefill), _medians(profile.decode)
    if len(prefill) < 2 or not decode:
        raise ConfigError(
            f"{path}: {len(prefill)} lengths of prefills and {len(decode)} batches of decodes are too few",
            "measure at least two lengths and one batch with `rose profile`",
        )
    # Short prompts take as long as reading the weights does: they tell the floor, and nothing of the slope.
    floor = min(prefill.values())
    sloped = {load: time for load, time in prefill.items() if time > FLAT * floor}
    fitted = sloped if len(sloped) > 1 else prefill
    lengths = np.array(list(fitted), dtype=float)
    base, token, attention = calibration.fit_prefill(lengths, np.array(list(fitted.values())))
    batches = np.arange(BATCH_MAX + 1)
    loads = np.array(list(decode), dtype=float)
    times = np.array(list(decode.values()))
    slope = (times[-1] - times[-2]) / (loads[-1] - loads[-2]) if len(loads) > 1 else 0.0
    beyond = np.maximum(0.0, batches - loads[-1]) * max(0.0, slope)
    batch = np.maximum.accumulate(np.interp(batches, loads, times) + beyond)
    return StepCost(
        base=exact(base),
        token=exact(token),
        attention=exact(attention),
        floor=exact(floor),
        batch=tuple(exact(float(value)) for value in batch),
        context=roofline.context,
        overhead=roofline.overhead,
    )


def _medians(steps: tuple[profiles.Step, ...]) -> dict[int, float]:
    """Median duration in picoseconds, by load, smallest first."""
    found: dict[int, list[int]] = {}
    for step in steps:
        found.setdefault(step.load, []).append(step.duration_ns)
    return {load: float(np.median(found[load])) * PS_PER_NS for load in sorted(found)}
