"""Which trajectory a turn belongs to: names first, guesses last, and never by a part of a name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rose_daemon.scheduler.dialects import parse
from rose_daemon.scheduler.errors import Refused
from rose_daemon.scheduler.identity import Identifier, Identity
from rose_daemon.scheduler.requests import Dialect

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Which way?"}]}


def identify(body: Any = CHAT, dialect: Dialect = Dialect.CHAT, **headers: str) -> Identity | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Identifier().identify(named, parse(dialect, msgspec.json.encode(body)))


HEADERS = {"x_rose_trajectory": "a", "X_Session_ID": "c", "X_SMG_Routing_Key": "d"}


def test_names_in_order() -> None:
    body = CHAT | {"session_id": "b", "user": "e"}
    headers = dict(HEADERS)
    assert identify(body, **headers) == Identity("a")
    del headers["x_rose_trajectory"]
    assert identify(body, **headers) == Identity("b")
    del body["session_id"]
    assert identify(body, **headers) == Identity("c")
    del headers["X_Session_ID"]
    assert identify(body, **headers) == Identity("d")
    assert identify(body) == Identity("user:e", guessed=True)
    assert identify(CHAT).guessed  # type: ignore[union-attr]


def test_sglangs_request_id_is_a_name() -> None:
    body = {"text": "Which way?", "rid": "r"}
    assert identify(body, Dialect.SGLANG) == Identity("r")
    assert identify(body, Dialect.SGLANG, X_SMG_Routing_Key="d") == Identity("r")
    assert identify(body, Dialect.SGLANG, x_rose_trajectory="a") == Identity("a")
    batch = {"text": ["a", "b"], "rid": ["r", "s"]}
    assert identify(batch, Dialect.SGLANG).guessed, "a batch is no trajectory"  # type: ignore[union-attr]


@pytest.mark.parametrize("header", ["x-rose-trajectory", "X-Session-ID", "X-SMG-Routing-Key"])
@pytest.mark.parametrize("value", ["x" * 257, "ünicode", "tab\there"])
def test_what_cannot_be_a_name(header: str, value: str) -> None:
    with pytest.raises(Refused, match=header):
        identify(**{header.replace("-", "_"): value})


def test_all_turns_of_a_conversation_are_guessed_alike_by_every_gateway() -> None:
    """Nothing is remembered for it, so that two gateways, or one after a restart, agree."""
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which way?"}]
    later = [*start, {"role": "assistant", "content": "Up."}, {"role": "user", "content": "And now?"}]
    first = identify({"messages": start})
    assert first is not None
    assert first.guessed
    assert identify({"messages": later}) == first
    assert identify({"messages": [start[0], later[3]]}) != first


@pytest.mark.parametrize("dialect", [Dialect.COMPLETION, Dialect.GENERATE, Dialect.SGLANG])
def test_a_growing_prompt_is_guessed_alike(dialect: Dialect) -> None:
    def ask(tokens: list[int]) -> Identity | None:
        body: dict[str, Any] = {
            Dialect.COMPLETION: {"prompt": tokens},
            Dialect.GENERATE: {"token_ids": tokens, "sampling_params": {}},
            Dialect.SGLANG: {"input_ids": tokens},
        }[dialect]
        return identify(body, dialect)

    prompt = list(range(100))
    assert ask(prompt) == ask([*prompt, 7, 8, 9])
    assert ask(prompt) != ask([5, *prompt])


def test_a_guess_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    identifier = Identifier()
    for _ in range(3):
        identifier.identify({}, parse(Dialect.CHAT, msgspec.json.encode(CHAT)))
    assert capsys.readouterr().out.count("trajectory_unnamed") == 1
