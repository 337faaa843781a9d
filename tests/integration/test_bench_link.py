"""The emulated link behaves as asked, leaves nothing behind, and refuses where it cannot be made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from rose_daemon.bench import link_bench, update_bench
from rose_daemon.bench.link import Link, LinkSpec, emulated_link, why_not

from rose.errors import RoseError

needs_link = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a link can be made")

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    sock, _ = server.accept()
    while sock.recv(1 << 20):
        pass
    sock.sendall(b".")
    sock.close()
"""
SEND = """
import socket, sys, time
began = time.perf_counter()
sock = socket.create_connection((sys.argv[1], 5000))
connected = time.perf_counter()
sock.sendall(bytes(int(sys.argv[2])))
sock.shutdown(socket.SHUT_WR)
sock.recv(1)
print(connected - began, time.perf_counter() - connected)
"""


def send(link: Link, nbytes: int) -> tuple[float, float]:
    """Seconds to connect, and to have so many bytes acknowledged by a process at the other end."""
    command = [*link.near.prefix, sys.executable, "-c", SEND, link.far.address, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    connect_s, send_s = map(float, done.stdout.split())
    return connect_s, send_s


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@needs_link
def test_a_link_has_the_rate_the_delay_and_the_loss_asked_for() -> None:
    with emulated_link(LinkSpec(rate_mbit=50, delay_ms=20)) as link:
        receiver = subprocess.Popen(
            [*link.far.prefix, sys.executable, "-c", LISTEN, link.far.address], stdout=subprocess.PIPE
        )
        try:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            connect_s, send_s = send(link, 4_000_000)
            assert connect_s >= 0.04
            assert send_s >= 4_000_000 * 8 / 50e6
            link.set_loss(1_000_000)
            with pytest.raises(subprocess.TimeoutExpired):
                subprocess.run(
                    [*link.near.prefix, sys.executable, "-c", SEND, link.far.address, "1"],
                    capture_output=True, check=True, timeout=1,
                )  # fmt: skip
            link.set_loss(0)
            assert send(link, 1)[0] >= 0.04
        finally:
            receiver.kill()
            receiver.communicate()
        assert link.near.namespace in namespaces()
    assert f"rose-{os.getpid()}-" not in namespaces()


@needs_link
def test_nothing_is_left_when_something_fails() -> None:
    with pytest.raises(ZeroDivisionError), emulated_link(LinkSpec()):
        _ = 1 / 0
    with pytest.raises(RoseError, match="did not come up"), emulated_link(LinkSpec(mtu=1)):
        pass
    assert f"rose-{os.getpid()}-" not in namespaces()


def test_without_root_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RoseError, match="need root"), emulated_link(LinkSpec()):
        pass


@needs_link
def test_the_benchmark_measures_both_ways_beside_iperf3(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("iperf3") is None:
        pytest.skip("iperf3 is not installed (tools/debian.sh, as root)")
    monkeypatch.setattr(link_bench, "_REFERENCE_S", 1)
    report = link_bench.measure(
        LinkSpec(rate_mbit=200, delay_ms=2),
        loss_ppm=100,
        nbytes=6_000_000,
        rounds=1,
        streams=2,
        congestion="",
        model_bytes=4 << 20,
        updates=1,
        replicas=2,
        say=lambda _text: None,
    )
    json.dumps(report)
    assert report["setup"]["bytes"] >= 6_000_000
    for phase in ("no loss", "with loss"):
        for way in ("iperf3", "push", "pull"):
            assert 1 < report["mbit_s"][phase][way] <= 210
    assert set(report["share_of_link"]["no loss"]) == {"push", "pull"}
    update = report["update"]
    assert update["peers"]["dense"]["bytes"] >= update["model_bytes"] > update["bytes"]
    assert update["peers"]["coo"]["bytes"] > update["bytes"]
    assert sum(update["stages_ms"].values()) == pytest.approx(update["total_ms"], abs=1)
    console = Console(width=120)
    with console.capture() as shown:
        link_bench.show(report, console)
        update_bench.show(update, console)
    assert "publish() to all committed" in shown.get()
