"""The relay as a process and as an HTTP server: hostile requests, tokens, TLS, start and stop."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from rose_daemon.relay.server import serving
from yarl import URL

from rose import config as configuration
from rose.config import RelayConfig
from rose.errors import ConfigError, Exit, RoseError, VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits
from rose.weights.digests import digest
from rose.weights.encoding import encode_version
from rose.weights.manifest import BUCKET_BYTES_MAX
from rose.weights.relay import RelayDenied, RelayUnavailable
from rose.weights.relay.http import DIGEST_HEADER, ROOT, BadRequest
from rose.weights.relay.local import RelayClient

JOB, V1 = JobId("job-1"), WeightVersion(1)
BUCKET = "bucket-00000.safetensors"
DATA = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8).tobytes()
ENCODED = encode_version(JOB, V1, None, None, {"w": Bits("U8", (len(DATA),), np.frombuffer(DATA, np.uint8))})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(RelayConfig(port=0, capacity_bytes=16 << 20)) as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def publish(url: str, token: str = "", tls_ca: str = "") -> None:
    async with RelayClient(url, token=token, tls_ca=tls_ca, timeout_s=10) as relay:
        for bucket in ENCODED.manifest.buckets:
            await relay.put_bucket(JOB, V1, bucket.name, ENCODED.buckets[bucket.name], bucket.digest)
        assert await relay.commit(JOB, V1, ENCODED.manifest) == ()


async def until(relay: RelayClient, holds: Callable[[int], bool]) -> None:
    """Wait until the bytes in use are as wanted."""
    for _ in range(500):
        if holds((await relay.stat(JOB)).used_bytes):
            return
        await asyncio.sleep(0.01)
    pytest.fail("the bytes in use stay as they are")


# ---- hostile requests ----


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", f"{ROOT}/..%2f..%2fetc/versions/1/buckets/{BUCKET}"),
        ("PUT", f"{ROOT}/job-1/versions/1/buckets/..%2fmanifest.json"),
        ("PUT", f"{ROOT}/job-1/versions/1/buckets/passwd"),
        ("PUT", f"{ROOT}/job-1/versions/-1/buckets/{BUCKET}"),
        ("PUT", f"{ROOT}/job-1/versions/{'9' * 30}/buckets/{BUCKET}"),
        ("PUT", f"{ROOT}/job-1/versions/one/manifest"),
        ("GET", f"{ROOT}/job-1/latest?after=x"),
        ("GET", f"{ROOT}/job-1/latest?wait_s=nan"),
        ("GET", f"{ROOT}/job-1/latest?wait_s=1e9"),
        ("GET", f"{ROOT}/job%0a"),
        ("GET", "/nothing/here"),
        ("POST", f"{ROOT}/job-1"),
        ("OPTIONS", f"{ROOT}/job-1"),
    ],
)
async def test_bad_requests_are_refused_in_json(
    url: str, http: aiohttp.ClientSession, method: str, path: str
) -> None:
    headers = {DIGEST_HEADER: digest(b"x")}
    async with http.request(method, URL(url + path, encoded=True), data=b"x", headers=headers) as answer:
        assert 400 <= answer.status < 500
        assert set(await answer.json()) == {"error", "detail", "missing"}


@pytest.mark.parametrize("claimed", ["short", "", "G" * 32])
async def test_a_bucket_needs_a_digest(url: str, http: aiohttp.ClientSession, claimed: str) -> None:
    path = f"{url}{ROOT}/job-1/versions/1/buckets/{BUCKET}"
    async with http.put(path, data=b"x", headers={DIGEST_HEADER: claimed}) as answer:
        assert answer.status == 400


async def test_a_bucket_needs_a_length_within_the_limit(url: str, http: aiohttp.ClientSession) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"x"

    path = f"{url}{ROOT}/job-1/versions/1/buckets/{BUCKET}"
    headers = {DIGEST_HEADER: digest(b"x")}
    async with http.put(path, data=endless(), headers=headers) as answer:
        assert answer.status == 400
    async with http.put(path, data=b"", headers=headers) as answer:
        assert answer.status == 400
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"PUT {ROOT}/job-1/versions/1/buckets/{BUCKET} HTTP/1.1\r\nHost: x\r\n"
    writer.write(
        f"{head}Content-Length: {BUCKET_BYTES_MAX + 1}\r\n{DIGEST_HEADER}: {'0' * 32}\r\n\r\n".encode()
    )
    async with asyncio.timeout(60):
        assert b" 400 " in await reader.readline()
    writer.close()


async def test_a_bucket_that_unpacks_to_more_than_its_length_is_refused(
    url: str, http: aiohttp.ClientSession
) -> None:
    """HTTP servers unpack compressed bodies: a small one must not fill the memory."""
    path = f"{url}{ROOT}/job-1/versions/1/buckets/{BUCKET}"
    bomb = zlib.compress(bytes(32 << 20))
    headers = {DIGEST_HEADER: digest(bomb), "Content-Encoding": "deflate"}
    async with http.put(path, data=bomb, headers=headers) as answer:
        assert answer.status == 422
    async with RelayClient(url, timeout_s=10) as relay:
        assert (await relay.stat(JOB)).used_bytes == 0


async def test_a_writer_killed_in_the_middle_leaves_no_trace(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"PUT {ROOT}/job-1/versions/1/buckets/{BUCKET} HTTP/1.1\r\nHost: x\r\n"
    writer.write(
        f"{head}Content-Length: {len(DATA)}\r\n{DIGEST_HEADER}: {digest(DATA)}\r\n\r\n".encode()
        + DATA[:99999]
    )
    await writer.drain()
    async with RelayClient(url, timeout_s=10) as relay:
        await until(relay, lambda used_bytes: used_bytes > 0)
        writer.transport.abort()
        await until(relay, lambda used_bytes: used_bytes == 0)
        assert (await relay.stat(JOB)).staged == ()
    await publish(url)


async def test_manifests_that_lie_are_refused(url: str, http: aiohttp.ClientSession) -> None:
    path = f"{url}{ROOT}/job-1/versions/1/manifest"
    for body, status in ((b"", 422), (b"{}", 422), (b"[" * 10_000, 422)):
        async with http.put(path, data=body) as answer:
            assert answer.status == status
    async with RelayClient(url, timeout_s=5) as relay:
        with pytest.raises(BadRequest):
            await relay.commit(JOB, WeightVersion(2), ENCODED.manifest)
        with pytest.raises(BadRequest):
            await relay.stat(JobId("../etc"))


async def test_noise_never_breaks_the_server(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever bytes arrive, the next honest request is served, and no log fills."""
    rng = random.Random(5)
    host, port = url.removeprefix("http://").split(":")
    request = (
        f"PUT {ROOT}/job-1/versions/1/manifest HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{'x' * 40}"
    )
    for _ in range(150):
        noise = bytearray(request.encode())
        for _ in range(rng.randint(1, 6)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        await writer.drain()
        writer.close()
    await publish(url)
    assert not caplog.records


# ---- resuming ----


async def test_a_download_goes_on_where_the_connection_broke(url: str) -> None:
    """Through a proxy that cuts each connection after 700 kB, 3 MiB still arrive, each byte once."""
    await publish(url)
    sent = [0]

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = url.removeprefix("http://").split(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        upstream_writer.write(await reader.readuntil(b"\r\n\r\n"))
        left = 700_000
        while left and (chunk := await upstream_reader.read(min(left, 65536))):
            writer.write(chunk)
            await writer.drain()
            left -= len(chunk)
            sent[0] += len(chunk)
        writer.close()
        upstream_writer.transport.abort()

    proxy = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with (
        proxy,
        RelayClient(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", timeout_s=20) as relay,
    ):
        (bucket,) = ENCODED.manifest.buckets
        destination = bytearray(bucket.size)
        await relay.get_into(JOB, V1, bucket.name, memoryview(destination))
        assert digest(destination) == bucket.digest
        assert sent[0] < bucket.size + 50_000


async def test_what_is_no_relay_is_called_so() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with (
        server,
        RelayClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5) as relay,
    ):
        with pytest.raises(RoseError, match="no relay"):
            await relay.stat(JOB)
    for bad in ("", "127.0.0.1:7702", "ftp://x", "http://"):
        with pytest.raises(ConfigError):
            RelayClient(bad)
    for path in ("/nowhere/ca.pem", __file__):
        with pytest.raises(ConfigError, match="tls_ca"):
            RelayClient("https://127.0.0.1:1", tls_ca=path)


# ---- tokens and exposure ----


async def test_a_token_is_asked_of_all_but_health(token: str, http: aiohttp.ClientSession) -> None:
    async with serving(RelayConfig(port=0, token_file=token)) as url:
        await publish(url, token="s3cret")
        for wrong in ("", "s3cre", "S3cret", "s3crets"):
            async with RelayClient(url, token=wrong, timeout_s=5) as relay:
                with pytest.raises(RelayDenied):
                    await relay.stat(JOB)
                with pytest.raises(RelayDenied):
                    await relay.delete(JOB, V1)
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200
        async with http.get(f"{url}{ROOT}/job-1", headers={"Authorization": "Bearer s3crét"}) as answer:
            assert answer.status == 401


@pytest.mark.parametrize("text", ["", "  \n", None])
async def test_a_token_file_without_a_token_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match="token"):
        async with serving(RelayConfig(port=0, token_file=str(tmp_path / "token"))):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "relay.example"])
