"""One-shot RL: a single prompt, sampled many times in groups.

All samples of a group name it in `x-rose-group`: the turns of a group go where their prompt is computed
already, as far as the load allows, and the others compute it once a replica.

python examples/one_shot.py --base-url http://127.0.0.1:7700 --groups 8 --group-size 16
"""

from __future__ import annotations

import argparse
import asyncio
import os
import uuid
from collections import Counter
from typing import Any

from openai import AsyncOpenAI

PROMPT = [
    {"role": "user", "content": "Solve: a train leaves at noon ... Think step by step, then give one number."}
]


async def sample(client: AsyncOpenAI, model: str, group: str, number: int, tokens: int) -> Any:
    """One sample of the prompt."""
    return await client.chat.completions.create(
        model=model,
        messages=PROMPT,
        max_tokens=tokens,
        temperature=1.0,
        seed=number,
        logprobs=True,
        extra_headers={"x-rose-group": group, "x-rose-turn-id": f"{group}-{number}"},
        extra_body={"return_token_ids": True},
    )


async def play(options: argparse.Namespace) -> None:
    """All groups at the same time."""
    client = AsyncOpenAI(
        base_url=f"{options.base_url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
        default_headers={"x-rose-job": options.job} if options.job else None,
    )
    model = (await client.models.list()).data[0].id
    run = uuid.uuid4().hex[:8]
    answers = await asyncio.gather(
        *(
            sample(client, model, f"{run}-{group}", group * options.group_size + number, options.tokens)
            for group in range(options.groups)
            for number in range(options.group_size)
        )
    )
    await client.close()
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    cached = sum(
        getattr(answer.usage.prompt_tokens_details, "cached_tokens", None) or 0 for answer in answers
    )
    where = Counter(answer.model_extra["rose"]["attempts"][-1]["replica"] for answer in answers)
    print(f"{len(answers)} samples; {cached} of {prompt} prompt tokens were computed before")
    print(f"samples by replica: {dict(sorted(where.items()))}")


def main() -> None:
    """Sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", help="may be left out while there is only one")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
