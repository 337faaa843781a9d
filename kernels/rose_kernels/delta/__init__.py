"""The exponent-class delta codec.  The format is specified in docs/delta-format.md."""

from rose_kernels.delta.codec import (
    DistantShard,
    EncodedGroup,
    EncodedShard,
    Settings,
    Shard,
    ShardReader,
    encode_group,
)
from rose_kernels.delta.elements import BY_NAME as FORMATS
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.history import advance, new_history
from rose_kernels.delta.kernel import Kernels
from rose_kernels.delta.select import kernels
from rose_kernels.delta.shard import ChunkPlace, Mode, ShardHeader, header_length, read_header
from rose_kernels.delta.tables import GroupTables

__all__ = [
    "FORMATS",
    "ChunkPlace",
    "CorruptDelta",
    "DistantShard",
    "EncodedGroup",
    "EncodedShard",
    "GroupTables",
    "Kernels",
    "Mode",
    "Settings",
    "Shard",
    "ShardHeader",
    "ShardReader",
    "advance",
    "encode_group",
    "header_length",
    "kernels",
    "new_history",
    "read_header",
]
