"""Evidence on the weights an engine really runs: digests of its live parameters, and what it says.

Engines are asked directly, past the gateway: the question is about one engine, and its turns are not counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec

from rose.errors import EngineFailed
from rose_daemon.harness.load import Target, completion_body

PROMPTS = 8
PROMPT_TOKENS = 24
ANSWER_TOKENS = 32
TIMEOUT_S = 180.0

Answers = tuple[tuple[int, ...], ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one version."""

    replica: str
    version: int
    """As the engine says."""
    digests: dict[str, str]
    answers: Answers
    """Greedy tokens on the fixed prompts."""


class VersionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """All engines at one version, against the trainer."""

    version: int
    digests_differ: tuple[str, ...]
    """`replica: parameter` where an engine's live bytes are not the trainer's."""
    prompts_differ: int
    """Fixed prompts that not all engines answer alike."""
    prompts_moved: int
    """Fixed prompts whose answer is not that of version 0."""

    @property
    def ok(self) -> bool:
        """Bit-exact everywhere, and the engines agree."""
        return not self.digests_differ and not self.prompts_differ


def fixed_prompts(seed: int) -> list[list[int]]:
    """Prompts of byte tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


async def gather_evidence(
    replica: str, target: Target, token: str, prompts: Sequence[Sequence[int]]
) -> Evidence:
    """Ask one engine.  Raises EngineFailed when it does not answer as it should."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as client:
            headers = {"Authorization": f"Bearer {token}"}
            async with client.get(f"{target.url}/rose/v1/weights/digests", headers=headers) as response:
                held = await response.json()
            # One after the other: a batch of another shape may round differently.
            answers = [await _greedy(client, target, prompt) for prompt in prompts]
        return Evidence(
            replica=replica,
            version=int(held["version"]),
            digests=dict(held["digests"]),
            answers=tuple(answers),
        )
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError, TypeError) as error:
        raise EngineFailed(f"{replica} could not be audited: {type(error).__name__}: {error}") from None


async def _greedy(client: aiohttp.ClientSession, target: Target, prompt: Sequence[int]) -> tuple[int, ...]:
    body = completion_body(target, list(prompt), ANSWER_TOKENS, temperature=0.0)
    async with client.post(f"{target.url}/v1/completions", json=body) as response:
        choice = (await response.json())["choices"][0]
    if choice["finish_reason"] != "length":
        raise ValueError(f"a fixed prompt ended with {choice['finish_reason']}")
    return tuple(choice["token_ids"])


def audit(
    version: int, evidence: Sequence[Evidence], trainer: Mapping[str, str], first_answers: Answers
) -> VersionAudit:
    """Compare what engines run with what the trainer made; `first_answers` are those of version 0."""
    differ = []
    for one in evidence:
        if one.version != version:
            differ.append(f"{one.replica}: runs version {one.version}")
        names = sorted(trainer.keys() | one.digests.keys())
        differ += [f"{one.replica}: {name}" for name in names if one.digests.get(name) != trainer.get(name)]
    answers = [one.answers for one in evidence]
    return VersionAudit(
        version=version,
        digests_differ=tuple(differ),
        prompts_differ=sum(len(set(alike)) > 1 for alike in zip(*answers, strict=True)),
        prompts_moved=sum(new != old for new, old in zip(answers[0], first_answers, strict=True)),
    )
