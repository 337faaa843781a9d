"""What verl's agent loops ask of a rollout server, asked of ROSE's: tokens in, tokens out.

Needs verl and ray.  In a training run verl makes the server itself, see docs/integrate.md.

python examples/verl_rollout.py --base-url http://127.0.0.1:7700 --job grpo
"""

from __future__ import annotations

import argparse
import asyncio
import uuid

from rose.adapters.verl import GatewayServer


async def roll_out(base_url: str, job: str) -> None:
    """Some turns at the same time, and an update's pause in the middle."""
    server = GatewayServer({"url": base_url, "job": job})
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_new_tokens": 48}
    asking = [
        asyncio.create_task(server.generate([1, 2, 3, number], dict(sampling), uuid.uuid4().hex))
        for number in range(4)
    ]
    await asyncio.sleep(0.02)
    await server.abort_all_requests()
    await server.clear_kv_cache()
    await server.resume_generation()
    for output in await asyncio.gather(*asking):
        assert len(output.token_ids) == len(output.log_probs)
        print(f"{len(output.token_ids)} tokens, {output.stop_reason}, {output.extra_fields}")
    await server.close()


def main() -> None:
    """Roll out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    options = parser.parse_args()
    asyncio.run(roll_out(options.base_url, options.job))


if __name__ == "__main__":
    main()
