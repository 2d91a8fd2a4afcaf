"""Load that costs its own processor little: h2load, or a small client of our own."""

import asyncio
import re
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from streamsrv.bench.errors import BenchError
from streamsrv.bench.processes import on_core
from streamsrv.config import Address

STREAMS_PER_CONNECTION = 64
"""Calls of gRPC at the same time on one connection; a stream of HTTP/1.1 has one of its own."""
INSTALL = "apt-get install nghttp2-client"
_TIMEOUT_S = 300.0


class Protocol(Enum):
    """How a request is sent."""

    GRPC = "gRPC over HTTP/2"
    HTTP1 = "HTTP/1.1"


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of whom."""

    protocol: Protocol
    address: Address
    path: str
    body: Path
    """File with the request: with its 5-byte prefix for gRPC, JSON for HTTP/1.1."""

    @property
    def content_type(self) -> str:
        """The header that says what the request is."""
        return "application/grpc" if self.protocol is Protocol.GRPC else "application/json"


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """What came back."""

    seconds: float
    num_requests: int
    wire_bytes: int
    """All that the server put on its connections, without TCP's own headers."""


def find_h2load() -> str | None:
    """Where h2load is; None if it is not installed."""
    return shutil.which("h2load")


def num_connections(protocol: Protocol, num_streams: int) -> int:
    """On how many connections so many streams run."""
    if protocol is Protocol.HTTP1:
        return num_streams
    return -(-num_streams // STREAMS_PER_CONNECTION)


def h2load_command(h2load: str, target: Target, num_streams: int, num_requests: int) -> list[str]:
    """Form its command line."""
    connections = num_connections(target.protocol, num_streams)
    command = [h2load, "-n", str(num_requests), "-c", str(connections), "-t", "1", "-d", str(target.body)]
    command += ["-H", f"content-type: {target.content_type}"]
    if target.protocol is Protocol.GRPC:
        command += ["-m", str(num_streams // connections), "-H", "te: trailers"]
    else:
        command += ["--h1", "-m", "1"]
    return [*command, f"http://{target.address}{target.path}"]


def parse_h2load(text: str) -> LoadCounts:
    """Read what h2load prints at its end.

    Raises:
        BenchError: a request failed, or it prints something else.
    """
    took = re.search(r"finished in ([\d.]+)(us|ms|s|m)\b", text)
    requests = re.search(r"requests: (\d+) total, .* (\d+) succeeded, (\d+) failed, (\d+) errored", text)
    traffic = re.search(r"traffic: \S+ \((\d+)\) total", text)
    if took is None or requests is None or traffic is None:
        last = text.strip().rpartition("\n")[2]
        raise BenchError(f"h2load did not say what it counted; its last line is {last!r}")
    total, succeeded = int(requests[1]), int(requests[2])
    if succeeded != total:
        raise BenchError(f"of {total} requests of h2load {total - succeeded} failed")
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}[took[2]]
    return LoadCounts(float(took[1]) * scale, total, int(traffic[1]))


async def put_load(
    target: Target, num_streams: int, num_requests: int, *, core: int | None, h2load: str | None
) -> LoadCounts:
    """Send requests, `num_streams` at a time, from a process on `core`; `h2load` None is our own client.

    Raises:
        BenchError: a request failed, or nothing came back for minutes.
    """
    if h2load is not None:
        command = h2load_command(h2load, target, num_streams, num_requests)
    else:
        command = [sys.executable, "-m", "streamsrv.bench.frontend.socket_client", target.protocol.name]
        command += [str(target.address), target.path, str(target.body), str(num_streams), str(num_requests)]
    with on_core(core):
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            text = (await process.communicate())[0].decode(errors="replace")
    except TimeoutError:
        raise BenchError(f"{command[0]} had no answer to all requests after {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return parse_h2load(text)
