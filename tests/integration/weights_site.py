"""A host with real processes for weight tests: trainer, relay, rosed, engines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from rose_daemon.node.engines import free_port
from test_rosed_process import LIMIT_S, Host, until

from rose import wire
from rose.cli.control import ask
from rose.config import RelayConfig
from rose.errors import RoseError
from rose.units import JobId, WeightVersion
from rose.weights import Publisher, tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.digests import digest_state

JOB = JobId("job-0")
REPLICAS = ("ded-0", "ded-1")
State = dict[str, Bits]


def first_state() -> State:
    """A checkpoint large enough that an update takes a few milliseconds."""
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (512, 64),
        "model.layers.0.mlp.up_proj.weight": (256, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.norm.weight": (64,),
    }
    return {
        name: Bits("BF16", shape, rng.integers(0x3C00, 0x3F80, int(np.prod(shape))).astype("<u2"))
        for name, shape in shapes.items()
    }


def stepped(state: State, seed: int) -> State:
    rng = np.random.default_rng(seed)
    moved = {name: bits.copy() for name, bits in state.items()}
    for bits in moved.values():
        bits.words[rng.random(bits.words.size) < 0.02] ^= 1
    return moved


class Site(Host):
    """A host with engines, a relay, and a trainer that keeps all states it published.

    Without a `checkpoint` the engines are light ones.  `keys` is more of [node], `replica_keys` of each
    replica; `keep` is how many versions the publisher keeps, `squash_every` and `stateful` as there.
    """

    def __init__(
        self,
        base: Path,
        checkpoint: Path | None = None,
        *,
        replicas: tuple[str, ...] = REPLICAS,
        keys: str = "",
        replica_keys: str = "",
        keep: int = 2,
        squash_every: int | None = None,
        stateful: bool = False,
    ) -> None:
        super().__init__(base)
        self.relay_port = free_port("127.0.0.1")
        self.replicas = replicas
        self.keep = keep
        if checkpoint is None:
            self.states = [first_state()]
            encoded = tensorfile.encode(self.states[0], {"format": "pt"})
            (self.model / "model.safetensors").write_bytes(encoded)
        else:
            shutil.copytree(checkpoint, self.model, dirs_exist_ok=True)
            self.states = [{name: bits.copy() for name, bits in open_checkpoint(self.model).state.items()}]
        sections = "".join(
            f'[[replicas]]\nid = "{replica}"\nkind = "dedicated"\nmodel = "{self.model}"\n{replica_keys}\n'
            for replica in replicas
        )
        self.write(f"restart_backoff_max_s = 0.5\n{keys}", replicas=sections)
        text = self.config.read_text().splitlines()
        text[text.index("[relay]") + 1] = f'url = "http://127.0.0.1:{self.relay_port}"'
        self.config.write_text("\n".join(text))
        self.relay: subprocess.Popen[bytes] | None = None
        self.start_relay()
        self.relay_config = RelayConfig(url=f"http://127.0.0.1:{self.relay_port}")
        self.publisher = Publisher.connect(
            self.relay_config, JOB, self.states[0], keep=keep, squash_every=squash_every, stateful=stateful
        )

    def start_relay(self) -> None:
        command = [sys.executable, "-m", "rose.cli.main", "relay", "--config", str(self.config)]
        self.relay = subprocess.Popen(
            [*command, "--port", str(self.relay_port)], stderr=subprocess.DEVNULL, env=self.environ
        )

    def stop_relay(self) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
            self.relay = None

    def step(self) -> int:
        """The trainer's next version, not published yet."""
        version = len(self.states)
        self.states.append(stepped(self.states[-1], version))
        return version

    def publish(self) -> int:
        version = self.step()
        self.publisher.publish(WeightVersion(version), self.states[version])
        return version

    def get(self, replica: str, path: str) -> dict[str, Any]:
        token = (self.base / "state" / "engine.token").read_text().strip()
        url = self.replica(replica)["url"] + path
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def all_at(self, version: int) -> Callable[[], bool]:
        def reached() -> bool:
            status = self.status()
            return status is not None and all(
                each["weight_version"] == version and each["state"] == "ready" for each in status["replicas"]
            )

        return reached

    def check(self, version: int, limit_s: float = LIMIT_S) -> None:
        """Live parameters of every engine come to be the trainer's of this version, and never a mixture."""

        def reached() -> bool:
            if not self.all_at(version)():
                return False
            versions = set()
            for replica in self.replicas:
                try:
                    live = self.get(replica, "/rose/v1/weights/digests")
                except OSError:
                    return False  # killed, and nobody has noticed yet
                assert live["digests"] == digest_state(self.states[live["version"]]), replica
                versions.add(live["version"])
            return versions == {version}

        until(reached, self.explain, limit_s)

    def copy_version(self) -> int | None:
        try:
            record = json.loads((self.base / "state" / "weights" / JOB / "copy" / "record.json").read_text())
        except FileNotFoundError:
            return None
        return None if record["undoing"] else int(record["version"])

    def pin(self, version: int) -> None:
        """Roll back.  rosed learns of the way a moment after the copy has moved, which is asked for here."""

        def asked() -> bool:
            try:
                ask(self.socket, wire.PinRequest(JOB, WeightVersion(version)))
            except RoseError as error:
                if "the way to" not in error.what and "is being updated" not in error.what:
                    raise
                return False
            return True

        until(asked, self.explain)

    def rose(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rose.cli.main", "weights", *map(str, arguments)]
        return subprocess.run(
            [*command, "--config", str(self.config)], capture_output=True, text=True, check=False, timeout=60
        )

    def end(self) -> None:
        super().end()
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        self.publisher.close()
