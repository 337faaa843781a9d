"""What `rose bench coserve` measured, as far as the simulator needs it: every request and every step."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rose.core.readings import ReplicaReading, SlackReading, StepRecord
from rose.errors import ConfigError

NAME = "measured.json"
"""The benchmark leaves it beside its report."""
ALONE, ROLLOUT_ALONE = "alone", "rollout-alone"


class MeasuredRequest(msgspec.Struct, frozen=True):
    """One serving request, by the client's clock."""

    index: int
    prompt_tokens: int
    output_tokens: int
    sent_ns: int
    token_ns: list[int]
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.token_ns[0] - self.sent_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """(t_last - t_first) / (n - 1); None below two tokens."""
        more = len(self.token_ns) - 1
        return (self.token_ns[-1] - self.token_ns[0]) / more / 1e6 if more else None


class MeasuredRun(msgspec.Struct, frozen=True):
    """One mode in one round."""

    mode: str
    round: int
    elapsed_s: float
    records: list[MeasuredRequest]
    rollout_tokens: int
    started_ns: int
    ended_ns: int
    serving_steps: list[StepRecord]
    rollout_steps: list[StepRecord]

    @property
    def answered(self) -> list[MeasuredRequest]:
        """Requests that got all their tokens."""
        return [record for record in self.records if not record.error and record.token_ns]


class Options(msgspec.Struct, frozen=True):
    """How the benchmark was run."""

    concurrency: int
    rollout_prompt_tokens: int
    rollout_output_tokens: int
    static_tokens: int
    token_cap: int
    budgets: tuple[float, float]
    """TTFT and TPOT, milliseconds."""
    seed: int


class Boards(msgspec.Struct, frozen=True):
    """Both engines' boards at the end of a gated mode."""

    slack: SlackReading
    replica: ReplicaReading


class Measured(msgspec.Struct, frozen=True):
    """A whole benchmark."""

    options: Options
    runs: list[MeasuredRun]
    gates: dict[str, Boards] = {}

    def of(self, mode: str) -> list[MeasuredRun]:
        """The runs of a mode, by round."""
        return sorted((run for run in self.runs if run.mode == mode), key=lambda run: run.round)

    @property
    def modes(self) -> list[str]:
        """Modes that were measured, in order."""
        return list(dict.fromkeys(run.mode for run in self.runs))

    def rounds(self, numbers: set[int]) -> Measured:
        """These rounds only.  Raises ConfigError when there is none of them."""
        runs = [run for run in self.runs if run.round in numbers]
        if not runs:
            known = sorted({run.round for run in self.runs})
            raise ConfigError(f"no run of rounds {sorted(numbers)}", f"rounds measured: {known}")
        return Measured(self.options, runs, self.gates)


def read_measured(path: Path) -> Measured:
    """Read a `measured.json`, or the one beside a `report.json`.  Raises ConfigError."""
    path = path / NAME if path.is_dir() else path
    path = path.with_name(NAME) if path.name == "report.json" else path
    hint = "a run of `rose bench coserve` leaves it"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} was not written by `rose bench coserve`: {error}", hint) from None
    if not found.runs:
        raise ConfigError(f"{path} has no run", hint)
    return found
