"""Latent-prefix exploration: sample after prefixes that are points in the embedding space, not texts.

Each prefix goes through the gateway as `prompt_embeds` (a tensor as torch saves it, in base64).  The engines
need --enable-prompt-embeds.  Here the prefixes are noise around the origin; a search would move them.

python examples/latent_prefix.py --base-url http://127.0.0.1:7700 --hidden-size 64
"""

from __future__ import annotations

import argparse
import base64
import io
import os

import torch
from openai import OpenAI


def encoded(tensor: torch.Tensor) -> str:
    """A tensor of shape (tokens, hidden size) as vLLM takes it."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    """Sample after some prefixes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", help="may be left out while there is only one")
    parser.add_argument("--hidden-size", type=int, required=True, help="of the model")
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8, help="length of each prefix")
    options = parser.parse_args()
    client = OpenAI(
        base_url=f"{options.base_url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
        default_headers={"x-rose-job": options.job} if options.job else None,
    )
    model = client.models.list().data[0].id
    noise = torch.Generator().manual_seed(0)
    for number in range(options.prefixes):
        prefix = 0.02 * torch.randn(options.tokens, options.hidden_size, generator=noise)
        answer = client.completions.create(
            model=model,
            prompt=None,
            max_tokens=16,
            temperature=0,
            extra_body={"prompt_embeds": encoded(prefix), "return_token_ids": True},
        )
        print(f"prefix {number}: {(answer.choices[0].model_extra or {})['token_ids']}")


if __name__ == "__main__":
    main()
