"""A TCP relay that counts what passes."""

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes that passed, without TCP's and IP's own headers."""

    up: int
    """From clients to the server."""
    down: int
    """From the server to clients."""

    def __add__(self, other: "ByteCount") -> "ByteCount":
        return ByteCount(self.up + other.up, self.down + other.down)

    def __sub__(self, earlier: "ByteCount") -> "ByteCount":
        return ByteCount(self.up - earlier.up, self.down - earlier.down)


class ByteRelay:
    """Passes connections on to a server, unchanged, on a port of its own of 127.0.0.1.

    Everything is counted that the two ends put on their connection: for gRPC that is HTTP/2's frames and
    compressed headers, settings, window updates and pings with the messages. Use it with `async with`.
    """

    def __init__(self, host: str, port: int) -> None:
        """`host` and `port` are the server's."""
        self._host = host
        self._port = port
        self._up = 0
        self._down = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> str:
        """Where to connect instead of the server."""
        assert self._server is not None, "the relay is not running"
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def count(self) -> ByteCount:
        """What has passed so far."""
        return ByteCount(self._up, self._down)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.closing(writer):
                server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
                with contextlib.closing(server_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pump(reader, server_writer, upwards=True))
                        group.create_task(self._pump(server_reader, writer, upwards=False))
        except* OSError:
            pass  # an end is not there or went away; the other one has been closed, which tells it

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upwards: bool
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if upwards:
                self._up += len(data)
            else:
                self._down += len(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()
