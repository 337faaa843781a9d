"""SkyRL's own HTTP client on the gateway: token ids in and out, sessions, a pause between.  Needs skyrl.

python examples/skyrl_rollout.py --base-url http://127.0.0.1:7700 --model policy
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient


async def roll_out(base_url: str, model: str) -> None:
    """A batch of prompts, with a pause in the middle as for a weight update."""
    # One URL for both: the gateway routes turns, and answers control calls for the whole fleet.
    client = RemoteInferenceClient(
        proxy_url=base_url, server_urls=[base_url], data_parallel_size=1, model_name=model
    )
    prompts = await client.tokenize(["Which way to the goal?", "And from here?"])
    batch: Any = {
        "prompt_token_ids": prompts,
        "sampling_params": {"max_tokens": 64, "temperature": 0.0, "logprobs": 0},
        "session_ids": ["walk-0", "walk-1"],
    }
    rolling = asyncio.create_task(client.generate(batch))
    await asyncio.sleep(0.05)
    await client.pause_generation()  # turns stop where they are
    await client.reset_prefix_cache()
    await client.resume_generation()  # and go on, on whatever version is required by now
    output = await rolling
    for text, ids, logprobs, reason in zip(
        output["responses"],
        output["response_ids"],
        output["response_logprobs"],
        output["stop_reasons"],
        strict=True,
    ):
        assert len(ids) == len(logprobs)
        print(f"{len(ids)} tokens, ended by {reason}: {text!r}")
    for session in batch["session_ids"]:
        await client.finish_session(session)
    await client.teardown()


def main() -> None:
    """Roll out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    asyncio.run(roll_out(options.base_url, options.model))


if __name__ == "__main__":
    main()
