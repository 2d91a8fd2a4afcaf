"""Bytes on this process's own connections, as its kernel counts them."""

import os
import socket
import struct
import sys
from dataclasses import dataclass

import psutil

from streamsrv.bench.relay import ByteCount

# Where the two counts of 64 bits begin in Linux's struct tcp_info (linux/tcp.h), which only ever grows.
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128
_INFO_BYTES = 136


@dataclass(frozen=True, slots=True)
class SocketBytes:
    """The counts of all connections to a port at one moment."""

    counts: tuple[tuple[int, ByteCount], ...]
    """By the local port of each."""

    @classmethod
    def now(cls, port: int) -> "SocketBytes":
        """Read them. Empty where the system is not Linux."""
        counts = []
        for connection in psutil.Process().net_connections("tcp") if sys.platform == "linux" else ():
            is_ours = connection.raddr and connection.raddr.port == port
            if is_ours and connection.fd >= 0 and (count := _count(connection.fd)):
                counts.append((connection.laddr.port, count))
        return cls(tuple(sorted(counts, key=lambda item: item[0])))

    def since(self, earlier: "SocketBytes") -> ByteCount | None:
        """Count what passed in between; None if there is no connection, or not the same ones.

        TCP's and IP's own headers are not in it; TLS's records are.
        """
        if not self.counts or [port for port, _ in self.counts] != [port for port, _ in earlier.counts]:
            return None
        total = ByteCount(0, 0)
        for (_, now), (_, before) in zip(self.counts, earlier.counts, strict=True):
            total += now - before
        return total


def _count(descriptor: int) -> ByteCount | None:
    try:
        # gRPC owns the descriptor and may close it at any time.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return None
    (acked,) = struct.unpack_from("Q", info, _BYTES_ACKED_AT)
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)
    return ByteCount(up=acked, down=received)
