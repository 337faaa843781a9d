#!/usr/bin/env python3
"""A stand-in for `nvidia-cuda-mps-control`, with its state in files of the daemon's folder (beside `pipe/`).

    servers       {"<server pid>": [client pids]}; not there: no daemon runs
    commands      every command it was given, one a line, with the time on the monotonic clock
    stubborn      if there, clients survive terminate_client

`terminate_client` takes the client off the list; the process itself lives on, as with the real one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    home = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).parent
    state = home / "servers"
    if "-d" in sys.argv:
        (home / "environ").write_text(json.dumps(dict(os.environ)))
        state.write_text("{}")
        return 0
    command = sys.stdin.read().strip()
    with (home / "commands").open("a") as log:
        log.write(f"{time.monotonic_ns()} {command}\n")
    if not state.exists():
        print("Cannot find MPS control daemon process", file=sys.stderr)
        return 1
    servers: dict[str, list[int]] = json.loads(state.read_text())
    name, *arguments = command.split()
    if name == "get_server_list":
        print("\n".join(servers))
    elif name == "get_client_list":
        print("\n".join(map(str, servers[arguments[0]])))
    elif name == "terminate_client":
        if not (home / "stubborn").exists():
            servers[arguments[0]].remove(int(arguments[1]))
            state.write_text(json.dumps(servers))
    elif name == "quit":
        state.unlink()
    else:
        print(f"Unknown command {name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
