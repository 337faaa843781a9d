"""What ROLL's agentic environments ask an OpenAI server, and the sampled tokens for the trainer.

ROLL's proxy of type `openai` keeps the text of an answer and tokenises it again.  Its base URL may name a
session; then the tokens that were really sampled, and their log probabilities, are in the job's export.

python examples/roll_http.py --base-url http://127.0.0.1:7700 --job grpo
"""

from __future__ import annotations

import argparse
import os
import uuid
from typing import Any

from openai import OpenAI

from rose.client import Job, Scheduler

GENERATION = {"temperature": 0.7, "max_new_tokens": 32, "top_p": 0.8, "top_k": 20}
"""As in the `generating_args` of a ROLL configuration."""


def ask(client: OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    """One call with the arguments that ROLL's proxy sends."""
    completion = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=GENERATION["temperature"],
        max_tokens=int(GENERATION["max_new_tokens"]),
        top_p=GENERATION["top_p"],
        extra_body={"top_k": GENERATION["top_k"]},
    )
    return completion.choices[0].message.content or ""


def main() -> None:
    """Play two turns, then fetch what was sampled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    options = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "unused")
    session = f"roll-{uuid.uuid4().hex[:8]}"
    client = OpenAI(
        base_url=f"{options.base_url}/rose/v1/jobs/{options.job}/sessions/{session}/v1", api_key=key
    )
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "You stand at the start. Which way?"}]
    for observation in ("You moved. And now?", "You are there."):
        messages += [{"role": "assistant", "content": ask(client, model, messages)}]
        messages += [{"role": "user", "content": observation}]
    turns: list[dict[str, Any]] = list(
        Job(Scheduler(options.base_url, key), options.job).turns(trajectory=session)
    )
    for turn in turns:
        (choice,) = turn["choices"]
        prompt, output = len(choice["prompt_token_ids"]), len(choice["token_ids"])
        print(f"{prompt} tokens of prompt, {output} sampled: {choice['text']!r}")


if __name__ == "__main__":
    main()
