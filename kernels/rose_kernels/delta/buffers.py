"""Bounded reading and writing of the format's small numbers."""

from __future__ import annotations

from rose_kernels.delta.errors import CorruptDelta


def varint(value: int) -> bytes:
    """Seven bits a byte, least significant first, the top bit set on all but the last."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return 2 * value if value >= 0 else -2 * value - 1


def unzigzag(value: int) -> int:
    """The number that `zigzag` made this from."""
    return -(value >> 1) - 1 if value & 1 else value >> 1


class Cursor:
    """Reads forward through bytes and never past their end: whatever is missing raises CorruptDelta."""

    def __init__(self, data: bytes | memoryview, start: int = 0) -> None:
        self.data = memoryview(data)
        self.position = start

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self.data) - self.position

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        if count > self.left:
            raise CorruptDelta(f"{count} bytes wanted at {self.position} of {len(self.data)}")
        self.position += count
        return self.data[self.position - count : self.position]

    def uint(self, size: int) -> int:
        """A little-endian unsigned integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        """A variable-length integer of at most 32 bits."""
        value = shift = 0
        for byte in self.data[self.position : self.position + 5]:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 and value < 1 << 32:
                self.position += shift // 7
                return value
        raise CorruptDelta(f"no number of at most 32 bits at {self.position} of {len(self.data)}")
