import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamsrv.bench.relay import ByteCount, ByteRelay


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """A server that reads to the end, then sends `answer`; gives its port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def exchange(target: str, data: bytes) -> bytes:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_every_byte_arrives_and_is_counted_in_its_direction() -> None:
    up, down = os.urandom(300_001), os.urandom(1_000_003)
    async with answering(down) as port, ByteRelay("127.0.0.1", port) as relay:
        assert await exchange(relay.target, up) == down
        assert relay.count == ByteCount(up=len(up), down=len(down))


async def test_connections_at_the_same_time_are_counted_together() -> None:
    async with answering(b"12345") as port, ByteRelay("127.0.0.1", port) as relay:
        before = relay.count
        await asyncio.gather(*(exchange(relay.target, b"abc") for _ in range(20)))
        assert relay.count - before == ByteCount(up=60, down=100)


async def test_a_server_that_is_not_there_closes_the_clients_connection() -> None:
    async with answering(b"") as port:
        pass
    async with ByteRelay("127.0.0.1", port) as relay:
        with contextlib.suppress(ConnectionError):  # a reset says the same as an end
            assert await exchange(relay.target, b"abc") == b""
        assert relay.count.down == 0


async def test_leaving_ends_connections_that_are_open() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(3))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with ByteRelay("127.0.0.1", server.sockets[0].getsockname()[1]) as relay:
        host, _, port = relay.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"abc"
    assert await reader.read() == b""
    writer.close()
    server.close()
