"""The far end of `rose bench link`: moves a version to and from the relay at the near end, when told to.

    python -m rose_daemon.bench.link_worker CONFIG BYTES SEED

Reads `push` and `pull` from standard input, one a line, and answers each with the seconds it took.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rose import config as configuration
from rose.weights.relay.connecting import connect
from rose_daemon.bench.transfer import JOB, Puller, anchor, push
from rose_daemon.bench.worker import say


async def _serve(config: Path, nbytes: int, seed: int) -> None:
    settings = configuration.load(config).relay
    version = anchor(nbytes, seed)
    async with connect(settings, timeout_s=600) as relay:
        puller = Puller(relay, version.manifest)
        say({"bytes": version.manifest.delta_bytes})
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if command == "push":
                await relay.delete(JOB, version.manifest.version)
                took_s = await push(relay, version)
            else:
                took_s = await puller.pull()
            say(took_s)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
