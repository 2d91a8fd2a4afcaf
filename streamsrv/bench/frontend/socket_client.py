"""A client that reads no more of answers than where they end, for machines without h2load.

    python -m streamsrv.bench.frontend.socket_client PROTOCOL HOST:PORT PATH FILE NUM_STREAMS NUM_REQUESTS

Prints what it counted in h2load's words.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import uvloop

from streamsrv.bench.frontend.http2 import AnswerCounter, opening, request
from streamsrv.bench.frontend.load import Protocol, Target, num_connections
from streamsrv.config import Address

_LAST_CHUNK = b"0\r\n\r\n"


class _Requests:
    """How many are still to be sent, and how many have been answered."""

    def __init__(self, num_requests: int) -> None:
        self.num_left = num_requests
        self.num_open = num_requests
        self.num_failed = 0
        self.num_bytes = 0
        self.done = asyncio.Event()

    def take(self, most: int) -> int:
        count = min(most, self.num_left)
        self.num_left -= count
        return count

    def ended(self, count: int, *, failed: bool = False) -> None:
        self.num_open -= count
        self.num_failed += count if failed else 0
        if self.num_open <= 0:
            self.done.set()


class _Grpc(asyncio.Protocol):
    def __init__(self, target: Target, num_streams: int, requests: _Requests) -> None:
        self._requests = requests
        self._num_streams = num_streams
        self._num_running = 0
        self._next_id = 1
        self._counter = AnswerCounter()
        self._body = target.body.read_bytes()
        self._headers = [(":method", "POST"), (":scheme", "http"), (":path", target.path)]
        self._headers += [(":authority", str(target.address))]
        self._headers += [("content-type", target.content_type), ("te", "trailers")]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(opening())
        self._send(self._num_streams)

    def _send(self, most: int) -> None:
        count = self._requests.take(most)
        self._num_running += count
        for _ in range(count):
            self._transport.write(request(self._next_id, self._headers, self._body))
            self._next_id += 2

    def data_received(self, data: bytes) -> None:
        counter = self._counter
        num_ended, num_reset = counter.num_ended, counter.num_reset
        answer = counter.receive(data)
        if answer:
            self._transport.write(answer)
        self._requests.num_bytes += len(data)
        ended, reset = counter.num_ended - num_ended, counter.num_reset - num_reset
        if ended or reset:
            self._num_running -= ended + reset
            self._send(ended + reset)
            self._requests.ended(reset, failed=True)
            self._requests.ended(ended)

    def connection_lost(self, _: Exception | None) -> None:
        self._requests.ended(self._num_running, failed=True)


class _Http1(asyncio.Protocol):
    def __init__(self, target: Target, requests: _Requests) -> None:
        self._requests = requests
        body = target.body.read_bytes()
        head = (
            f"POST {target.path} HTTP/1.1\r\nHost: {target.address}\r\n"
            f"Content-Type: {target.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._end = b""
        self._running = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._running = bool(self._requests.take(1))
        if self._running:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._requests.num_bytes += len(data)
        # No event ends so: its own chunk's end comes behind a line end of its own.
        self._end = (self._end + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._end == _LAST_CHUNK:
            self._end = b""
            self._requests.ended(1)
            self._send()

    def connection_lost(self, _: Exception | None) -> None:
        if self._running:
            self._requests.ended(1, failed=True)


async def _run(target: Target, num_streams: int, num_requests: int) -> None:
    requests = _Requests(num_requests)
    connections = num_connections(target.protocol, num_streams)
    make: Callable[[], asyncio.Protocol]
    if target.protocol is Protocol.GRPC:
        make = lambda: _Grpc(target, num_streams // connections, requests)  # noqa: E731
    else:
        make = lambda: _Http1(target, requests)  # noqa: E731
    began_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(make, target.address.host, target.address.port)
    await requests.done.wait()
    seconds = time.perf_counter() - began_s
    good = num_requests - requests.num_failed
    print(f"finished in {seconds:.6f}s, {num_requests / seconds:.2f} req/s")
    print(
        f"requests: {num_requests} total, {num_requests} started, {num_requests} done, {good} succeeded, "
        f"{requests.num_failed} failed, 0 errored, 0 timeout"
    )
    print(f"traffic: {requests.num_bytes}B ({requests.num_bytes}) total")


def main() -> None:
    """Put the load that the arguments say."""
    protocol, address, path, body, num_streams, num_requests = sys.argv[1:]
    target = Target(Protocol[protocol], Address.parse(address, "the address"), path, Path(body))
    uvloop.run(_run(target, int(num_streams), int(num_requests)))


if __name__ == "__main__":
    main()
