"""GGUF files byte by byte, also such as no writer would write."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

UINT32, STRING, ARRAY = 4, 8, 9
F32 = 0


def text(value: str | bytes) -> bytes:
    """Encode a string as GGUF does: its length, then its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    """Encode one key, the type of its value, and the value."""
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    """Encode an array's value."""
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str, dims: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """Encode one entry of the table of tensors; the innermost dimension comes first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@dataclass
class RawGguf:
    """The parts of a file."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    num_tensors: int | None = None
    num_entries: int | None = None

    def to_bytes(self, alignment: int = 32) -> bytes:
        """Lay the parts out."""
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        header = self.magic + self.version + struct.pack("<QQ", num_tensors, num_entries)
        header += b"".join(self.entries) + b"".join(self.tensors)
        return header + bytes(-len(header) % alignment) + self.data