async def test_it_does_not_listen_in_the_open(token: str, host: str) -> None:
    for token_file in ("", token):
        with pytest.raises(ConfigError, match="loopback"):
            async with serving(RelayConfig(host=host, port=0, token_file=token_file)):
                pass


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=relay"
    subject = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def token(tmp_path: Path) -> str:
    """A token file that says s3cret."""
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    return str(tmp_path / "token")


async def test_with_tls_and_a_token_it_may_listen_anywhere(certificate: tuple[str, str], token: str) -> None:
    cert, key = certificate
    config = RelayConfig(host="0.0.0.0", port=0, token_file=token, tls_cert=cert, tls_key=key)
    async with serving(config) as url:
        reachable = url.replace("0.0.0.0", "127.0.0.1")
        await publish(reachable, token="s3cret", tls_ca=cert)
        async with RelayClient(reachable, token="s3cret", timeout_s=5) as stranger:
            with pytest.raises((ConfigError, RelayUnavailable)):
                await stranger.stat(JOB)
    with pytest.raises(ConfigError, match="go together"):
        async with serving(RelayConfig(port=0, tls_cert=cert)):
            pass
    with pytest.raises(ConfigError, match="tls_cert"):
        async with serving(RelayConfig(port=0, tls_cert=token, tls_key=key)):
            pass


