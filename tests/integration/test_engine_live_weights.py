"""Weight deltas onto a running engine: against the trainer's digests and a freshly loaded engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from engine_world import TOKEN, EnginePair

from rose.core.readings import GateMode
from rose.units import JobId, WeightVersion
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose.weights.container import write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version

pytestmark = pytest.mark.engine

JOB = JobId("job-0")
TOKENS = 48
PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(40 + 8 * i)] for i in range(6)]
SCENARIOS = Path(__file__).parent / "scenarios"
State = dict[str, Bits]


class Version(NamedTuple):
    number: int
    state: State
    directory: Path
    """Of the delta on the version before; unused for version 0."""

    @property
    def digests(self) -> dict[str, str]:
        return digest_state(self.state)


class Chain:
    """Versions of the rollout model, each a small random step from the one before."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self.checkpoint, self.directory = checkpoint, directory
        state = tensorfile.parse(np.fromfile(checkpoint / "model.safetensors", np.uint8)).tensors
        self.versions = [Version(0, dict(state), directory / "v0")]

    @property
    def held(self) -> Version:
        return self.versions[-1]

    def step(self, base: Version | None = None, number: int | None = None) -> Version:
        """A next version, not yet held by anybody."""
        base = base or self.held
        number = base.number + 1 if number is None else number
        rng = np.random.default_rng(number)
        state: State = {}
        for name, bits in base.state.items():
            words = bits.words.copy()
            chosen = rng.choice(words.size, max(1, words.size // 50), replace=False)
            words[chosen] ^= rng.integers(1, 64, chosen.size).astype("<u2")  # mantissa bits: values stay near
            state[name] = Bits(bits.dtype, bits.shape, words)
        directory = self.directory / f"v{number}-{len(list(self.directory.iterdir()))}"
        base_number = WeightVersion(base.number)
        write_version(directory, encode_version(JOB, WeightVersion(number), base_number, base.state, state))
        return Version(number, state, directory)

    def write_checkpoint(self, version: Version, directory: Path) -> Path:
        shutil.copytree(self.checkpoint, directory)
        (directory / "model.safetensors").write_bytes(tensorfile.encode(version.state, {"format": "pt"}))
        return directory


@pytest.fixture(scope="module")
def chain(engine_pair: EnginePair, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(engine_pair.models.rollout, tmp_path_factory.mktemp("versions"))


def update(pair: EnginePair, version: Version, base: int, *, abort: bool = False) -> httpx.Response:
    body = {
        "version": version.number,
        "base_version": base,
        "path": str(version.directory),
        "abort_in_flight": abort,
    }
    return pair.rollout.rose("POST", "weights/update", body)


def advance(pair: EnginePair, chain: Chain, *, abort: bool = False) -> dict[str, Any]:
    """Bring the engine to a next version."""
    version = chain.step()
    answer = update(pair, version, chain.held.number, abort=abort)
    assert answer.status_code == 200, answer.text
    chain.versions.append(version)
    report: dict[str, Any] = answer.json()
    return report


def live_digests(pair: EnginePair) -> dict[str, str]:
    answer = pair.rollout.rose("GET", "weights/digests")
    assert answer.status_code == 200, answer.text
    digests: dict[str, str] = answer.json()["digests"]
    return digests


def greedy(pair: EnginePair) -> list[list[int]]:
    return [pair.rollout.complete("rollout", prompt, TOKENS)["token_ids"] for prompt in PROMPTS]


def fresh_tokens(checkpoint: Path, prompts: Path) -> list[list[int]]:
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, str(SCENARIOS / "fresh_engine.py"), str(checkpoint), str(prompts), str(TOKENS)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    facts = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert facts, done.stdout[-2000:] + done.stderr[-2000:]
    tokens: list[list[int]] = json.loads(facts[0].removeprefix("FACTS "))
    return tokens


class Streamed:
    """A long request that runs in a thread."""

    def __init__(self, pair: EnginePair, tokens: int, request_id: str = "") -> None:
        self.choice: dict[str, Any] = {}
        headers = {"x-request-id": request_id} if request_id else {}
        before = pair.replica().tokens

        def work() -> None:
            body = {"model": "rollout", "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = pair.rollout.http.post("/v1/completions", json=body, headers=headers)
            self.choice = answer.json()["choices"][0]

        self.thread = threading.Thread(target=work)
        self.thread.start()
        deadline = time.monotonic() + 60
        while pair.replica().tokens < before + 20:
            assert time.monotonic() < deadline, "the request never ran"
            time.sleep(0.01)

    def result(self) -> dict[str, Any]:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.choice


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "engine"), ("POST", "weights/update"), ("GET", "weights/digests"), ("POST", "abort")],
)
def test_no_endpoint_answers_without_the_token(engine_pair: EnginePair, method: str, path: str) -> None:
    for token in ("wrong", TOKEN[:-1], TOKEN + "x"):
        answer = engine_pair.rollout.rose(method, path, {} if method == "POST" else None, token=token)
        assert answer.status_code == 401, answer.text
        assert answer.json()["error"] == "unauthorized"
    bare = engine_pair.rollout.http.request(method, f"/rose/v1/{path}")
    assert bare.status_code == 401


def test_no_dev_mode_route_is_open(engine_pair: EnginePair) -> None:
    for engine in (engine_pair.serving, engine_pair.rollout):
        for path in ("/pause", "/update_weights", "/collective_rpc", "/sleep"):
            assert engine.http.post(path, json={}).status_code == 404


def test_the_engine_says_what_it_is(engine_pair: EnginePair) -> None:
    answer = engine_pair.rollout.rose("GET", "engine").json()
    assert (answer["role"], answer["name"], answer["model"]) == ("rollout", "r0", "rollout")
    assert answer["kv_total_blocks"] == 255
    assert answer["block_tokens"] == 32
    assert answer["vllm_version"].startswith("0.32.")


def test_live_digests_are_those_of_the_checkpoint(engine_pair: EnginePair, chain: Chain) -> None:
    assert live_digests(engine_pair) == chain.held.digests


def test_malformed_bodies_are_refused(engine_pair: EnginePair) -> None:
    for body in ({}, {"version": "1", "base_version": 0, "path": "x"}, {"version": 1, "unknown": 2}, []):
        assert engine_pair.rollout.rose("POST", "weights/update", body).status_code == 400
    assert engine_pair.rollout.rose("POST", "abort", {"ids": []}).status_code == 400


def test_a_delta_on_another_base_changes_nothing(engine_pair: EnginePair, chain: Chain) -> None:
    before = live_digests(engine_pair)
    version = chain.step()
    answer = update(engine_pair, version, chain.held.number + 5)
    assert (answer.status_code, answer.json()["error"]) == (409, "wrong_base")
    assert answer.json()["version_held"] == chain.held.number
    # Right number, other bytes: a base that drifted.
    drifted = Version(chain.held.number, chain.step().state, chain.held.directory)
    answer = update(engine_pair, chain.step(base=drifted), chain.held.number)
    assert (answer.status_code, answer.json()["error"]) == (409, "wrong_base")
    assert live_digests(engine_pair) == before


@pytest.mark.parametrize(
    "fault", ["flipped", "truncated", "missing", "no_manifest", "false_digest", "not_there"]
)
def test_a_corrupt_delta_changes_nothing(engine_pair: EnginePair, chain: Chain, fault: str) -> None:
    before = live_digests(engine_pair)
    version = chain.step()
    bucket = next(version.directory.glob("bucket-*"))
    data = bytearray(bucket.read_bytes())
    if fault == "flipped":
        data[-1] ^= 1
        bucket.write_bytes(data)
    elif fault == "truncated":
        bucket.write_bytes(data[:-7])
    elif fault == "missing":
        bucket.unlink()
    elif fault == "no_manifest":
        (version.directory / "manifest.json").unlink()
    elif fault == "not_there":
        version = version._replace(directory=Path("/nonexistent/v1"))
    else:
        digests = version.digests
        digests["lm_head.weight"] = "0" * 32
        base = WeightVersion(chain.held.number)
        lying = encode_version(
            JOB, WeightVersion(version.number), base, chain.held.state, version.state, target_digests=digests
        )
        version = version._replace(directory=version.directory.with_name(f"lying-{version.number}"))
        write_version(version.directory, lying)
    answer = update(engine_pair, version, chain.held.number)
    assert (answer.status_code, answer.json()["error"]) == (422, "corrupt_delta"), answer.text
    assert live_digests(engine_pair) == before
    assert engine_pair.rollout.rose("GET", "engine").json()["weight_version"] == chain.held.number


def test_an_updated_engine_is_the_new_checkpoint(
    engine_pair: EnginePair, chain: Chain, tmp_path: Path
) -> None:
    before = greedy(engine_pair)
    assert greedy(engine_pair) == before  # and now every prompt is in the prefix cache
    assert all(len(set(tokens)) >= 20 for tokens in before)
    report = advance(engine_pair, chain)
    assert report["version"] == chain.held.number
    assert report["changed"] > 0
    assert set(report["ms"]) == {"stage", "pause", "apply", "total"}
    assert live_digests(engine_pair) == chain.held.digests
    updated = greedy(engine_pair)
    fresh = fresh_tokens(chain.write_checkpoint(chain.held, tmp_path / "fresh"), tmp_path / "prompts.json")
    assert updated == fresh
    assert greedy(engine_pair) == fresh  # from the prefix cache of the new version
    # The negative control: had the update not been written, the comparison above would have failed.
    assert before != fresh
    assert engine_pair.replica().weight_version == chain.held.number
    assert engine_pair.rollout.rose("GET", "engine").json()["weight_version"] == chain.held.number


def test_a_request_in_flight_goes_on_where_that_is_wanted(engine_pair: EnginePair, chain: Chain) -> None:
    request = Streamed(engine_pair, 400)
    advance(engine_pair, chain, abort=False)
    choice = request.result()
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 400)
    assert live_digests(engine_pair) == chain.held.digests


