"""Scripted answers of the mock engine: what a test needs of a model that calls tools.

A script is a list of replies.  A chat with n answers of the assistant in it gets reply n, or the last one: so
every replica of a conversation gives the same, and a chat that is asked again gets the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rose_daemon import mock_model
from rose_daemon.mock_sampling import Step

_CALL_ID = "call_{}"


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer: text, or a call of a tool."""

    content: str = ""
    tool: str = ""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


def read_script(path: Path) -> list[Reply]:
    """A script from a JSON file.  Raises msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=list[Reply])


def reply_to(script: Sequence[Reply], messages: Sequence[dict[str, Any]]) -> tuple[Reply, int] | None:
    """The scripted reply to a chat, and its number; None without a script."""
    number = sum(message.get("role") == "assistant" for message in messages)
    return (script[min(number, len(script) - 1)], number) if script else None


class ScriptedSampler:
    """The tokens of a reply, one a step; of a call, its name and its arguments as JSON."""

    def __init__(self, reply: Reply, number: int, tokens_max: int) -> None:
        self._reply = reply
        self._id = _CALL_ID.format(number)
        self._arguments = msgspec.json.encode(reply.arguments).decode()
        text = f"{reply.tool}\n{self._arguments}" if reply.tool else reply.content
        self._tokens = [*mock_model.encode(text), mock_model.EOS]
        self._tokens_max = tokens_max
        self._stream = mock_model.TextStream()
        self.output: list[int] = []

    def step(self, _version: int) -> Step:
        """The next token."""
        place = len(self.output)
        token = self._tokens[place]
        self.output.append(token)
        text = self._stream.feed(token)
        reason = None
        if token == mock_model.EOS:
            reason = "tool_calls" if self._reply.tool else "stop"
        elif len(self.output) == self._tokens_max:
            reason = "length"
        sample = mock_model.Sample(token, -0.1, token, -3.0)
        if not self._reply.tool:
            return Step(sample, text, reason, None)
        return Step(sample, "", reason, None, self._delta(place, text))

    def calls(self) -> list[dict[str, Any]]:
        """The call as a whole answer shows it; none in a reply of text."""
        if not self._reply.tool:
            return []
        function = {"name": self._reply.tool, "arguments": self._arguments}
        return [{"id": self._id, "type": "function", "function": function}]

    def _delta(self, place: int, text: str) -> dict[str, Any]:
        """What a token adds to the call: the first one names it, those after its name are arguments."""
        call: dict[str, Any] = {"index": 0}
        if place == 0:
            call |= {"id": self._id, "type": "function"}
            call["function"] = {"name": self._reply.tool, "arguments": ""}
        elif place > len(self._reply.tool.encode()) and text:
            call["function"] = {"arguments": text}
        else:
            return {}
        return {"tool_calls": [call]}
