"""How buckets move to and from the embedded relay: in ranges, through its memory, on upgraded connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rose_daemon.relay.server import serving

from rose.config import RelayConfig
from rose.errors import ConfigError, CorruptDelta, VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits
from rose.weights.digests import digest
from rose.weights.encoding import encode_version
from rose.weights.relay import EpochChanged, RelayDenied, RelayFull, VersionGone
from rose.weights.relay.bulk import Uplink
from rose.weights.relay.http import BULK_PATH, BULK_PROTOCOL, BulkReply, Finish, Part, Put
from rose.weights.relay.lanes import Lanes
from rose.weights.relay.local import RelayClient
from rose.weights.relay.ranges import Range, fetch_ranges
from rose.weights.relay.shared import SharedReader
from rose.weights.relay.sockets import Sending

JOB, V1 = JobId("job-1"), WeightVersion(1)
DATA = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8).tobytes()
ENCODED = encode_version(JOB, V1, None, None, {"w": Bits("U8", (len(DATA),), np.frombuffer(DATA, np.uint8))})
(BUCKET,) = ENCODED.manifest.buckets
BYTES = bytes(ENCODED.buckets[BUCKET.name])


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(RelayConfig(port=0, capacity_bytes=64 << 20)) as url:
        yield url


async def publish(url: str) -> None:
    async with RelayClient(url, timeout_s=20) as relay:
        await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
        assert await relay.commit(JOB, V1, ENCODED.manifest) == ()


async def fetch(relay: RelayClient, epoch: str | None = None) -> bytearray:
    destination = bytearray(BUCKET.size)
    await relay.get_into(JOB, V1, BUCKET.name, memoryview(destination), epoch=epoch)
    return destination


@asynccontextmanager
async def proxy(
    url: str, on_request: Callable[[bytes], int | None]
) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A proxy that closes each connection after as many bytes of answers as `on_request` says; None: all.

    -1: it answers nothing, and keeps the connection.
    """
    host, port = url.removeprefix("http://").split(":")
    waiting: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        left = on_request(head)
        if left == -1:
            waiting.append(writer)
            return
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        up_writer.write(head[:-2] + b"Connection: close\r\n\r\n")
        while (left is None or left > 0) and (chunk := await up_reader.read(min(left or 65536, 65536))):
            writer.write(chunk)
            await writer.drain()
            left = None if left is None else left - len(chunk)
        writer.close()
        up_writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", waiting
        for writer in waiting:
            writer.close()


# ---- ranges ----


