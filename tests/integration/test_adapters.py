"""Frameworks' own clients on the gateway, where they are installed; else their contract, written down.

The packages' releases: trl 1.16, skyrl 0.4, verl 0.9.  Each contract test names the file it was read from.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_host import GatewayHost, gateway_host
from rose_daemon import mock_model

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed: {why}")
    for name, why in {
        "trl": "its contract is tested by unit/test_weight_stream.py and test_what_trls_client_asks",
        "skyrl": "its contract is tested by test_what_skyrls_client_asks",
        "verl": "it needs ray, which is not pinned here",
        "rock": "its contract is tested by test_examples.py's sandboxes",
    }.items()
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHost]:
    """Two engines, and the only job of the scheduler on them: these clients name none."""
    with gateway_host(tmp_path_factory.mktemp("host")) as made:
        made.engine("policy", token_ms=4)
        made.engine("policy", token_ms=4)
        made.scheduler()
        made.job("grpo", "policy", replicas=2)
        yield made


def ask(host: GatewayHost, path: str, body: Any = None, **headers: str) -> Any:
    """One call, with the JSON that comes back; fails for any other status than 200."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    request = urllib.request.Request(host.url + path, data, named)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


# ---- TRL -------------------------------------------------------------------------------------------


def test_what_trls_client_asks(host: GatewayHost) -> None:
    """As trl/generation/vllm_client.py of TRL 1.16 asks it and reads it."""
    assert ask(host, "/health") is not None
    model = ask(host, "/v1/models")["data"][0]["id"]
    sampling = {
        "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "max_tokens": 6, "logprobs": 0,
    }  # fmt: skip
    shown = {"model": model, "return_token_ids": True, "return_tokens_as_token_ids": True}
    prompts = [mock_model.encode("Which way?"), mock_model.encode("How far?")]
    choices = ask(host, "/v1/completions", {"prompt": prompts, **shown, **sampling})["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == prompts
    for choice in choices:
        names = choice["logprobs"]["tokens"]
        assert [int(name.removeprefix("token_id:")) for name in names] == choice["token_ids"]
        assert (
            len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == len(names)
        )
    chat = {"messages": [{"role": "user", "content": "Which way?"}], "logprobs": True, "top_logprobs": 0}
    answer = ask(host, "/v1/chat/completions", {**shown, **sampling, **chat})
    assert answer["prompt_token_ids"]
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert [int(entry["token"].removeprefix("token_id:")) for entry in entries] == choice["token_ids"]
    assert ask(host, "/reset_prefix_cache", {})["success"] is True


@needs["trl"]
def test_trls_own_client(host: GatewayHost) -> None:
    done = host.run("trl_rollout.py", "--base-url", host.url)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("generate: ") == 4


# ---- SkyRL -----------------------------------------------------------------------------------------


def test_what_skyrls_client_asks(host: GatewayHost) -> None:
    """As skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py of SkyRL 0.4 asks it."""
    prompt = ask(host, "/tokenize", {"model": "policy", "prompt": "Which way?", "add_special_tokens": True})
    sampling = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0}
    body = {"sampling_params": sampling, "model": "policy", "token_ids": prompt["tokens"]}
    (choice,) = ask(host, "/inference/v1/generate", body, X_Session_ID="walk-0")["choices"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert choice["finish_reason"] in ("stop", "length")
    text = ask(host, "/detokenize", {"model": "policy", "tokens": choice["token_ids"]})
    assert isinstance(text["prompt"], str)
    assert ask(host, "/finish_session?session_id=walk-0", b"")["finished"] is True
    ask(host, "/pause?mode=keep&clear_cache=false", {})
    ask(host, "/reset_prefix_cache", {"reset_running_requests": False})
    ask(host, "/resume", {})


@needs["skyrl"]
def test_skyrls_own_client(host: GatewayHost) -> None:
    done = host.run("skyrl_rollout.py", "--base-url", host.url, "--model", "policy")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" tokens, ended by ") == 2


# ---- verl, ROLL, ROCK ------------------------------------------------------------------------------


@needs["verl"]
def test_verls_rollout_server(host: GatewayHost) -> None:
    done = host.run("verl_rollout.py", "--base-url", host.url)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" tokens, completed, ") == 4


def test_what_rolls_proxy_asks(host: GatewayHost) -> None:
    """As roll/pipeline/agentic/llm_proxy/openai_proxy.py of ROLL asks it (2026; no package is published)."""
    done = host.run("roll_http.py", "--base-url", host.url, "--job", "grpo")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" sampled: ") == 2
