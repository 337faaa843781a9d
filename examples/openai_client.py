"""OpenAI's own client through the gateway: a conversation of two turns, streamed, and one turn sent again.

python examples/openai_client.py --base-url http://127.0.0.1:7700
"""

from __future__ import annotations

import argparse
import os
import uuid
from typing import Any

from openai import OpenAI

QUESTIONS = ("Which way to the goal?", "And then?")


def stream_turn(client: OpenAI, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Text of a streamed answer, printed as it comes, and the member `rose` of its last chunk."""
    text, rose = "", {}
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        rose = (chunk.model_extra or {}).get("rose", rose)
    print()
    return text, rose


def main() -> None:
    """Talk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", help="may be left out while there is only one")
    options = parser.parse_args()
    client = OpenAI(
        base_url=f"{options.base_url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),  # the gateway's token, if it asks for one
        default_headers={"x-rose-job": options.job} if options.job else None,
    )
    model = client.models.list().data[0].id
    trajectory = f"walk-{uuid.uuid4().hex[:8]}"
    messages: list[dict[str, str]] = []
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        request: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "max_tokens": 24,
            "temperature": 0,
            "extra_headers": {
                "x-rose-trajectory": trajectory,  # all turns go where their prefix is
                "x-rose-turn-id": f"{trajectory}-t{number}",  # sent twice, run once
            },
            "extra_body": {"return_token_ids": True},
        }
        text, rose = stream_turn(client, request)
        print(f"  turn {rose['turn_id']}: attempts {rose['attempts']}, versions {rose['weight_versions']}")
        messages.append({"role": "assistant", "content": text})
    again = client.chat.completions.create(**request)
    same = again.choices[0].message.content == text
    print(f"sent again under its id: {'the same answer' if same else 'ANOTHER ANSWER'}")
    print(f"token ids: {(again.choices[0].model_extra or {})['token_ids']}")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
