"""Chunk-level credit assignment from the export: cut every trajectory into chunks, and share its reward out.

A chunk is a run of tokens of one turn that were sampled from one weight version.  What training needs is in
the export: token ids, the log probabilities they were sampled with, and the spans of weight versions.

python examples/chunk_credit.py --base-url http://127.0.0.1:7700 --job grpo --chunk-tokens 32
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from rose.client import Job, Scheduler


def chunks(turn: dict[str, Any], chunk_tokens: int) -> Iterator[dict[str, Any]]:
    """The chunks of a turn with one choice."""
    (choice,) = turn["choices"]
    for first, last, version in turn["weight_versions"]:
        for start in range(first, last + 1, chunk_tokens):
            stop = min(start + chunk_tokens, last + 1)
            yield {
                "trajectory": turn["trajectory"],
                "turn": turn["turn_id"],
                "first": start,
                "token_ids": choice["token_ids"][start:stop],
                "logprobs": None if choice["logprobs"] is None else choice["logprobs"][start:stop],
                "version": version,
            }


def main() -> None:
    """One JSON object a chunk, with its share of the trajectory's reward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    parser.add_argument("--chunk-tokens", type=int, default=32)
    parser.add_argument("--discount", type=float, default=0.95, help="for each chunk before the last")
    options = parser.parse_args()
    job = Job(Scheduler(options.base_url, os.environ.get("OPENAI_API_KEY", "")), options.job)
    trajectories: dict[str, list[dict[str, Any]]] = {}
    for turn in job.turns(logprobs=True):
        if len(turn["choices"]) == 1:
            trajectories.setdefault(turn["trajectory"], []).extend(chunks(turn, options.chunk_tokens))
    for parts in trajectories.values():
        reward = reward_of(parts)
        for number, part in enumerate(parts):
            part["credit"] = reward * options.discount ** (len(parts) - 1 - number)
            print(json.dumps(part))


def reward_of(parts: list[dict[str, Any]]) -> float:
    """Put yours here; this one likes short trajectories."""
    return 1.0 / sum(len(part["token_ids"]) for part in parts)


if __name__ == "__main__":
    main()
