"""Re-shaping: chunks of engines to pieces, pieces to either dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from rose_daemon.scheduler import sglang_engine
from rose_daemon.scheduler.dialects import chunk_writer, openai, parse, whole_body
from rose_daemon.scheduler.engine_streams import EngineError, EventSplitter, Garbage, OpenAiReader
from rose_daemon.scheduler.errors import Failure
from rose_daemon.scheduler.output import (
    Alternative,
    Answer,
    AttemptRecord,
    Choice,
    Piece,
    TokenLogprob,
    in_chat_form,
    replayed_pieces,
)
from rose_daemon.scheduler.requests import Dialect, Request
from rose_daemon.scheduler.seam import SpecialTokens, text_after, text_so_far
from rose_daemon.scheduler.turns import Attempt, Cancelled, Turn, TurnBook

from rose.units import JobId, ReplicaId, TurnId, WeightVersion

CHAT = parse(Dialect.CHAT, b'{"messages":[{"role":"user","content":"x"}],"return_token_ids":true}')
PLAIN_CHAT = parse(Dialect.CHAT, b'{"messages":[{"role":"user","content":"x"}]}')
COMPLETION = parse(Dialect.COMPLETION, b'{"prompt":"x","return_token_ids":true}')


def answer_of(pieces: list[Piece], dialect: Dialect, choices: int = 1) -> Answer:
    made = [Choice() for _ in range(choices)]
    for piece in pieces:
        made[piece.index].add(piece)
    return Answer(
        turn_id="t",
        trajectory="walk",
        dialect=dialect,
        model="m",
        created=1,
        choices=made,
        usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        replica=ReplicaId("r"),
        attempts=[AttemptRecord(ReplicaId("r"), 2, "finished")],
        weight_versions=[(0, 1, WeightVersion(0))],
    )


def read_chunk(dialect: Dialect, chunk: dict[str, Any]) -> list[Piece]:
    return OpenAiReader(dialect).read(msgspec.json.encode(chunk))


def documents(events: bytes) -> list[dict[str, Any]]:
    """JSON documents of server-sent events."""
    return [msgspec.json.decode(data.removeprefix(b"data: ")) for data in events.split(b"\n\n") if data]


CHAT_CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [9]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {"content": "é"},
                "token_ids": [195, 169],
                "logprobs": {
                    "content": [
                        {
                            "token": "é",
                            "logprob": -0.5,
                            "bytes": [195, 169],
                            "top_logprobs": [{"token": "e", "logprob": -1.0, "bytes": [101]}],
                        }
                    ]
                },
                "finish_reason": "stop",
                "stop_reason": 7,
            }
        ]
    },
]


def test_chat_chunks_become_a_chat_body() -> None:
    pieces = [piece for chunk in CHAT_CHUNKS for piece in read_chunk(Dialect.CHAT, chunk)]
    body = whole_body(answer_of(pieces, Dialect.CHAT), CHAT)
    parsed = ChatCompletion.model_validate(body)
    assert parsed.choices[0].message.content == "é"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].logprobs is not None
    assert body["choices"][0]["logprobs"] == CHAT_CHUNKS[1]["choices"][0]["logprobs"]
    assert body["choices"][0]["token_ids"] == [195, 169]
    assert body["choices"][0]["stop_reason"] == 7
    assert body["prompt_token_ids"] == [9]
    assert body["rose"]["weight_versions"] == [(0, 1, 0)]


def test_tool_calls_and_reasoning_are_put_together() -> None:
    parts = [
        {"role": "assistant", "reasoning": "think"},
        {"reasoning": "ing"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "go"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"to":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "stay", "arguments": "{}"}}]},
    ]
    pieces = [
        piece
        for delta in parts
        for piece in read_chunk(Dialect.CHAT, {"choices": [{"index": 0, "delta": delta}]})
    ]
    message = whole_body(answer_of(pieces, Dialect.CHAT), CHAT)["choices"][0]["message"]
    assert message["reasoning"] == "thinking"
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"to":1}'}},
        {"id": "d", "type": "function", "function": {"name": "stay", "arguments": "{}"}},
    ]


def test_several_choices_stay_apart() -> None:
    pieces = [Piece(index=1, text="b", token_ids=[2]), Piece(index=0, text="a", token_ids=[1])]
    body = whole_body(answer_of(pieces, Dialect.COMPLETION, choices=2), COMPLETION)
    assert [choice["text"] for choice in body["choices"]] == ["a", "b"]
    Completion.model_validate(
        body | {"choices": [choice | {"finish_reason": "stop"} for choice in body["choices"]]}
    )


def test_a_completions_entry_in_chat_form() -> None:
    chunk = {
        "choices": [
            {
                "index": 0,
                "text": "a",
                "logprobs": {
                    "tokens": ["a"],
                    "token_logprobs": [-0.1],
                    "top_logprobs": [{"a": -0.1, "b": -2.0, "c": -3.0}],
                    "text_offset": [0],
                },
            }
        ]
    }
    (piece,) = read_chunk(Dialect.COMPLETION, chunk)
    assert piece.logprobs is not None
    entry = in_chat_form(piece.logprobs[0], 2)
    assert (entry.token, entry.bytes) == ("a", [97])
    assert [other.token for other in entry.top] == ["a", "b"]
    assert in_chat_form(piece.logprobs[0], 0).top == ()


def test_offsets_of_logprobs_run_on_through_a_stream() -> None:
    writer = chunk_writer(COMPLETION, "t", "m", 1)
    entry = TokenLogprob("ab", -1.0, None, (Alternative("ab", -1.0, None),))
    events = [writer.events(Piece(text="ab", token_ids=[1], logprobs=[entry]), 0) for _ in range(3)]
    chunks = [document for event in events for document in documents(event)]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [2], [4]]


def test_a_replayed_stream_says_what_the_body_says() -> None:
    pieces = [piece for chunk in CHAT_CHUNKS for piece in read_chunk(Dialect.CHAT, chunk)]
    answer = answer_of(pieces, Dialect.CHAT)
    writer = chunk_writer(CHAT, "t", "m", 1)
    events = b"".join(writer.events(piece, 0) for piece in replayed_pieces(answer)) + writer.last(answer)
    chunks = [ChatCompletionChunk.model_validate(document) for document in documents(events)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "é"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks), "no client but one that asked for usage expects that"
    assert documents(events)[-1]["rose"] == msgspec.json.decode(msgspec.json.encode(answer.rose_member()))


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": [{}]},
        {"choices": [{"index": 0}]},
        {"choices": 5},
        {"choices": [{"index": 0, "delta": 3}]},
    ],
)
def test_what_is_no_chunk_raises(chunk: dict[str, Any]) -> None:
    with pytest.raises(Garbage):
        read_chunk(Dialect.CHAT, chunk)


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETION])
def test_an_error_in_a_stream_is_no_chunk(dialect: Dialect) -> None:
    with pytest.raises(EngineError) as raised:
        read_chunk(dialect, {"error": {"message": "no", "code": 400}})
    assert raised.value.error["code"] == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": ["x"]},
        {"text": None},
        {"output_ids": ["7"]},
        {"output_ids": 7},
        {"meta_info": []},
        {"index": "0"},
    ],
)
def test_what_is_no_chunk_of_sglangs_raises(wrong: dict[str, Any]) -> None:
    chunk = {"text": "x", "output_ids": [7], "meta_info": {"completion_tokens": 1}}
    reader = sglang_engine.Reader({"prompt": [1]})
    assert [piece.text for piece in reader.read(msgspec.json.encode(chunk))] == ["x"]
    with pytest.raises(Garbage):
        sglang_engine.Reader({"prompt": [1]}).read(msgspec.json.encode(chunk | wrong))
    with pytest.raises(EngineError):
        reader.read(b'{"error": {"message": "no", "code": 400}}')


def test_logprobs_of_another_number_of_tokens_are_garbage() -> None:
    table = {"tokens": ["a"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None}
    with pytest.raises(Garbage):
        read_chunk(Dialect.COMPLETION, {"choices": [{"index": 0, "text": "a", "logprobs": table}]})


@given(st.data())
def test_events_are_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    sent = [b'{"a":1}', b"[DONE]", '{"é":"\\n"}'.encode(), b"{}"]
    stream = b": keep-alive\n\n" + b"".join(b"data: " + one + b"\r\n\n" for one in sent[:1])
    stream += b"".join(b"data: " + one + b"\n\n" for one in sent[1:]) + b"event: x\n\n"
    splitter, found = EventSplitter(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == sent


def test_an_event_without_end_is_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_daemon.scheduler.engine_streams.EVENT_BYTES_MAX", 100)
    splitter = EventSplitter()
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(Garbage, match="too long"):
        splitter.feed(b"x" * 20)


@pytest.mark.parametrize("request_", [CHAT, COMPLETION, PLAIN_CHAT], ids=["chat", "completion", "no ids"])
@given(
    text=st.text(),
    ids=st.lists(st.integers(0, 1 << 20), max_size=4),
    ending=st.sampled_from([(None, None), ("stop", None), ("stop", 7), ("stop", '"\\%s'), ("length", None)]),
    name=st.sampled_from(["m", 'a "model" of 100%s']),
)
def test_the_short_way_to_write_a_chunk_writes_the_same(
    request_: Request, text: str, ids: list[int], ending: tuple[str | None, Any], name: str
) -> None:
    # With the usage asked for, the chunk that ends the last choice is not kept back for the turn's record.
    request_ = msgspec.structs.replace(request_, include_usage=True)
    writer = openai.ChunkWriter(request_, "t", name, 1)
    piece = Piece(1, text, ids, finish_reason=ending[0], stop_reason=ending[1])
    (short,) = documents(writer.events(piece, 0))
    assert short == writer._chunk(piece)


# ---- the seam -------------------------------------------------------------------------------------


class Tokenizer:
    """Upstream's /detokenize, for a sentence-piece-like model: the first space of a text is dropped."""

    words = {1: " go", 2: " left", 3: "<eos>", 4: "\ufffd"}  # noqa: RUF012

    async def detokenize(self, url: str, model: str, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens).removeprefix(" ")


