"""The host's side: pull a version from the relay into a directory that is whole and verified, or not there.

Files arrive in `.<name>.partial`; buckets that are whole survive a restart.  When all of them decode, the
directory gets its name in one rename.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rose.errors import CorruptDelta, NotReady, TimedOut
from rose.units import NS_PER_MS, JobId, WeightVersion
from rose.weights import container, files
from rose.weights import manifest as manifests
from rose.weights.bits import empty_buffer
from rose.weights.digests import digest
from rose.weights.manifest import MANIFEST_NAME, Bucket, Manifest
from rose.weights.relay import Committed, EpochChanged, Relay, VersionGone
from rose.weights.relay.ranges import PARALLEL, run_some

_REPUBLISH_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Pulled:
    """A staged version, and what it took."""

    path: Path
    manifest: Manifest
    pull_ms: float
    """From the request for the manifest until the last byte was in its file."""
    verify_ms: float
    """Checking all files; nothing of them is used before."""


async def pull(
    relay: Relay,
    job: JobId,
    version: WeightVersion,
    directory: Path,
    *,
    timeout_s: float = 600,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> Pulled:
    """Stage a committed version as `directory` (`WeightStore.destination`).

    `check` sees the manifest before anything else is fetched, and raises what the pull then raises.
    Repeating it costs a look at the manifest and a check of the files; other files of that name are replaced.
    If the relay restarts meanwhile, waits for the trainer to publish again.  Raises VersionGone, CorruptDelta
    (nothing is staged), RelayUnavailable, TimedOut, NotReady (another pull of it is at work).
    """
    await asyncio.to_thread(directory.parent.mkdir, parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock")):
        try:
            async with asyncio.timeout(timeout_s):
                return await _pull(relay, job, version, directory, check)
        except TimeoutError:
            raise TimedOut(
                f"version {version} of {job} could not be pulled within {timeout_s:.0f} s"
            ) from None


async def _pull(
    relay: Relay, job: JobId, version: WeightVersion, directory: Path, check: Callable[[Manifest], None]
) -> Pulled:
    began_ns = time.monotonic_ns()
    committed = await _manifest(relay, job, version)
    if committed.manifest.undo:
        raise CorruptDelta(f"version {version} of {job} leads backwards: it is no trainer's")
    check(committed.manifest)
    pulled_ns = time.monotonic_ns()
    if not await asyncio.to_thread(_holds, directory, committed.manifest):
        partial = directory.with_name(f".{directory.name}.partial")
        await _fill(relay, committed, partial)
        pulled_ns = time.monotonic_ns()
        await asyncio.to_thread(_finish, partial, directory)
    verified_ns = time.monotonic_ns()
    return Pulled(
        directory,
        committed.manifest,
        (pulled_ns - began_ns) / NS_PER_MS,
        (verified_ns - pulled_ns) / NS_PER_MS,
    )


async def _manifest(relay: Relay, job: JobId, version: WeightVersion) -> Committed:
    try:
        return await relay.manifest(job, version)
    except CorruptDelta as error:
        raise CorruptDelta(f"the relay's manifest of version {version} of {job}: {error.what}") from None


async def _fill(relay: Relay, committed: Committed, partial: Path) -> None:
    """Bring all of a version into `partial`.  Survives restarts of the relay."""
    while True:
        manifest = committed.manifest
        await asyncio.to_thread(_prepare, partial, manifest)
        try:
            await run_some(PARALLEL, (_bring(relay, committed, each, partial) for each in manifest.buckets))
            return
        except EpochChanged:
            committed = await _republished(relay, manifest.job, manifest.version)


async def _bring(relay: Relay, committed: Committed, bucket: Bucket, partial: Path) -> None:
    """Bring one bucket into `partial`, unless it is there."""
    if await asyncio.to_thread(_bucket_arrived, partial, bucket):
        return
    data = empty_buffer(bucket.size)
    manifest = committed.manifest
    await relay.get_into(manifest.job, manifest.version, bucket.name, data, epoch=committed.epoch)
    if await asyncio.to_thread(digest, data) != bucket.digest:
        raise CorruptDelta(f"{bucket.name}: the relay sent other bytes than the manifest promises")
    writing = asyncio.create_task(asyncio.to_thread(files.write_durably, partial / bucket.name, data))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})  # or it would write into what the next attempt writes
        raise


async def _republished(relay: Relay, job: JobId, version: WeightVersion) -> Committed:
    """The version's manifest at a relay that was restarted, once it is there."""
    while True:
        try:
            return await relay.manifest(job, version)
        except VersionGone:
            await asyncio.sleep(_REPUBLISH_POLL_S)


def _holds(final: Path, manifest: Manifest) -> bool:
    """Whether the very version is staged already and still whole."""
    if not final.is_dir():
        return False
    try:
        if container.read_manifest(final) != manifest:
            return False
        container.check_buckets(manifest, container.read_buckets(final, manifest))
    except CorruptDelta:
        return False
    return True


def _prepare(partial: Path, manifest: Manifest) -> None:
    """An existing `partial` is kept: what it holds is checked bucket by bucket."""
    partial.mkdir(exist_ok=True)
    wanted = {bucket.name for bucket in manifest.buckets}
    for entry in partial.iterdir():
        if entry.name not in wanted:
            entry.unlink()
    files.write_durably(partial / MANIFEST_NAME, manifests.encode(manifest))


def _bucket_arrived(partial: Path, bucket: Bucket) -> bool:
    try:
        return digest(files.read_file(partial / bucket.name, bucket.size)) == bucket.digest
    except CorruptDelta:
        return False


def _finish(partial: Path, final: Path) -> None:
    """Verify all, then give the directory its name."""
    try:
        manifest = container.read_manifest(partial)
        container.check_buckets(manifest, container.read_buckets(partial, manifest))
    except CorruptDelta:
        shutil.rmtree(partial)
        raise
    files.sync_directory(partial)
    if final.exists():
        # Another version of that name: left by an earlier run of the job, or damaged since.
        stale = final.with_name(f".{final.name}.stale")
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
        shutil.rmtree(stale)
    partial.rename(final)
    files.sync_directory(final.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the process ends.  Raises NotReady."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotReady(f"{path.name}: another pull of this version is at work") from None
        yield
    finally:
        os.close(descriptor)
