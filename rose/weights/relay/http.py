"""The HTTP dialect of `rose relay`: what its clients and its server agree on.

    PUT    /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}   x-rose-digest
    GET    /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}   Range
    POST   /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}/placement   Claim -> Claimed
    PUT    /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}/placement   Placement: it is there
    DELETE /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}/placement   Placement: it is not
    GET    /rose/relay/v1/jobs/{job}/versions/{version}/buckets/{bucket}/placement   -> Placement
    PUT    /rose/relay/v1/jobs/{job}/versions/{version}/manifest            x-rose-encode-ms, if known
    GET    /rose/relay/v1/jobs/{job}/versions/{version}/manifest
    DELETE /rose/relay/v1/jobs/{job}/versions/{version}/staged
    DELETE /rose/relay/v1/jobs/{job}/versions/{version}
    GET    /rose/relay/v1/jobs/{job}                                        -> JobStat
    GET    /rose/relay/v1/jobs/{job}/latest?after=&wait_s=                  -> Latest
    GET    /rose/relay/v1/bulk         Upgrade: rose-bulk-1; then Put, Part and bytes, Finish -> BulkReply
    GET    /health
    GET    /metrics                                                         for Prometheus

Buckets themselves go to and from an embedded relay; with one of kind mooncake only their places do.  A client
on an embedded relay's host asks it for the place too (-> SharedPlacement).  Every answer names the relay's
epoch in `x-rose-epoch`; every error is a `Refusal` in JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rose.errors import CorruptDelta, RoseError, VersionConflict
from rose.units import WeightVersion
from rose.weights.relay import RelayDenied, RelayFull, VersionGone

ROOT = "/rose/relay/v1/jobs"
BULK_PATH = "/rose/relay/v1/bulk"
BULK_PROTOCOL = "rose-bulk-1"
"""Of the `Upgrade` header.  Afterwards: frames of a 4-byte little-endian length and JSON."""
FRAME_BYTES_MAX = 16 << 10
HOST_HEADER = "x-rose-host"
"""Names the machine (`host_id`) of a relay whose memory can be read directly."""
EPOCH_HEADER = "x-rose-epoch"
DIGEST_HEADER = "x-rose-digest"
ENCODE_MS_HEADER = "x-rose-encode-ms"
"""Of a manifest: what its trainer took to make the version."""
WAIT_MAX_S = 60.0
"""Longest long-poll; a longer wait is several polls."""


class BadRequest(RoseError):
    """A request that no retry will help."""


class UploadEnded(RoseError):
    """The relay knows no such ticket: it was restarted, or lost the connection that opened the bucket."""


class Refusal(msgspec.Struct, frozen=True):
    """Body of every error answer."""

    error: str
    detail: str
    missing: tuple[str, ...] = ()
    """Buckets without which the version cannot be committed (error `missing`)."""


class Latest(msgspec.Struct, frozen=True):
    """The newest version above the one asked for, if any."""

    version: WeightVersion | None


class Claim(msgspec.Struct, frozen=True):
    """A bucket that a writer wants to put into the Mooncake Store."""

    size: int
    digest: str


class Placement(msgspec.Struct, frozen=True):
    """Where a bucket lies, or is to be put, in the Mooncake Store."""

    key: str
    size: int


class Claimed(msgspec.Struct, frozen=True):
    """Where to put a claimed bucket; nowhere if the relay has these very bytes."""

    placement: Placement | None


class SharedPlacement(msgspec.Struct, frozen=True):
    """Where a bucket lies in the embedded relay's memory: see `rose.weights.relay.shared`."""

    pid: int
    fd: int
    """Descriptor of the arena in that process."""
    offset: int
    """Of the bucket's header page."""
    size: int
    tag: str


class Put(msgspec.Struct, frozen=True, tag="put"):
    """A bucket that a writer wants to send, in parts.  Answers: `send`, `stored`, `refused`."""

    job: str
    version: int
    bucket: str
    size: int
    digest: str


class Part(msgspec.Struct, frozen=True, tag="part"):
    """`size` bytes of a bucket from `start` on follow.  Answers: `received`; or `refused`, and the end."""

    ticket: str
    start: int
    size: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """All parts were received.  Answers: `stored`, `refused`."""

    ticket: str


BulkRequest = Put | Part | Finish


class BulkReply(msgspec.Struct, frozen=True):
    """`send`: the bucket may come, under this ticket.  `stored`: the relay has it.  `refused`: and why."""

    state: Literal["send", "received", "stored", "refused"]
    refusal: Refusal | None = None
    ticket: str = ""


STATUS_BY_ERROR: dict[str, tuple[int, type[RoseError]]] = {
    "bad_request": (400, BadRequest),
    "denied": (401, RelayDenied),
    "gone": (404, VersionGone),
    "ended": (410, UploadEnded),
    "conflict": (409, VersionConflict),
    "corrupt": (422, CorruptDelta),
    "full": (507, RelayFull),
}
"""Error code in a Refusal -> HTTP status, and the exception it stands for on both sides."""

MISSING = "missing"
MISSING_STATUS = 409
