"""`make chaos`: kill and stop real processes at random while agents work; nothing may be lost, all must heal.

    python tests/chaos/run.py [--seconds 120] [--seed 1] [--hosts 2] [--agents 12]

The same seed chooses the same faults in the same order; when each falls is the machine's affair.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world import Agents, World, wait

Fault = Callable[[World, random.Random], None]


def _kill(daemons: str) -> Fault:
    def act(world: World, rng: random.Random) -> None:
        chosen = getattr(world, daemons)
        rng.choice(chosen if isinstance(chosen, list) else [chosen]).signal(signal.SIGKILL)

    return act


def _stop_a_while(daemons: str) -> Fault:
    def act(world: World, rng: random.Random) -> None:
        chosen = getattr(world, daemons)
        daemon = rng.choice(chosen if isinstance(chosen, list) else [chosen])
        daemon.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.2, 3.0))
        daemon.signal(signal.SIGCONT)

    return act


def _restart_scheduler(world: World, _: random.Random) -> None:
    world.scheduler.signal(signal.SIGTERM)


def _kill_engine(world: World, rng: random.Random) -> None:
    if pids := world.engines():
        try:
            os.kill(rng.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return


def _reload(world: World, rng: random.Random) -> None:
    rng.choice(world.daemons).signal(signal.SIGHUP)


FAULTS: dict[str, Fault] = {
    "rosed killed": _kill("hosts"),
    "engine or warden killed": _kill_engine,
    "scheduler killed": _kill("scheduler"),
    "scheduler restarted": _restart_scheduler,
    "relay killed": _kill("relay"),
    "rosed stopped for a while": _stop_a_while("hosts"),
    "scheduler stopped for a while": _stop_a_while("scheduler"),
    "settings read again": _reload,
}


def chaos(
    seconds: float, seed: int, hosts: int, agents: int, faults: tuple[str, ...] = tuple(FAULTS)
) -> Counter[str]:
    """Returns how often each fault fell.  Raises AssertionError."""
    rng = random.Random(seed)
    fell: Counter[str] = Counter()
    with World(hosts) as world:
        try:
            work = Agents(world, agents)
            wait(lambda: work.done >= agents, "agents get their first turns")
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                name = (
                    faults[sum(fell.values()) % len(faults)]
                    if len(faults) < len(FAULTS)
                    else rng.choice(faults)
                )
                FAULTS[name](world, rng)
                fell[name] += 1
                time.sleep(rng.uniform(0.5, 3.0))
                world.keep_up()
            world.keep_up()
            wait(world.ready, "every replica takes turns again")
            healed = work.done
            wait(lambda: work.done >= healed + agents, "agents go on")
            work.finish()
        except AssertionError:
            print(world.logs(), file=sys.stderr)
            raise
        turns = f"{work.done} turns finished, none lost or wrong, {work.resent} times resent"
        print(f"{sum(fell.values())} faults: {turns}")
    return fell


def main() -> None:
    """Run, and print what fell."""
    parser = argparse.ArgumentParser(description="Faults in real processes, with mock engines.")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--agents", type=int, default=12)
    arguments = parser.parse_args()
    for name, count in chaos(
        arguments.seconds, arguments.seed, arguments.hosts, arguments.agents
    ).most_common():
        print(f"  {count:4} {name}")


if __name__ == "__main__":
    main()
