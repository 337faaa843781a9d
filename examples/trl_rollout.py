"""TRL's own vLLM client on the gateway: prompts and chats, token ids and log probabilities.  Needs trl.

With --checkpoint and --config it also publishes weights, as a trainer's update does: docs/integrate.md.

python examples/trl_rollout.py --base-url http://127.0.0.1:7700
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl.generation.vllm_client import VLLMClient

from rose.adapters import trl
from rose.adapters.publishing import WeightStream
from rose.client import Job, Scheduler
from rose.config import load
from rose.weights.checkpoint import open_checkpoint


def roll_out(client: VLLMClient) -> None:
    """What GRPOTrainer asks in each step."""
    sampled = client.generate(["Which way to the goal?", "And from here?"], n=2, max_tokens=12, top_k=20)
    for ids, logprobs in zip(sampled["completion_ids"], sampled["logprobs"], strict=True):
        assert len(ids) == len(logprobs)
        print(f"generate: {ids}")
    chats = [[{"role": "user", "content": "Which way?"}], [{"role": "user", "content": "How far?"}]]
    sampled = client.chat(chats, n=2, max_tokens=12, temperature=0.7)
    print(f"chat: {[len(ids) for ids in sampled['completion_ids']]} tokens")


def main() -> None:
    """Roll out; with a checkpoint, update and roll out again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    parser.add_argument("--checkpoint", type=Path, help="directory that the engines were started from")
    parser.add_argument("--config", type=Path, help="the rose.toml that names the relay")
    options = parser.parse_args()
    if options.checkpoint is None:
        roll_out(VLLMClient(base_url=options.base_url, connection_timeout=30))
        return
    job = Job(Scheduler(options.base_url), options.job)
    with WeightStream.connect(load(options.config).relay, job, options.checkpoint) as weights:
        client = trl.client(weights, base_url=options.base_url, connection_timeout=30)
        client.init_communicator()
        roll_out(client)
        with client.weight_update():
            for name, tensor in open_checkpoint(options.checkpoint).state.items():
                client.update_named_params([], [(name, tensor)])  # a trainer sends what it changed
        client.reset_prefix_cache()
        print(f"version {weights.version} is published and rolled out")
        roll_out(client)


if __name__ == "__main__":
    main()