# ---- the process ----


def rose_relay(
    directory: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    config = directory / "rose.toml"
    config.write_text("schema = 1\n")
    return subprocess.Popen(
        [sys.executable, "-m", "rose.cli.main", "relay", "--config", str(config), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environ or {}),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_says_where_it_listens_and_ends_when_told(tmp_path: Path, number: int) -> None:
    process = rose_relay(tmp_path, "--port", "0")
    assert process.stderr is not None
    line = await asyncio.to_thread(process.stderr.readline)
    assert line.startswith("relay listening on http://127.0.0.1:")
    url = line.split()[-1]
    await publish(url)
    async with RelayClient(url, timeout_s=5) as relay:
        waiting = asyncio.create_task(relay.latest(JOB, V1, 30))
        await asyncio.sleep(0.1)
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, 10) == 0
        waiting.cancel()
        await asyncio.wait([waiting])
    assert process.stderr.read() == ""
    process.stderr.close()


def test_it_tells_the_service_manager_when_it_listens_and_when_it_stops(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        process = rose_relay(tmp_path, "--port", "0", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            assert manager.recv(100) == b"READY=1"
            process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert errors.startswith("relay listening on ")


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = rose_relay(tmp_path, "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=30)
    assert process.returncode == Exit.NOT_READY
    first, second = errors.splitlines()
    assert "cannot listen on 127.0.0.1" in first
    assert second.startswith("hint: ")


def test_an_exposed_address_is_refused_at_start(tmp_path: Path) -> None:
    process = rose_relay(tmp_path, "--host", "0.0.0.0", "--port", "0")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "loopback" in errors
    assert "Traceback" not in errors


async def test_a_killed_relay_loses_its_versions_and_a_new_one_takes_them(tmp_path: Path) -> None:
    process = rose_relay(tmp_path, "--port", "0")
    assert process.stderr is not None
    url = (await asyncio.to_thread(process.stderr.readline)).split()[-1]
    await publish(url)
    process.kill()
    process.communicate(timeout=10)
    again = rose_relay(tmp_path, "--port", url.rpartition(":")[2])
    async with RelayClient(url, timeout_s=20) as relay:
        assert (await relay.stat(JOB)).versions == ()
        await publish(url)
        with pytest.raises(VersionConflict):
            await relay.put_bucket(JOB, V1, BUCKET, b"x", digest(b"x"))
    again.terminate()
    again.communicate(timeout=10)
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("environ", "looked_at"),
    [
        ({"ROSE_RELAY__PORT": "0", "ROSE_RELAY__URL": "http://127.0.0.1:7702"}, "http://127.0.0.1:7702"),
        ({"ROSE_RELAY__PORT": "0"}, "http://127.0.0.1:0"),
    ],
)
def test_an_address_that_nobody_looks_at_is_said(
    tmp_path: Path, environ: dict[str, str], looked_at: str
) -> None:
    process = rose_relay(tmp_path, environ=environ)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("relay listening on ")
        note = f"note: nodes and trainers look for it at [relay] url, {looked_at}\n"
        assert process.stderr.readline() == note
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_clients_look_where_the_relay_listens_unless_told_otherwise() -> None:
    def url(**keys: object) -> str:
        return configuration.build({"relay": keys}, "rose.toml").relay.address

    assert url() == "http://127.0.0.1:7702"
    assert url(port=9000) == "http://127.0.0.1:9000"
    assert url(host="::1") == "http://[::1]:7702"
    tls = {"tls_cert": "c", "tls_key": "k", "token_file": "t"}
    assert url(host="10.0.0.1", **tls) == "https://10.0.0.1:7702"
    assert url(port=9000, url="http://127.0.0.1:9001") == "http://127.0.0.1:9001"
    with pytest.raises(ConfigError, match=r"relay\.url"):
        url(host="0.0.0.0", **tls)
