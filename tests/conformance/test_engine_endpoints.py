"""Every endpoint that ROSE uses on an engine, with the shapes it relies on: one suite, for vLLM and the mock.

What passes here on both is what tests with the mock may be trusted for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose.boards import BoardPaths, BoardReader
from rose.core.readings import ReplicaReading
from rose.engines.vllm.settings import PluginSettings

TOKEN = "sesame-of-the-mock"
MODEL = "rollout"
MESSAGES = [{"role": "user", "content": "Which way to the goal?"}]
PROMPT = [72, 101, 108, 108, 111]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class Target(NamedTuple):
    """The engine under test."""

    http: httpx.Client
    token: str
    boards: BoardPaths
    name: str

    def rose(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.token}"}
        return self.http.request(method, f"/rose/v1/{path}", json=body, headers=headers)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": MODEL} | body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer; it must end with [DONE]."""
        with self.http.stream("POST", path, json={"model": MODEL} | STREAMED | body) as answer:
            assert answer.status_code == 200, answer.read()
            data = ""
            for line in answer.iter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data != "[DONE]":
                    yield json.loads(data)
            assert data == "[DONE]"


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("mock")
    secret = root / "token"
    secret.write_text(TOKEN)
    settings = PluginSettings(role="rollout", name="r0", run_dir=str(root), token_file=str(secret))
    process = subprocess.Popen(
        [sys.executable, "-m", "rose_daemon.mock_engine", "--served-model-name", MODEL, "--token-ms", "1"],
        env=os.environ | settings.to_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Target(http, TOKEN, BoardPaths(root), "r0")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["mock", pytest.param("vllm", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> Target:
    if request.param == "mock":
        target: Target = request.getfixturevalue("mock")
        return target
    pair = request.getfixturevalue("engine_pair")
    return Target(pair.rollout.http, pair.rollout.token, pair.boards, "r0")


# ---- vLLM's own ------------------------------------------------------------------------------------


def test_health(engine: Target) -> None:
    assert engine.http.get("/health").status_code == 200


def test_models_name_the_context_length(engine: Target) -> None:
    (card,) = engine.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 2048


def test_metrics(engine: Target) -> None:
    names = {
        sample.name
        for family in text_string_to_metric_families(engine.http.get("/metrics").text)
        for sample in family.samples
    }
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names


def test_streamed_chat_carries_token_ids(engine: Target) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    *chunks, usage = engine.stream("/v1/chat/completions", body)
    first = chunks[0]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    prompt = first["prompt_token_ids"]
    assert prompt
    assert all(isinstance(token, int) for token in prompt)
    assert all(chunk.get("prompt_token_ids") is None for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert len(tokens) == 12
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (len(prompt), 12)


def test_a_completion_continues_a_chat_from_its_tokens(engine: Target) -> None:
    """What the gateway does after a cut: same tokens as if nothing had happened."""
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    chunks = list(engine.stream("/v1/chat/completions", body))
    prompt = chunks[0]["prompt_token_ids"]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    rest = {"prompt": prompt + tokens[:10], "max_tokens": 14, "temperature": 0, "ignore_eos": True}
    continued = [
        token
        for chunk in engine.stream("/v1/completions", rest)
        if chunk["choices"]
        for token in chunk["choices"][0]["token_ids"]
    ]
    assert continued == tokens[10:]


def test_streamed_completion_from_token_ids(engine: Target) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    *chunks, usage = engine.stream("/v1/completions", body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert sum(len(choice["token_ids"]) for choice in choices) == 6
    assert all(isinstance(choice["text"], str) for choice in choices)
    assert choices[-1]["finish_reason"] == "length"
    assert usage["usage"]["total_tokens"] == len(PROMPT) + 6


def test_logprobs_of_chat(engine: Target) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    entries = [
        entry
        for chunk in engine.stream("/v1/chat/completions", body | {"ignore_eos": True})
        if chunk["choices"] and chunk["choices"][0].get("logprobs")
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert len(entries) == 3
    for entry in entries:
        assert entry["logprob"] <= 0
        assert entry["bytes"] is not None
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy: the sampled one comes first


def test_logprobs_of_completions_have_one_alternative_more(engine: Target) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    for chunk in engine.stream("/v1/completions", body | {"return_tokens_as_token_ids": False}):
        if not chunk["choices"]:
            continue
        table = chunk["choices"][0]["logprobs"]
        for token, logprob, top in zip(
            table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True
        ):
            assert next(iter(top)) == token
            assert top[token] == pytest.approx(logprob)
            assert 1 <= len(top) <= 2  # alternatives that read the same are one


def test_tokenize_and_detokenize(engine: Target) -> None:
    tokens = engine.post("/tokenize", {"prompt": "Grüße", "add_special_tokens": False})["tokens"]
    assert engine.post("/detokenize", {"tokens": tokens})["prompt"] == "Grüße"
    assert "\ufffd" in engine.post("/detokenize", {"tokens": tokens[:3]})["prompt"]


def test_detokenize_shows_special_tokens_and_a_chat_hides_them(engine: Target) -> None:
    """The difference that the gateway's `SpecialTokens` learns from."""
    templated = engine.post("/tokenize", {"messages": MESSAGES})["tokens"]
    shown = engine.post("/detokenize", {"tokens": templated})["prompt"]
    plain = engine.post("/tokenize", {"prompt": MESSAGES[0]["content"], "add_special_tokens": False})[
        "tokens"
    ]
    special = [token for token in templated if token >= 256]
    assert MESSAGES[0]["content"] in shown
    assert special
    assert not set(special) & set(plain)
    assert engine.post("/detokenize", {"tokens": special[:1]})["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("/v1/completions", {"model": MODEL}, 400),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 2048, "max_tokens": 1}, 400),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "temperature": -1}, 400),
    ],
)
def test_bad_requests(engine: Target, path: str, body: dict[str, Any], status: int) -> None:
    answer = engine.http.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    assert error["code"] == status


def test_a_budget_beyond_the_context_is_cut_to_it(engine: Target) -> None:
    body = {"prompt": [1] * 2040, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    answer = engine.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


# ---- ROSE's ----------------------------------------------------------------------------------------

STEPS = ("update", "stage", "apply", "undo", "settle")
OURS = [("GET", "engine"), ("GET", "weights/digests"), ("POST", "abort")]
OURS += [("POST", f"weights/{step}") for step in STEPS]


@pytest.mark.parametrize(("method", "path"), OURS)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}])
def test_our_endpoints_ask_for_the_token(
    engine: Target, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = engine.http.request(method, f"/rose/v1/{path}", json={}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"] == "unauthorized"


def test_engine_says_what_it_is(engine: Target) -> None:
    about = engine.rose("GET", "engine").json()
    assert (about["role"], about["name"], about["model"]) == ("rollout", "r0", MODEL)
    assert about["weight_version"] >= 0
    assert about["kv_total_blocks"] > 0
    assert about["block_tokens"] == 32
    assert {"vllm_version", "rose_version"} <= about.keys()


def test_the_board_agrees(engine: Target) -> None:
    reading = BoardReader(engine.boards.replica(engine.name), ReplicaReading).read()
    assert isinstance(reading, ReplicaReading)
    assert reading.weight_version == engine.rose("GET", "engine").json()["weight_version"]
    assert time.monotonic_ns() - reading.stamp_ns < 5_000_000_000


def test_a_delta_on_another_base_is_refused(engine: Target, tmp_path: Path) -> None:
    held = engine.rose("GET", "engine").json()["weight_version"]
    body = {"version": held + 8, "base_version": held + 7, "path": str(tmp_path), "abort_in_flight": False}
    answer = engine.rose("POST", "weights/update", body)
    assert (answer.status_code, answer.json()["error"]) == (409, "wrong_base")
    assert answer.json()["version_held"] == held


def test_a_delta_that_is_not_there_is_refused(engine: Target, tmp_path: Path) -> None:
    held = engine.rose("GET", "engine").json()["weight_version"]
    (tmp_path / "manifest.json").write_text("{ this is no manifest")
    body = {"version": held + 1, "base_version": held, "path": str(tmp_path), "abort_in_flight": False}
    answer = engine.rose("POST", "weights/update", body)
    assert (answer.status_code, answer.json()["error"]) == (422, "corrupt_delta")
    assert answer.json()["detail"]
    assert engine.rose("GET", "engine").json()["weight_version"] == held


def test_what_is_not_staged_is_not_applied_and_nothing_is_taken_back(engine: Target) -> None:
    held = engine.rose("GET", "engine").json()["weight_version"]
    answer = engine.rose("POST", "weights/apply", {"version": held + 1, "abort_in_flight": False})
    assert (answer.status_code, answer.json()["error"]) == (409, "not_staged")
    assert answer.json()["version_held"] == held
    for step in ("undo", "settle"):
        answer = engine.rose("POST", f"weights/{step}", {})
        assert (answer.status_code, answer.json()["version_held"]) == (200, held)


def test_a_staging_is_refused_as_an_update_is(engine: Target, tmp_path: Path) -> None:
    held = engine.rose("GET", "engine").json()["weight_version"]
    (tmp_path / "manifest.json").write_text("{ this is no manifest")
    body = {"version": held + 8, "base_version": held + 7, "path": str(tmp_path)}
    answer = engine.rose("POST", "weights/stage", body)
    assert (answer.status_code, answer.json()["error"]) == (409, "wrong_base")
    answer = engine.rose("POST", "weights/stage", body | {"base_version": held})
    assert (answer.status_code, answer.json()["error"]) == (422, "corrupt_delta")


def test_digests_name_every_parameter(engine: Target) -> None:
    document = engine.rose("GET", "weights/digests").json()
    assert document["version"] == engine.rose("GET", "engine").json()["weight_version"]
    assert document["digests"]
    for name, digest in document["digests"].items():
        assert name
        assert len(digest) == 32
        int(digest, 16)


def test_an_aborted_stream_ends_with_what_it_has(engine: Target) -> None:
    seen = threading.Event()
    chunks: list[dict[str, Any]] = []

    def read() -> None:
        body = {"messages": MESSAGES, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
        for chunk in engine.stream("/v1/chat/completions", body):
            chunks.append(chunk)
            if len(chunks) > 5:
                seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert seen.wait(30)
    assert engine.rose("POST", "abort", {"all": True}).json() == {"aborted": 1}
    reader.join(30)
    assert not reader.is_alive()
    endings = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert endings[-1] == "abort"
    assert all(ending is None for ending in endings[:-1])
    assert engine.rose("POST", "abort", {"all": True}).json() == {"aborted": 0}


def test_an_abort_by_name(engine: Target) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
        answers.append(engine.http.post("/v1/completions", json=body, headers={"X-Request-Id": "turn-7-1"}))

    asker = threading.Thread(target=ask)
    asker.start()
    due_s = time.monotonic() + 30
    while engine.rose("POST", "abort", {"request_ids": ["turn-7-1"]}).json() != {"aborted": 1}:
        assert time.monotonic() < due_s
        time.sleep(0.02)
    asker.join(30)
    (answer,) = answers
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
