"""An emulated link between two network namespaces of this machine: rate, delay, loss.  Needs root and gcc.

    with emulated_link(LinkSpec(rate_mbit=1000, delay_ms=10)) as link:
        server = subprocess.Popen([*link.far.prefix, "iperf3", "-s"])
        ...
        link.set_loss(100)

What a command with the prefix starts sees nothing but its end of the link and its own loopback: `link.near`
has the address 10.77.0.1, `link.far` has 10.77.0.2.  TCP's settings (net.ipv4.tcp_*) are a namespace's own.
Memory, files and /proc are this machine's at both ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from rose.errors import RoseError

_NEAR, _FAR = "10.77.0.1", "10.77.0.2"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What the link is like, in each direction."""

    rate_mbit: float = 1000
    delay_ms: float = 10
    """One way: a round trip takes twice as long."""
    loss_ppm: int = 0
    """Packets lost in a million."""
    mtu: int = 1500
    queue_bytes: int = 0
    """Bytes that may wait for the wire; 0 is what travels in one round trip."""
    seed: int = 1
    """Of the losses."""

    @property
    def queue(self) -> int:
        """Bytes that may wait for the wire."""
        return self.queue_bytes or int(self.rate_mbit * 1e6 / 8 * 2 * self.delay_ms / 1e3)


@dataclass(frozen=True, slots=True)
class End:
    """One end: a network namespace and its address on the link."""

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """In front of a command, it runs at this end."""
        return ["ip", "netns", "exec", self.namespace]


class Link:
    """A link that is up."""

    def __init__(self, near: End, far: End, process: subprocess.Popen[str]) -> None:
        self.near = near
        self.far = far
        self._process = process

    def set_loss(self, loss_ppm: int) -> None:
        """Lose so many packets in a million from now on."""
        if self._process.stdin is None or self._process.poll() is not None:
            raise RoseError("the emulated link has ended")
        self._process.stdin.write(f"loss {loss_ppm}\n")
        self._process.stdin.flush()


def why_not() -> str:
    """Why no link can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "gcc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} are not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return ""


@contextlib.contextmanager
def emulated_link(spec: LinkSpec) -> Iterator[Link]:
    """Make two namespaces and a link between them; they are gone afterwards.  Raises RoseError."""
    if reason := why_not():
        raise RoseError(f"no link can be emulated here: {reason}")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = _compile(scratch)
        near, far = End(f"rose-{os.getpid()}-a", _NEAR), End(f"rose-{os.getpid()}-b", _FAR)
        for end in (near, far):
            _run("ip", "netns", "add", end.namespace)
            stack.callback(_run, "ip", "netns", "delete", end.namespace)
        process = stack.enter_context(_started(program, spec, near, far))
        yield Link(near, far, process)


def _compile(scratch: Path) -> Path:
    program = scratch / "tunlink"
    with as_file(files(__package__) / "tunlink.c") as source:
        _run("gcc", "-std=gnu11", "-O2", "-pthread", "-o", str(program), str(source))
    return program


@contextlib.contextmanager
def _started(program: Path, spec: LinkSpec, near: End, far: End) -> Iterator[subprocess.Popen[str]]:
    numbers = (spec.mtu, spec.rate_mbit, int(spec.delay_ms * 1000), spec.loss_ppm, spec.queue, spec.seed)
    process = subprocess.Popen(
        [program, near.namespace, far.namespace, near.address, far.address, *map(str, numbers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if process.stdout is None or process.stdout.readline() != "up\n":
            raise RoseError(f"the emulated link did not come up: {process.communicate()[1].strip()}")
        yield process
    finally:
        process.kill()
        process.communicate()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RoseError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
