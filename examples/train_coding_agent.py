"""Collect a group of a coding agent's trajectories: any command line that takes OPENAI_BASE_URL.

The agent is left as it is.  Each run gets a directory and a base URL of its own; the base URL names the job
and the trajectory, so the gateway keeps every turn with its token ids.  A shell command scores the result.

python examples/train_coding_agent.py --job grpo --runs 4 --check "grep -q hello hello.txt" \\
    -- python examples/agent_cli.py "Write hello into hello.txt"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rose.client import Job, Scheduler


def run_agent(options: argparse.Namespace, session: str) -> tuple[int, float]:
    """Run the agent once; its exit code and its reward."""
    root = f"{options.base_url}/rose/v1/jobs/{options.job}/sessions/{session}/v1"
    environment = os.environ | {"OPENAI_BASE_URL": root, "OPENAI_API_BASE": root}
    environment.setdefault("OPENAI_API_KEY", "unused")
    with tempfile.TemporaryDirectory() as directory:
        agent = subprocess.run(
            options.agent, cwd=directory, env=environment, check=False, timeout=options.timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        done = subprocess.run(options.check, shell=True, cwd=directory, check=False, capture_output=True)
    return agent.returncode, float(done.returncode == 0)


def samples(job: Job, session: str, reward: float, advantage: float) -> list[dict[str, Any]]:
    """The session's turns as training samples, oldest first."""
    return [
        {
            "trajectory": session,
            "turn": turn["turn_id"],
            "prompt": choice["prompt_token_ids"],
            "output": choice["token_ids"],
            "logprobs": choice["logprobs"],
            "weight_versions": turn["weight_versions"],
            "reward": reward,
            "advantage": advantage,
        }
        for turn in job.turns(trajectory=session, logprobs=True)
        for choice in turn["choices"]
    ]


def main() -> None:
    """One group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("--check", required=True, help="shell command; exit code 0 is a reward of 1")
    parser.add_argument("--out", type=Path, default=Path("samples.jsonl"))
    parser.add_argument("agent", nargs="+", help="the agent's command line, after --")
    options = parser.parse_args()
    options.agent = [str(Path(part).absolute()) if Path(part).is_file() else part for part in options.agent]
    job = Job(Scheduler(options.base_url, os.environ.get("OPENAI_API_KEY", "")), options.job)
    group = uuid.uuid4().hex[:8]
    sessions = [f"{group}-{number}" for number in range(options.runs)]
    with ThreadPoolExecutor(options.runs) as threads:
        runs = list(threads.map(lambda session: run_agent(options, session), sessions))
    codes, rewards = [code for code, _ in runs], [reward for _, reward in runs]
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) or 1.0
    count = 0
    with options.out.open("w", encoding="utf-8") as file:
        for session, reward in zip(sessions, rewards, strict=True):
            for sample in samples(job, session, reward, (reward - mean) / spread):
                file.write(json.dumps(sample) + "\n")
                count += 1
            job.finish_session(session)
    print(f"{options.runs} runs, exit codes {codes}, rewards {rewards}, {count} turns in {options.out}")


if __name__ == "__main__":
    main()
