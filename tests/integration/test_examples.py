"""The examples, as their readers run them: beside a scheduler and engines that are processes too."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_host import EXAMPLES, GatewayHost, gateway_host

from rose.client import Job, Scheduler

SCRIPT: list[dict[str, Any]] = [
    {"tool": "run", "arguments": {"command": "echo hello > hello.txt && cat hello.txt"}},
    {"content": "Done."},
]
SANDBOX_SCRIPT: list[dict[str, Any]] = [
    {"tool": "bash", "arguments": {"command": "cd /tmp; cd -; WORD=hello"}},
    {"tool": "bash", "arguments": {"command": "echo $WORD > answer.txt; false"}},
    {"content": "The file is there."},
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHost]:
    """Two engines of a model that babbles, one each of models that do what a script says."""
    with gateway_host(tmp_path_factory.mktemp("host")) as made:
        made.engine("policy")
        made.engine("policy")
        made.engine("coder", script=SCRIPT)
        made.engine("sandboxed", script=SANDBOX_SCRIPT)
        made.scheduler()
        done = made.run(
            "make_job.py", "--base-url", made.url, "--job", "grpo", "--model", "policy", "--replicas", "2"
        )
        assert done.stdout.startswith("job grpo: model policy on 127.0.0.1:"), done.stderr
        made.job("coding", "coder")
        made.job("sandboxes", "sandboxed")
        yield made


def test_openai_client(host: GatewayHost) -> None:
    done = host.run("openai_client.py", "--base-url", host.url, "--job", "grpo")
    assert done.returncode == 0, done.stderr
    assert "sent again under its id: the same answer" in done.stdout
    assert done.stdout.count("attempts [{'replica': ") == 2


def test_a_coding_agent_knows_nothing_but_a_base_url(host: GatewayHost) -> None:
    done = host.run(
        "agent_cli.py", "Say hello in hello.txt",
        OPENAI_BASE_URL=f"{host.url}/rose/v1/jobs/coding/sessions/alone/v1", OPENAI_API_KEY="unused",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"$ {SCRIPT[0]['arguments']['command']}", "hello", "Done."]


def test_a_group_of_coding_agents_becomes_samples(host: GatewayHost) -> None:
    before = host.status()["turns"]["finished"]
    done = host.run(
        "train_coding_agent.py", "--base-url", host.url, "--job", "coding", "--runs", "3",
        "--check", "grep -q hello hello.txt", "--out", "samples.jsonl",
        "--", sys.executable, str(EXAMPLES / "agent_cli.py"), "Write hello into hello.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 runs, exit codes [0, 0, 0], rewards [1.0, 1.0, 1.0], 6 turns in samples.jsonl\n"
    samples = [json.loads(line) for line in (host.directory / "samples.jsonl").read_text().splitlines()]
    assert len({sample["trajectory"] for sample in samples}) == 3
    assert len({sample["turn"] for sample in samples}) == len(samples) == 6
    for sample in samples:
        assert sample["prompt"]
        assert sample["output"]
        assert (sample["reward"], sample["advantage"]) == (1.0, 0.0)
        assert sample["weight_versions"] == [[0, len(sample["output"]) - 1, None]]
    assert host.status()["turns"]["finished"] == before + 6


def test_one_shot_samples_find_their_prompt(host: GatewayHost) -> None:
    command = ("one_shot.py", "--base-url", host.url, "--job", "grpo", "--groups", "2", "--group-size", "6")
    # How much the first run finds is a matter of how fast its client is; then the prompt is known.
    for _ in range(2):
        done = host.run(*command)
        assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("12 samples; ")
    assert int(first.split()[2]) > 0, "samples that come later find the prompt of earlier ones"
    assert "127.0.0.1:" in second


def test_latent_prefixes(host: GatewayHost) -> None:
    done = host.run("latent_prefix.py", "--base-url", host.url, "--job", "grpo", "--hidden-size", "8")
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [f"prefix {n}" for n in range(4)]


def test_chunks_of_an_export_are_its_tokens(host: GatewayHost) -> None:
    done = host.run("openai_client.py", "--base-url", host.url, "--job", "grpo")
    assert done.returncode == 0, done.stderr
    done = host.run("chunk_credit.py", "--base-url", host.url, "--job", "grpo", "--chunk-tokens", "5")
    assert done.returncode == 0, done.stderr
    parts = [json.loads(line) for line in done.stdout.splitlines()]
    walks: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        walks.setdefault(part["trajectory"], []).append(part)
        assert 1 <= len(part["token_ids"]) <= 5
    for mine in walks.values():
        shares = [part["credit"] for part in mine]
        assert shares == sorted(shares), "the end is nearer to the reward"
    job = Job(Scheduler(host.url), "grpo")
    for turn in job.turns():
        joined = [token for part in parts if part["turn"] == turn["turn_id"] for token in part["token_ids"]]
        assert joined == turn["choices"][0]["token_ids"]


def test_sandboxed_episodes(host: GatewayHost) -> None:
    port = _free_port()
    host.start("sandbox_server.py", "--port", str(port))
    environment = f"http://127.0.0.1:{port}"
    _until_it_answers(f"{environment}/apis/envs/sandbox/v1/get_status")
    done = host.run(
        "sandbox_agent.py", "--base-url", host.url, "--job", "sandboxes", "--environment", environment,
        "--episodes", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("rewards [1.0, 1.0, 1.0]")


def test_every_example_says_what_it_does_and_is_run_here() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tests, f"no test runs {path.name}"
        text = path.read_text()
        assert f"python examples/{path.name} " in text.partition('"""\n\nfrom')[0], "how to run it"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_it_answers(url: str, within_s: float = 60) -> None:
    due_s = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.URLError:
            assert time.monotonic() < due_s, f"{url} does not answer"
            time.sleep(0.05)
