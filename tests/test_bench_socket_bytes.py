import sys

import pytest

from streamsrv.bench.load import load_client
from streamsrv.bench.relay import ByteCount, ByteRelay
from streamsrv.bench.socket_bytes import SocketBytes
from tests.servers import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts")


async def test_the_kernel_counts_what_a_relay_counts() -> None:
    async with running() as server:
        host, _, port = server.target.rpartition(":")
        async with ByteRelay(host, int(port)) as relay, load_client(relay.target) as client:
            relay_port = int(relay.target.rpartition(":")[2])
            await client.server_info()
            before, relay_before = SocketBytes.now(relay_port), relay.count
            await client.generate("one two three", max_tokens=20, ignore_eos=True).text()
            await client.server_info()  # whose answer comes behind all that is counted
            counted, relayed = SocketBytes.now(relay_port).since(before), relay.count - relay_before
    assert counted is not None
    # Pings and window updates may pass between the two looks; a byte sent is counted when it is acknowledged.
    assert counted.down == pytest.approx(relayed.down, abs=64)
    assert counted.up == pytest.approx(relayed.up, abs=200)


def test_a_connection_that_was_not_there_before_makes_the_count_unknown() -> None:
    now = SocketBytes(((1, ByteCount(5, 7)), (2, ByteCount(1, 1))))
    assert now.since(SocketBytes(((1, ByteCount(2, 3)), (2, ByteCount(0, 1))))) == ByteCount(4, 4)
    assert now.since(SocketBytes(((1, ByteCount(2, 3)),))) is None
    assert SocketBytes(()).since(SocketBytes(())) is None


def test_without_a_connection_there_is_nothing_to_count() -> None:
    assert SocketBytes.now(1) == SocketBytes(())
