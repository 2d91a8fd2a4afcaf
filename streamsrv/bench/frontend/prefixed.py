"""Messages with gRPC's 5-byte prefix, one after the other in a file.

Source: gRPC over HTTP/2, "Length-Prefixed-Message": a byte that says whether it is compressed, and its length
in four bytes, the greatest first.
"""

import struct
from collections.abc import Iterable

_PREFIX = struct.Struct(">BI")


def pack(messages: Iterable[bytes]) -> bytes:
    """Join messages, each behind its prefix."""
    return b"".join([_PREFIX.pack(0, len(message)) + message for message in messages])


def unpack(data: bytes) -> list[bytes]:
    """Part what `pack` joined."""
    messages, begin = [], 0
    while begin < len(data):
        _, size = _PREFIX.unpack_from(data, begin)
        begin += _PREFIX.size
        messages.append(data[begin : begin + size])
        begin += size
    return messages
