"""Take processes off MPS before they are killed.

Run by file path (`python -I -S release.py CONTROL PIPE_DIRECTORY PID...`), standard library only: the warden
of an engine calls it, whatever became of rosed.  SIGKILL of a client with work in flight may leave the server
and its other clients, serving among them, in an undefined state; `terminate_client` ends it cleanly.

Exit code 0: none of the processes is a client any more, so they may be killed.  1: that is not known (no
answer from the control daemon, or a client that stays), so they must not be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_ANSWER_S = 5.0
_GONE_S = 10.0
_POLL_S = 0.05


class ControlFailed(Exception):
    """The control daemon did not answer, or answered with an error."""


def ask(control: str, pipe_directory: str, command: str) -> str:
    """One command to the control daemon of that directory.  Raises ControlFailed."""
    environ = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": pipe_directory}
    try:
        done = subprocess.run(
            [control],
            input=command + "\n",
            env=environ,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ControlFailed(f"{command}: {error}") from None
    if done.returncode:
        raise ControlFailed(f"{command}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def pids_in(answer: str) -> list[int]:
    """The pids of an answer, one a line.  Raises ControlFailed for anything else."""
    try:
        return [int(line) for line in answer.split()]
    except ValueError:
        raise ControlFailed(f"unexpected answer: {answer.strip()[:200]}") from None


def clients(control: str, pipe_directory: str) -> dict[int, int]:
    """Client pid -> pid of its server.  Raises ControlFailed."""
    servers = pids_in(ask(control, pipe_directory, "get_server_list"))
    return {
        client: server
        for server in servers
        for client in pids_in(ask(control, pipe_directory, f"get_client_list {server}"))
    }


def release(control: str, pipe_directory: str, pids: set[int]) -> None:
    """Terminate those of `pids` that are clients, and wait until none is.  Raises ControlFailed."""
    deadline = time.monotonic() + _GONE_S
    asked: set[int] = set()
    while ours := {pid: server for pid, server in clients(control, pipe_directory).items() if pid in pids}:
        for client, server in ours.items():
            if client not in asked:
                ask(control, pipe_directory, f"terminate_client {server} {client}")
                asked.add(client)
        if time.monotonic() > deadline:
            raise ControlFailed(f"clients stay: {sorted(ours)}")
        time.sleep(_POLL_S)


def main() -> None:
    """Entry point; see the module's docstring."""
    control, pipe_directory, *pids = sys.argv[1:]
    try:
        release(control, pipe_directory, {int(pid) for pid in pids})
    except ControlFailed as error:
        sys.exit(f"MPS: {error}")


if __name__ == "__main__":
    main()
