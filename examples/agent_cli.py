"""A coding agent as a command line: it knows OPENAI_BASE_URL and OPENAI_API_KEY, and nothing of ROSE.

Runs the shell commands its model asks for, in the working directory, unsandboxed: give it a directory, a user
or a container of its own.

export OPENAI_BASE_URL=http://127.0.0.1:7700/v1 OPENAI_API_KEY=unused
python examples/agent_cli.py "Say hello in hello.txt"
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a shell command in the project's directory and see what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
OUTPUT_CHARACTERS_MAX = 2000


def ask(client: OpenAI, model: str, messages: list[dict[str, Any]], tokens_max: int) -> dict[str, Any]:
    """The model's next message, put together from its stream."""
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, max_tokens=tokens_max, stream=True
    )
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
            if part.function is not None:
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for _, call in sorted(calls.items())
        ]
    return message


def carry_out(call: dict[str, Any], timeout_s: float) -> str:
    """What a call of the tool gives back to the model."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return "error: the arguments must be {'command': ...}"
    print(f"$ {command}")
    try:
        done = subprocess.run(
            command, shell=True, check=False, timeout=timeout_s,
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"error: still running after {timeout_s:g} s"
    output = (done.stdout + done.stderr)[-OUTPUT_CHARACTERS_MAX:]
    print(output, end="")
    return f"exit code {done.returncode}\n{output}"


def main() -> None:
    """Work on the task until the model answers without a call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--turns-max", type=int, default=8)
    parser.add_argument("--tokens-max", type=int, default=512)
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each command")
    options = parser.parse_args()
    client = OpenAI()
    model = options.model or client.models.list().data[0].id
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent. Use the tool `run`; when done, say so."},
        {"role": "user", "content": options.task},
    ]
    for _ in range(options.turns_max):
        message = ask(client, model, messages, options.tokens_max)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return
        for call in message["tool_calls"]:
            result = carry_out(call, options.timeout)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise SystemExit(f"not done after {options.turns_max} turns")


if __name__ == "__main__":
    main()
