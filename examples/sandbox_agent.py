"""A group of episodes in sandboxed environments over HTTP (sandbox_server.py, or a ROCK server).

Every episode is a sandbox, a trajectory, and turns in which the model calls the tool `bash`.

python examples/sandbox_agent.py --base-url http://127.0.0.1:7700 --environment http://127.0.0.1:9100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import uuid
from types import TracebackType
from typing import Any, Self

import aiohttp
from openai import AsyncOpenAI

TASK = "Write the word hello into the file answer.txt."
CHECK = "grep -qx hello answer.txt"
STARTS_MAX = 120
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


class Environment:
    """One sandbox with one shell, as ROCK's API has them."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{url}/apis/envs/sandbox/v1"
        self._http = http
        self._id = ""

    async def __aenter__(self) -> Self:
        self._id = (await self._call("start_async", image="python:3.11"))["sandbox_id"]
        for _ in range(STARTS_MAX):
            if (await self._status())["is_alive"]:
                break
            await asyncio.sleep(1)
        await self._call("create_session", session="agent")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call("stop")

    async def run(self, command: str, timeout_s: float = 60) -> tuple[int | None, str]:
        """Exit code (None: it was cut off) and output of a command."""
        seen = await self._call(
            "run_in_session",
            action_type="bash",
            session="agent",
            command=command,
            timeout=timeout_s,
            check="silent",
        )
        return seen["exit_code"], seen["output"] or seen["failure_reason"]

    async def _status(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/get_status", params={"sandbox_id": self._id}) as response:
            return _result(await response.json())

    async def _call(self, name: str, **body: Any) -> dict[str, Any]:
        body |= {"sandbox_id": self._id}
        async with self._http.post(f"{self._url}/{name}", json=body) as response:
            return _result(await response.json())


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("status") != "Success":
        raise RuntimeError(f"the environment refused: {answer.get('message')}")
    return answer["result"] or {}


async def episode(
    client: AsyncOpenAI, model: str, environment: Environment, trajectory: str, group: str, turns_max: int
) -> float:
    """Play one episode; its reward."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    async with environment:
        for number in range(turns_max):
            completion = await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                max_tokens=256,
                extra_headers={
                    "x-rose-trajectory": trajectory,
                    "x-rose-turn-id": f"{trajectory}-t{number}",
                    "x-rose-group": group,
                },
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                try:
                    command = str(json.loads(call.function.arguments)["command"])
                except (json.JSONDecodeError, KeyError, TypeError):
                    seen = "error: the arguments must be {'command': ...}"
                else:
                    code, output = await environment.run(command)
                    seen = f"exit code {code}\n{output}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        code, _ = await environment.run(CHECK)
    return float(code == 0)


async def play(options: argparse.Namespace) -> None:
    """One group of episodes at the same time."""
    client = AsyncOpenAI(
        base_url=f"{options.base_url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
        default_headers={"x-rose-job": options.job} if options.job else None,
    )
    model = (await client.models.list()).data[0].id
    group = uuid.uuid4().hex[:8]
    async with aiohttp.ClientSession() as http:
        playing = [
            episode(
                client,
                model,
                Environment(options.environment, http),
                f"{group}-{number}",
                group,
                options.turns_max,
            )
            for number in range(options.episodes)
        ]
        rewards = await asyncio.gather(*playing)
    await client.close()
    print(f"group {group}: rewards {list(rewards)}")


def main() -> None:
    """Play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", help="may be left out while there is only one")
    parser.add_argument("--environment", default="http://127.0.0.1:9100")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--turns-max", type=int, default=6)
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