async def test_text_keeps_the_space_that_a_tokenizer_trims() -> None:
    assert await text_so_far(Tokenizer(), "", "m", [1], [2, 1]) == " left go"  # type: ignore[arg-type]


async def test_special_tokens_are_those_with_a_text_that_was_not_shown() -> None:
    specials = SpecialTokens(Tokenizer(), "m")  # type: ignore[arg-type]
    await specials.learn("", [3, 4])
    assert specials.without([1, 3, 4, 2]) == [1, 4, 2]


def test_text_after_what_was_shown() -> None:
    assert text_after("ab", "abcd") == "cd"
    assert text_after("", "abcd") == "abcd"
    assert text_after("abcd", "ab") == ""


# ---- turns ----------------------------------------------------------------------------------------


def turn(name: str = "t") -> Turn:
    return Turn(
        key=TurnId(f"j/{name}"), turn_id=name, named=True, job=JobId("j"), trajectory="w", model="m",
        request=CHAT, now_s=0.0,
    )  # fmt: skip


def test_a_turn_has_one_outcome_and_counts_add_up() -> None:
    book = TurnBook()
    turns = [turn(str(number)) for number in range(4)]
    for each in turns:
        book.open(each)
    assert book.find(JobId("j"), "2") is turns[2]
    book.settle(turns[0], answer_of([], Dialect.CHAT))
    book.settle(turns[1], Failure(502, "x", "y"))
    book.settle(turns[2], Cancelled())
    with pytest.raises(AssertionError):
        book.settle(turns[0], Cancelled())
    turns[3].attempt = Attempt(ReplicaId("r"), 1, WeightVersion(0), 0)
    counts = book.snapshot()
    assert (counts["arrived"], counts["finished"], counts["failed"], counts["cancelled"]) == (4, 1, 1, 1)
    assert (counts["queued"], counts["in_flight"]) == (0, 1)
    assert book.by_replica() == {"r": 1}
    assert book.find(JobId("j"), "2") is None