async def test_a_bucket_comes_in_ranges_over_several_connections(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(url)
    asked: list[bytes] = []

    def cut_some(head: bytes) -> int | None:
        asked.append(next(line for line in head.split(b"\r\n") if line.startswith(b"Range")))
        return 400_000 if len(asked) in (2, 5) else None

    async with proxy(url, cut_some) as (through, _), RelayClient(through, streams=4, timeout_s=20) as relay:
        assert await fetch(relay) == BYTES
    pieces = -(-BUCKET.size // (1 << 20))
    assert len(asked) == len(set(asked)) == pieces + 2  # what was cut off is asked for from there
    assert not caplog.records


async def test_many_ranges_of_a_version_are_fetched_at_once(url: str) -> None:
    await publish(url)
    destination = memoryview(bytearray(len(BYTES)))
    cuts = sorted({0, len(BYTES), *np.random.default_rng(1).integers(0, len(BYTES), 9).tolist()})
    ranges = [Range(BUCKET.name, destination[first:stop], first) for first, stop in itertools.pairwise(cuts)]
    async with RelayClient(url, timeout_s=20) as relay:
        await fetch_ranges(relay, JOB, V1, ranges)
        assert destination == BYTES
        with pytest.raises(VersionGone):
            await fetch_ranges(relay, JOB, WeightVersion(2), ranges)
        with pytest.raises(EpochChanged):
            await fetch_ranges(relay, JOB, V1, ranges, epoch="another")


async def test_a_download_that_was_given_up_writes_nothing_more(url: str) -> None:
    await publish(url)
    asked = asyncio.Event()

    def keep_waiting(_head: bytes) -> int:
        asked.set()
        return -1

    async with (
        proxy(url, keep_waiting) as (through, waiting),
        RelayClient(through, shared_memory=False, timeout_s=20) as relay,
    ):
        destination = bytearray(BUCKET.size)
        call = asyncio.create_task(relay.get_into(JOB, V1, BUCKET.name, memoryview(destination)))
        await asked.wait()
        call.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([call])
        assert call.cancelled()
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {BUCKET.size}\r\n\r\n"
        waiting[0].write(head.encode() + BYTES)
        await asyncio.sleep(0.1)
        assert destination == bytes(BUCKET.size)


# ---- the relay's memory ----


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_arguments: object) -> int:
        pytest.fail("went over the network")

    monkeypatch.setattr(Lanes, "move", refuse)


async def test_a_reader_on_the_same_host_reads_the_relays_memory(
    url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    await publish(url)
    request.getfixturevalue("no_network")
    async with RelayClient(url, timeout_s=20) as relay:
        epoch = (await relay.manifest(JOB, V1)).epoch
        assert await fetch(relay, epoch) == BYTES
        with pytest.raises(CorruptDelta):
            await relay.get_into(JOB, V1, BUCKET.name, memoryview(bytearray(9)), offset=BUCKET.size - 8)
        with pytest.raises(EpochChanged):
            await fetch(relay, "another")


async def test_where_it_cannot_the_network_serves(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(url)
    monkeypatch.setattr(SharedReader, "open", lambda _placement: None)
    async with RelayClient(url, timeout_s=20) as relay:
        await relay.manifest(JOB, V1)
        assert await fetch(relay) == BYTES


async def test_a_relay_may_keep_its_memory_to_itself() -> None:
    async with serving(RelayConfig(port=0, capacity_bytes=64 << 20, shared_memory=False)) as url:
        await publish(url)
        async with RelayClient(url, timeout_s=20) as relay:
            await relay.manifest(JOB, V1)
            assert relay.seen_host == ""
            assert await fetch(relay) == BYTES


STRANGER = """
import asyncio, encodings.ascii, encodings.idna, os, sys
from rose.units import JobId, WeightVersion
from rose.weights.relay.local import RelayClient
os.setuid(65534)  # not before the imports: others may not be able to read the installation
async def main():
    async with RelayClient(sys.argv[1], timeout_s=20) as relay:
        manifest = (await relay.manifest(JobId("job-1"), WeightVersion(1))).manifest
        (bucket,) = manifest.buckets
        destination = bytearray(bucket.size)
        await relay.get_into(JobId("job-1"), WeightVersion(1), bucket.name, memoryview(destination))
        print(relay._reader, len(destination))
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_cannot_see_the_memory_and_is_served_over_the_network(url: str) -> None:
    await publish(url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STRANGER, url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert out.decode().split() == ["None", str(BUCKET.size)], errors.decode()


# ---- upgraded connections ----


async def upgraded(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"GET {BULK_PATH} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: {BULK_PROTOCOL}\r\n\r\n"
    writer.write(head.encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


async def reply(reader: asyncio.StreamReader) -> BulkReply:
    length = int.from_bytes(await reader.readexactly(4), "little")
    return msgspec.json.decode(await reader.readexactly(length), type=BulkReply)


async def used(url: str) -> int:
    async with RelayClient(url, timeout_s=10) as relay:
        return (await relay.stat(JOB)).used_bytes


def put_of(data: bytes, **changes: object) -> bytes:
    put = Put(JOB, 1, BUCKET.name, len(data), digest(data))
    return frame(msgspec.json.encode(msgspec.structs.replace(put, **changes)))


def part_of(ticket: str, data: bytes, start: int, stop: int) -> bytes:
    return frame(msgspec.json.encode(Part(ticket, start, stop - start))) + data[start:stop]


def finish_of(ticket: str) -> bytes:
    return frame(msgspec.json.encode(Finish(ticket)))


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "../etc"},
        {"version": -1},
        {"version": 1 << 60},
        {"bucket": "passwd"},
        {"size": 0},
        {"size": 1 << 40},
        {"digest": "short"},
    ],
)
async def test_frames_that_ask_for_nonsense_are_refused(url: str, changes: dict[str, object]) -> None:
    reader, writer = await upgraded(url)
    writer.write(put_of(b"x" * 9, **changes))
    answer = await reply(reader)
    assert answer.state == "refused"
    writer.write(put_of(b"x" * 9))
    assert (await reply(reader)).state == "send"
    writer.close()


@pytest.mark.parametrize("noise", [frame(b"{}"), frame(b"\xff" * 100), frame(b"[" * 9000)])
async def test_frames_that_cannot_be_read_are_refused(url: str, noise: bytes) -> None:
    reader, writer = await upgraded(url)
    writer.write(noise)
    assert (await reply(reader)).state == "refused"
    writer.close()


@pytest.mark.parametrize(
    "noise", [b"\xff" * 20_000, bytes(4), put_of(b"x" * 9) + b"x" * 9, put_of(b"x" * 9) * 2]
)
async def test_what_is_no_frame_ends_the_connection(url: str, noise: bytes) -> None:
    reader, writer = await upgraded(url)
    writer.write(noise)
    async with asyncio.timeout(60):
        assert await _rest(reader) == b""
    assert await used(url) == 0


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_bucket_may_come_in_any_pieces(url: str) -> None:
    reader, writer = await upgraded(url)
    data = BYTES[:300_000]
    for byte in put_of(data):
        writer.write(bytes([byte]))
        await writer.drain()
    opened = await reply(reader)
    assert opened.state == "send"
    everything = part_of(opened.ticket, data, 0, 100_000) + part_of(opened.ticket, data, 100_000, len(data))
    for first in range(0, len(everything), 70_001):
        writer.write(everything[first : first + 70_001])
        await writer.drain()
    assert [(await reply(reader)).state for _ in range(2)] == ["received", "received"]
    writer.write(finish_of(opened.ticket))
    assert (await reply(reader)).state == "stored"
    writer.write(put_of(data))
    assert (await reply(reader)).state == "stored"
    writer.write(put_of(data, digest=digest(b"other")))
    answer = await reply(reader)
    assert (answer.state, answer.refusal and answer.refusal.error) == ("refused", "conflict")
    writer.close()


async def test_parts_come_over_several_connections_in_any_order(url: str) -> None:
    data = BYTES[:3_000_000]
    opener, other = await upgraded(url), await upgraded(url)
    opener[1].write(put_of(data))
    ticket = (await reply(opener[0])).ticket
    other[1].write(part_of(ticket, data, 2_000_000, 3_000_000) + part_of(ticket, data, 0, 1_000_000))
    opener[1].write(part_of(ticket, data, 1_000_000, 2_000_000))
    assert (await reply(opener[0])).state == "received"
    assert [(await reply(other[0])).state for _ in range(2)] == ["received", "received"]
    opener[1].write(finish_of(ticket))
    assert (await reply(opener[0])).state == "stored"
    for _, writer in (opener, other):
        writer.close()


async def test_a_bucket_with_a_part_missing_is_refused(url: str) -> None:
    data = BYTES[:300_000]
    reader, writer = await upgraded(url)
    writer.write(put_of(data))
    ticket = (await reply(reader)).ticket
    writer.write(part_of(ticket, data, 0, 100_000))
    assert (await reply(reader)).state == "received"
    writer.write(finish_of(ticket))
    answer = await reply(reader)
    assert answer.refusal is not None
    assert answer.refusal.error == "corrupt"
    assert await used(url) == 0
    writer.close()


@pytest.mark.parametrize("span", [(-1, 5), (0, 0), (0, 10), (5, 10), (1 << 40, 1 << 41)])
async def test_a_part_beyond_its_bucket_ends_the_connection(url: str, span: tuple[int, int]) -> None:
    reader, writer = await upgraded(url)
    writer.write(put_of(b"x" * 9))
    ticket = (await reply(reader)).ticket
    other_reader, other = await upgraded(url)
    other.write(frame(msgspec.json.encode(Part(ticket, span[0], span[1] - span[0]))) + b"y" * 9)
    answer = await reply(other_reader)
    assert answer.refusal is not None
    assert answer.refusal.error == "bad_request"
    assert await _rest(other_reader) == b""
    writer.write(part_of(ticket, b"x" * 9, 0, 9) + finish_of(ticket))
    assert [(await reply(reader)).state for _ in range(2)] == ["received", "stored"]
    writer.close()


async def test_when_the_opener_goes_its_parts_go_too(url: str) -> None:
    data = BYTES[:300_000]
    reader, writer = await upgraded(url)
    writer.write(put_of(data))
    ticket = (await reply(reader)).ticket
    other_reader, other = await upgraded(url)
    other.write(part_of(ticket, data, 0, 300_000)[:1000])
    await asyncio.sleep(0.1)
    writer.transport.abort()
    async with asyncio.timeout(60):
        assert await _rest(other_reader) == b""
    late_reader, late = await upgraded(url)
    late.write(part_of(ticket, data, 0, 9))
    answer = await reply(late_reader)
    assert answer.refusal is not None
    assert answer.refusal.error == "ended"
    assert await used(url) == 0


async def test_a_writer_killed_in_the_middle_of_a_frame_or_a_bucket_leaves_no_trace(url: str) -> None:
    for sent in (put_of(b"x" * 99)[:20], put_of(b"x" * 99)):
        _, writer = await upgraded(url)
        writer.write(sent)
        await asyncio.sleep(0.1)
        writer.transport.abort()
    for _ in range(100):
        if not await used(url):
            return
        await asyncio.sleep(0.02)
    pytest.fail("memory is not freed")


async def test_an_upload_goes_on_when_one_of_its_connections_breaks(url: str) -> None:
    """Through a proxy that breaks the third connection after 3 MB."""
    host, port = url.removeprefix("http://").split(":")
    made = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        left = 3_000_000 if len(made) == 3 else None
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        back = asyncio.ensure_future(_copy(up_reader, writer, None))
        await _copy(reader, up_writer, left)
        back.cancel()
        writer.transport.abort()

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
        through = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RelayClient(through, streams=3, timeout_s=20) as relay:
            await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
        assert len(made) > 4
    async with RelayClient(url, timeout_s=20) as relay:
        assert await relay.commit(JOB, V1, ENCODED.manifest) == ()
        assert await fetch(relay) == BYTES


async def test_an_upload_begins_anew_at_a_relay_that_was_restarted_meanwhile() -> None:
    """Through a proxy that leads to another relay after some of the bytes, where tickets mean nothing."""
    config = RelayConfig(port=0, capacity_bytes=64 << 20)
    async with serving(config) as before, serving(config) as after:
        moved = 0
        broken: list[asyncio.StreamWriter] = []

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal moved
            url = after if broken else before
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            mine = [writer, up_writer]
            if url == before:
                open_ones.extend(mine)
            back = asyncio.ensure_future(_copy(up_reader, writer, None))
            while chunk := await reader.read(65536):
                moved += len(chunk)
                if moved > len(BYTES) // 3 and not broken:
                    broken.extend(open_ones)
                    for each in broken:
                        each.transport.abort()
                    break
                up_writer.write(chunk)
                await up_writer.drain()
            back.cancel()
            writer.transport.abort()

        open_ones: list[asyncio.StreamWriter] = []
        async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
            through = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with RelayClient(through, streams=3, timeout_s=20) as relay:
                await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
                assert await relay.commit(JOB, V1, ENCODED.manifest) == ()
        assert broken
        async with RelayClient(after, timeout_s=20) as relay:
            assert await fetch(relay) == BYTES


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
    with contextlib.suppress(ConnectionError):  # either end may leave
        while (left is None or left > 0) and (chunk := await reader.read(65536)):
            writer.write(chunk)
            await writer.drain()
            left = None if left is None else left - len(chunk)
    writer.close()


async def test_bytes_that_are_not_those_of_the_digest_are_refused(url: str) -> None:
    async with RelayClient(url, timeout_s=10) as relay:
        with pytest.raises(CorruptDelta):
            await relay.put_bucket(JOB, V1, BUCKET.name, b"other", BUCKET.digest)
        await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
        with pytest.raises(VersionConflict):
            await relay.put_bucket(JOB, V1, BUCKET.name, b"other", digest(b"other"))
        for number in (2, 3):
            await relay.put_bucket(JOB, WeightVersion(number), BUCKET.name, BYTES, BUCKET.digest)
        with pytest.raises(RelayFull):
            await relay.put_bucket(JOB, WeightVersion(4), BUCKET.name, BYTES, BUCKET.digest)


async def test_the_token_is_asked_of_uploads_and_places_too(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("s3cret")
    async with serving(RelayConfig(port=0, token_file=str(token))) as url:
        async with RelayClient(url, token="wrong", timeout_s=10) as relay:
            with pytest.raises(RelayDenied):
                await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
            with pytest.raises(RelayDenied):
                await relay.read(
                    "GET", f"/rose/relay/v1/jobs/job-1/versions/1/buckets/{BUCKET.name}/placement"
                )
        async with RelayClient(url, token="s3cret", timeout_s=10) as relay:
            await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)


async def test_buckets_of_many_megabytes_pass_through_tls_both_ways(tmp_path: Path) -> None:
    cert, key = await asyncio.to_thread(_certificate, tmp_path)
    config = RelayConfig(port=0, capacity_bytes=64 << 20, tls_cert=cert, tls_key=key)
    async with serving(config) as url:
        async with RelayClient(url, tls_ca=cert, shared_memory=False, streams=3, timeout_s=20) as relay:
            await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
            assert await relay.commit(JOB, V1, ENCODED.manifest) == ()
            assert await fetch(relay) == BYTES
        async with RelayClient(url, shared_memory=False, timeout_s=5) as stranger:
            with pytest.raises(ConfigError, match="TLS"):
                await fetch(stranger)
            with pytest.raises(ConfigError, match="TLS"):
                await stranger.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)


# ---- sockets ----


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_is_slow_is_not_one_that_is_silent(tls: bool, tmp_path: Path) -> None:
    """All of the bytes take longer than a connection may be silent; each of them does not."""
    uplink = Uplink("http://127.0.0.1:9", {}, None, Sending())
    near, far = _over_tls(tmp_path) if tls else socket.socketpair()
    near.settimeout(3)
    uplink._http.sock = near
    received, data = bytearray(), BYTES[:4_000_000]

    def read_slowly() -> None:
        read = 0
        while chunk := far.recv(16 << 10):
            received.extend(chunk)
            read += len(chunk)
            if read > 300_000:
                read = 0
                time.sleep(0.35)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    try:
        uplink.send_part(Part("ticket", 0, len(data)), memoryview(data))
    finally:
        near.shutdown(socket.SHUT_WR)
        reader.join()
        uplink.close()
        far.close()
    assert received.endswith(data)


def _over_tls(folder: Path) -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets that speak TLS, with small buffers."""
    cert, key = _certificate(folder)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=cert)
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(server.wrap_socket, far, server_side=True, suppress_ragged_eofs=True)
        wrapped = client.wrap_socket(near, server_hostname="127.0.0.1")
        return wrapped, accepting.result()


def _certificate(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=relay"
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*make.split(), *where], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("call", ["stat", "put_bucket", "get_into"])
async def test_one_silent_connection_does_not_use_up_the_time_of_a_call(url: str, call: str) -> None:
    """The first connection is taken by nobody: it says nothing, and stays open."""
    await publish(url)
    held: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        if len(held) == 1:
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        held.append(up_writer)
        back = asyncio.ensure_future(_copy(up_reader, writer, None))
        with contextlib.suppress(ConnectionError):
            await _copy(reader, up_writer, None)
        back.cancel()

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
        through = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RelayClient(through, timeout_s=9, shared_memory=False) as relay:
            if call == "stat":
                assert (await relay.stat(JOB)).versions == (1,)
            elif call == "get_into":
                assert await fetch(relay) == BYTES
            else:
                await relay.put_bucket(JOB, V1, BUCKET.name, BYTES, BUCKET.digest)
        for writer in held:
            writer.transport.abort()


def test_pacing_is_the_kernels() -> None:
    with socket.socket() as sock:
        Sending(pace_bytes_per_s=5_000_000).apply_to(sock.fileno())
        assert sock.getsockopt(socket.SOL_SOCKET, 47) == 5_000_000


async def test_a_congestion_control_that_is_not_there_is_said_at_start() -> None:
    with pytest.raises(ConfigError, match="congestion"):
        async with serving(RelayConfig(port=0, congestion="no-such-thing")):
            pass
    with pytest.raises(ConfigError, match="congestion"):
        RelayClient.from_config(RelayConfig(congestion="no-such-thing"))
    async with serving(RelayConfig(port=0, congestion="reno", pace_bytes_per_s=100_000_000)) as url:
        await publish(url)
        async with RelayClient(url, timeout_s=10, sending=Sending(congestion="cubic")) as relay:
            assert await fetch(relay) == BYTES
