"""Create the job whose turns the other examples are, on ROSE's engines or on any that are registered.

python examples/make_job.py --base-url http://127.0.0.1:7700 --job grpo --model policy
"""

from __future__ import annotations

import argparse

from rose.client import Job


def main() -> None:
    """Create the job, and wait until a replica takes turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:7700")
    parser.add_argument("--job", default="grpo")
    parser.add_argument("--model", required=True)
    parser.add_argument("--replicas", type=int, default=1, help="dedicated replicas to ask for")
    options = parser.parse_args()
    # `unknown_version_ok`: also engines whose weights ROSE does not move, such as a vLLM server you started.
    job = Job.create(
        options.base_url, options.job, model=options.model, n_rl=options.replicas, unknown_version_ok=True
    )
    status = job.wait_for_replicas(options.replicas)
    names = ", ".join(replica.replica for replica in status.replicas)
    print(f"job {status.job}: model {status.model} on {names}")


if __name__ == "__main__":
    main()