def test_an_opening_is_shown_with_the_first_output_only() -> None:
    made = turn()
    made.add([Piece(extra={"role": "assistant"}, prompt_token_ids=[5])], 0.0)
    assert made.pieces == []
    made.add([Piece(text="a", token_ids=[1])], 0.0)
    (piece,) = made.pieces
    assert (piece.extra, piece.prompt_token_ids, piece.text) == ({"role": "assistant"}, [5], "a")


def test_versions_span_the_tokens_of_their_attempt() -> None:
    made = turn()
    for version, tokens in ((0, [1, 2]), (1, []), (2, [3])):
        made.attempt = Attempt(ReplicaId("r"), 1, WeightVersion(version), made.token_count)
        made.add([Piece(token_ids=tokens)], 0.0)
        made.attempt.tokens = len(tokens)
        made.close_attempt("cut")
    assert made.weight_versions == [(0, 1, 0), (2, 2, 2)]


def test_an_update_under_a_running_attempt_begins_a_new_span() -> None:
    made = turn()
    made.attempt = Attempt(ReplicaId("r"), 1, WeightVersion(0), 0)
    made.note_version(WeightVersion(1))  # before the first token: the report was late
    for version, tokens in ((1, 3), (1, 2), (2, 4)):
        made.note_version(WeightVersion(version))
        made.attempt.tokens += tokens
    made.close_attempt("finished")
    assert made.weight_versions == [(0, 4, 1), (5, 8, 2)]


def test_shown_output_cannot_be_forgotten() -> None:
    made = turn()
    made.add([Piece(text="a", token_ids=[1])], 0.0)
    made.forget_output()
    assert made.token_count == 0
    made.shown = True
    with pytest.raises(AssertionError):
        made.forget_output()
