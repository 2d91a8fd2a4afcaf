"""A TCP proxy that does to a connection what networks do: cuts it, delays it, shreds it, loses it."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one connection. By default nothing does."""

    cut_after: int | None = None
    """Cut it when exactly so many bytes have gone to the client; 0: at once."""
    reset: bool = False
    """Cut with a reset in place of an orderly end."""
    server_unaware: bool = False
    """The server's side of a cut connection stays open, and nobody reads it."""
    piece_bytes: int | None = None
    """Deliver to the client in pieces of at most so many bytes."""
    delay_s: float = 0.0
    """Hold back each piece for so long."""


class FaultyProxy:
    """Passes connections on to a server, each with the next of the faults, and with none after the last.

    Use it with `async with`, on the loop of the test.
    """

    def __init__(self, target: str, faults: Iterable[Fault] = ()) -> None:
        """`target` is the server's HOST:PORT."""
        self._server = target
        self._faults = iter(faults)
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self.bytes_down: list[int] = []
        """Bytes that have gone to the client, by connection."""

    @property
    def target(self) -> str:
        """Where to connect instead of the server."""
        assert self._listener is not None, "the proxy is not running"
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    @property
    def num_connections(self) -> int:
        """Connections made so far."""
        return len(self.bytes_down)

    def lead_to(self, target: str) -> None:
        """Pass new connections on to another server."""
        self._server = target

    def black_hole(self) -> None:
        """Pass nothing on, either way; connections stay open and new ones are accepted."""
        self._passing.clear()

    def lift(self) -> None:
        """End the black hole: what was held back goes on, as TCP would send it again."""
        self._passing.set()

    def cut_all(self) -> None:
        """Cut every connection, at both ends."""
        for task in self._connections:
            task.cancel()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut_all()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bytes_down.append(0)
        fault = next(self._faults, Fault())
        task = asyncio.ensure_future(self._pass(len(self.bytes_down) - 1, fault, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _pass(
        self, number: int, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            if fault.cut_after == 0:
                _cut(writer, fault)
                return
            host, _, port = self._server.rpartition(":")
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(server_writer):
                up = asyncio.ensure_future(self._pump_up(reader, server_writer))
                down = asyncio.ensure_future(self._pump_down(number, fault, server_reader, writer))
                try:
                    await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                    if down.done() and fault.server_unaware and self.bytes_down[number] == fault.cut_after:
                        await asyncio.Event().wait()
                finally:
                    up.cancel()
                    down.cancel()
                    await asyncio.gather(up, down, return_exceptions=True)

    async def _pump_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()

    async def _pump_down(
        self, number: int, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            while data:
                await self._passing.wait()
                if fault.delay_s:
                    await asyncio.sleep(fault.delay_s)
                size = fault.piece_bytes or len(data)
                if fault.cut_after is not None:
                    size = min(size, fault.cut_after - self.bytes_down[number])
                piece, data = data[:size], data[size:]
                writer.write(piece)
                await writer.drain()
                self.bytes_down[number] += len(piece)
                if self.bytes_down[number] == fault.cut_after:
                    _cut(writer, fault)
                    return


def _cut(writer: asyncio.StreamWriter, fault: Fault) -> None:
    if fault.reset:
        linger = struct.pack("ii", 1, 0)  # close with a reset, and wait for nothing
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
