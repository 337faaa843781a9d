"""What ROSE talks to, and may touch: ports, directories, the serving engine, the other daemons."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from rose import wire
from rose.boards import BoardPaths, Owner, WatchedBoard
from rose.cli.control import ask
from rose.config import Config
from rose.config_rules import is_loopback
from rose.core.readings import SlackReading, Unknown
from rose.errors import RoseError
from rose.secret import read_secret
from rose.units import MIB, JobId, ms_to_ns
from rose.weights.relay import Relay, VersionStat
from rose.weights.relay.connecting import connect
from rose_daemon.doctor.finding import Finding, Findings, Status, error, ok, warning
from rose_daemon.node import host
from rose_daemon.node.engines import port_is_free

_PATIENCE_S = 3.0
_SAMPLE_BYTES = 64 * MIB
_OURS = ("rose", "rosed", "vllm")


def checks(config: Config) -> Findings:
    """All of them."""
    yield from _directories(config)
    yield from _secrets(config)
    yield from _devices(config)
    yield from _ports(config)
    yield _rosed(config)
    yield from _serving(config)
    scheduler = config.scheduler
    yield _http("scheduler", f"http://{_reachable(scheduler.gateway_host)}:{scheduler.gateway_port}")
    yield asyncio.run(_relay(config))


def _directories(config: Config) -> Findings:
    for key in ("state_dir", "run_dir"):
        name, there = f"node.{key}", Path(getattr(config.node, key))
        while not there.exists() and there != there.parent:
            there = there.parent
        if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            wanted = getattr(config.node, key)
            advice = f"make {wanted} for the user that rosed runs as (this is uid {os.getuid()})"
            yield error(name, f"{there} is not writable", advice)
        else:
            free = os.statvfs(there)
            room = free.f_bavail * free.f_frsize
            text = f"{there} is writable, {room // MIB} MiB free"
            yield ok(name, text) if room > MIB else error(name, text, "make room on that file system")


def _secrets(config: Config) -> Findings:
    files = {
        "node.token_file": str(config.engine_token_file),
        "scheduler.token_file": config.scheduler.token_file,
        "relay.token_file": config.relay.token_file,
    }
    for name, path in files.items():
        if not path:
            continue
        if not Path(path).exists():
            if name == "node.token_file":
                yield Finding(name, Status.ABSENT, f"{path} is not there yet: rosed makes it")
            else:
                yield error(name, f"{path} is not there", "write the token into it (mode 0600)")
            continue
        try:
            read_secret(path, name)
            yield ok(name, f"{path} is for its owner alone")
        except RoseError as refused:
            yield error(name, refused.what, refused.hint)


def _devices(config: Config) -> Findings:
    if config.device.kind != "cuda":
        return
    nodes = sorted(Path("/dev").glob("nvidia*"))
    closed = [node.name for node in nodes if node.is_char_device() and not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        text = f"no access to /dev/{', /dev/'.join(closed)}"
        yield error("gpu_access", text, "add the user to the group that owns them (video or render)")
    elif nodes:
        yield ok("gpu_access", f"{len(nodes)} devices below /dev can be opened")


def _ports(config: Config) -> Findings:
    control = urlsplit(config.scheduler.control)
    wanted = [("scheduler.gateway_port", config.scheduler.gateway_host, config.scheduler.gateway_port)]
    if control.scheme == "tcp" and is_loopback(control.hostname or "") and control.port:
        wanted.append(("scheduler.control", control.hostname or "", control.port))
    wanted.append(("relay.port", config.relay.host, config.relay.port))
    wanted += [(f"replicas.{each.id}.port", each.host, each.port) for each in config.replicas]
    wanted.append(("node.metrics_port", "127.0.0.1", config.node.metrics_port))
    for name, address, port in wanted:
        if port:
            yield _port(name, address, port)


def _port(name: str, address: str, port: int) -> Finding:
    if port_is_free(address, port):
        return ok(f"port {port}", f"{name}: free")
    holder = host.listener(port)
    if isinstance(holder, Owner):
        command = _command(holder.pid)
        text = f"{name}: taken by process {holder.pid} ({command})"
        if any(word in command for word in _OURS):
            return ok(f"port {port}", text)
    else:
        text = f"{name}: taken by a process of another user"
    return warning(f"port {port}", text, f"end it, or change {name}")


def _command(pid: int) -> str:
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    return " ".join(words).strip()[:80]


def _rosed(config: Config) -> Finding:
    path = config.control_socket
    try:
        body = ask(path, wire.StatusRequest(), _PATIENCE_S)
    except RoseError as refused:
        return warning("rosed", refused.what, refused.hint or "start it: rosed --config FILE")
    problems = body.get("problems") or []
    text = f"it answers on {path}"
    if problems:
        return warning("rosed", f"{text}; {'; '.join(map(str, problems))}", "see `rose status`")
    return ok("rosed", text)


def _serving(config: Config) -> Findings:
    serving = config.serving
    if not serving.url:
        yield Finding("serving", Status.ABSENT, "no serving engine here (serving.url is empty)")
        return
    yield _http("serving", serving.url)
    if serving.mode == "metrics":
        return
    paths = BoardPaths(Path(config.node.run_dir))
    for name in serving.boards or (serving.name,):
        board = WatchedBoard(paths.slack(name), SlackReading)
        reading = board.read(time.monotonic_ns(), ms_to_ns(config.admission.board_stale_ms))
        if isinstance(reading, Unknown):
            advice = "start the serving engine with the plugin (README), or set serving.mode to metrics"
            yield error("slack_board", f"{board.path}: {reading}", advice)
        else:
            yield ok("slack_board", f"{board.path}: written {reading.steps} steps long")


def _http(name: str, url: str) -> Finding:
    began_s = time.monotonic()
    status = asyncio.run(_health(url))
    took_ms = (time.monotonic() - began_s) * 1000
    if isinstance(status, str):
        return warning(name, f"{url} does not answer: {status}", "is it running, and is the address right?")
    if status >= 400:
        return warning(name, f"{url}/health answers {status}", "see its log")
    return ok(name, f"{url} answers in {took_ms:.0f} ms")


async def _health(url: str) -> int | str:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/health") as response,
        ):
            return response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as problem:
        return str(problem) or type(problem).__name__


async def _relay(config: Config) -> Finding:
    """Whether the relay answers, and how fast it gives out a part of what it has."""
    job = config.job.id
    try:
        async with connect(config.relay, timeout_s=_PATIENCE_S) as relay:
            began_s = time.monotonic()
            stat = await relay.stat(job)
            text = f"{config.relay.address} answers in {(time.monotonic() - began_s) * 1000:.0f} ms"
            largest = max(stat.committed, key=lambda each: each.bytes, default=None)
            if largest is None or not largest.bytes:
                return ok("relay", f"{text}; no version of {job} to measure the bandwidth with")
            rate = await _bandwidth(relay, job, largest)
            return ok("relay", f"{text}; {rate}")
    except RoseError as refused:
        advice = refused.hint or "is `rose relay` running?"
        return warning("relay", f"{config.relay.address}: {refused.what}", advice)


async def _bandwidth(relay: Relay, job: JobId, version: VersionStat) -> str:
    """Reads at most 64 MiB, of one bucket."""
    committed = await relay.manifest(job, version.version)
    bucket = max(committed.manifest.buckets, key=lambda each: each.size)
    sample = bytearray(min(bucket.size, _SAMPLE_BYTES))
    began_s = time.monotonic()
    await relay.get_into(job, version.version, bucket.name, memoryview(sample), epoch=committed.epoch)
    took_s = max(time.monotonic() - began_s, 1e-9)
    return f"{len(sample) / MIB / took_s:,.0f} MiB/s over {len(sample) / MIB:.1f} MiB"


def _reachable(address: str) -> str:
    """An address to connect to, for one to listen on."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{address}]" if ":" in address else address
