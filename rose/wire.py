"""Messages between processes: rosed and rose-scheduler (ZMQ), and the control socket of rosed.

All are msgspec structs, tagged by name, encoded as JSON on the control socket (one message a line) and
as MessagePack over ZMQ.  Decoding checks every field; anything else is `ConfigError`-free garbage that the
receiver counts, logs once and drops.  Sizes are bounded by MESSAGE_BYTES_MAX.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from rose.core.events import ReplicaReport
from rose.units import JobId, NodeId, ReplicaId, WeightVersion

T_co = TypeVar("T_co", covariant=True)

PROTOCOL = 1
MESSAGE_BYTES_MAX = 1 << 20


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# ---- rosed -> rose-scheduler --------------------------------------------------------------------


class Register(Message, frozen=True):
    """First message of a session."""

    protocol: int
    node: NodeId
    session: str
    replicas: tuple[ReplicaReport, ...]


class Heartbeat(Message, frozen=True):
    """Sent every heartbeat period, and at once when something changed."""

    node: NodeId
    session: str
    sequence: int
    replicas: tuple[ReplicaReport, ...]


class Goodbye(Message, frozen=True):
    """The node leaves on purpose."""

    node: NodeId
    session: str


# ---- rose-scheduler -> rosed --------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Registration accepted."""

    session: str
    scheduler: str


class HeartbeatAck(Message, frozen=True):
    """Answer to each heartbeat; carries what only the scheduler knows."""

    sequence: int
    turns_in_flight: dict[ReplicaId, int]


class Unregistered(Message, frozen=True):
    """The scheduler does not know this session (it restarted): register again."""

    session: str
    replaced: bool = False
    """Another daemon of this name took its place: keep away, or they would oust each other for ever."""


class Step(Message, frozen=True):
    """A job's RL step began.  Sent again with the answer to each heartbeat; a repeat changes nothing."""

    job: JobId
    rl_step: int
    required_version: WeightVersion


class Lease(Message, frozen=True):
    """A replica is promised to a job (or no longer, `granted` false)."""

    replica: ReplicaId
    job: JobId
    lease: int
    granted: bool


ToScheduler = Register | Heartbeat | Goodbye
ToNode = Welcome | HeartbeatAck | Unregistered | Step | Lease


# ---- control socket of rosed (unix, one JSON message a line) -------------------------------------


class StatusRequest(Message, frozen=True):
    """`rose status`."""


class ReclaimRequest(Message, frozen=True):
    """`rose reclaim REPLICA`: one emergency cut now."""

    replica: ReplicaId
    reason: str = "operator"


class GateRequest(Message, frozen=True):
    """Override a replica's gate mode by name (closed, strict, slack, open); None takes the override back."""

    replica: ReplicaId
    mode: str | None
    token_cap: int = 0
    """Most tokens of a rollout step while the override stands; 0 leaves that as configured."""


class DrainRequest(Message, frozen=True):
    """Take a replica out of use, or back."""

    replica: ReplicaId
    drain: bool = True


class ActivityRequest(Message, frozen=True):
    """`rose deactivate REPLICA`: have it give its KV memory back; and `rose activate`."""

    replica: ReplicaId
    active: bool


class LendRequest(Message, frozen=True):
    """`rose lend off`: nothing is lent from now on, over restarts of rosed too; `rose lend on`."""

    on: bool
    reset: bool = False
    """Refill the error budget."""


class PinRequest(Message, frozen=True):
    """`rose weights rollback JOB VERSION`: go back to a version and stay; None (`follow`) ends that."""

    job: JobId
    version: WeightVersion | None


class Reply(Message, frozen=True):
    """Answer on the control socket; `error` empty means done."""

    error: str = ""
    hint: str = ""
    code: int = 0
    body: dict[str, Any] | None = None


ControlRequest = (
    StatusRequest | ReclaimRequest | GateRequest | DrainRequest | ActivityRequest | LendRequest | PinRequest
)


class _Decoder(Protocol[T_co]):
    def decode(self, data: bytes, /) -> T_co: ...


_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_to_node = msgspec.msgpack.Decoder(ToNode)
_control = msgspec.json.Decoder(ControlRequest)
_reply = msgspec.json.Decoder(Reply)
_packer = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()


def pack(message: ToScheduler | ToNode) -> bytes:
    """Encode a ZMQ message."""
    return _packer.encode(message)


def unpack_to_scheduler(data: bytes) -> ToScheduler:
    """Decode what a node sent; raises msgspec.DecodeError (ValidationError included) on garbage."""
    return _decoded(_to_scheduler, data)


def unpack_to_node(data: bytes) -> ToNode:
    """Decode what the scheduler sent; raises msgspec.DecodeError on garbage."""
    return _decoded(_to_node, data)


def pack_line(message: ControlRequest | Reply) -> bytes:
    """Encode a control message as one line."""
    return _json.encode(message) + b"\n"


def unpack_request(line: bytes) -> ControlRequest:
    """Decode a control request; raises msgspec.DecodeError on garbage."""
    return _decoded(_control, line)


def unpack_reply(line: bytes) -> Reply:
    """Decode a control reply; raises msgspec.DecodeError on garbage."""
    return _decoded(_reply, line)


def _decoded(decoder: _Decoder[T_co], data: bytes) -> T_co:
    if len(data) > MESSAGE_BYTES_MAX:
        raise msgspec.DecodeError(f"message of {len(data)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("message is nested too deeply") from None