def test_a_request_in_flight_is_aborted_where_that_is_wanted(engine_pair: EnginePair, chain: Chain) -> None:
    request = Streamed(engine_pair, 1500)
    advance(engine_pair, chain, abort=True)
    choice = request.result()
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 1500
    assert engine_pair.rollout.complete("rollout", [1, 2, 3], 4)["finish_reason"] == "length"


def test_an_update_does_not_wait_for_the_gate(engine_pair: EnginePair, chain: Chain) -> None:
    request = Streamed(engine_pair, 300)
    engine_pair.gate.set(mode=GateMode.CLOSED)
    try:
        advance(engine_pair, chain, abort=False)
        assert live_digests(engine_pair) == chain.held.digests
        assert engine_pair.replica().gate_open == 0
    finally:
        engine_pair.gate.set(mode=GateMode.OPEN)
    assert request.result()["finish_reason"] == "length"


def test_of_two_updates_at_once_one_wins(engine_pair: EnginePair, chain: Chain) -> None:
    version, base = chain.step(), chain.held.number
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(update(engine_pair, version, base))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chain.versions.append(version)
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert {answer.json()["error"] for answer in answers if answer.status_code == 409} <= {
        "busy",
        "wrong_base",
    }
    assert live_digests(engine_pair) == chain.held.digests


def test_abort_ends_named_requests_with_what_they_have(engine_pair: EnginePair) -> None:
    request = Streamed(engine_pair, 1500, request_id="turn-17")
    assert engine_pair.rollout.rose("POST", "abort", {"request_ids": ["turn-18"]}).json() == {"aborted": 0}
    assert engine_pair.rollout.rose("POST", "abort", {"request_ids": ["turn-17"]}).json() == {"aborted": 1}
    choice = request.result()
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 1500


def test_abort_all_works_behind_a_closed_gate(engine_pair: EnginePair) -> None:
    request = Streamed(engine_pair, 1500)
    engine_pair.gate.set(mode=GateMode.CLOSED)
    try:
        assert engine_pair.rollout.rose("POST", "abort", {"all": True}).json() == {"aborted": 1}
        assert request.result()["finish_reason"] == "abort"
    finally:
        engine_pair.gate.set(mode=GateMode.OPEN)
