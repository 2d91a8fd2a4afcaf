"""The three servers on one processor, and the load from another."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from streamsrv.bench.cpu_time import CpuClock
from streamsrv.bench.errors import BenchError
from streamsrv.bench.frontend.bare_server import SERVICE
from streamsrv.bench.frontend.load import Protocol, Target, put_load
from streamsrv.bench.frontend.prefixed import pack
from streamsrv.bench.frontend.sample import Sample
from streamsrv.bench.frontend.sse_server import PATH, is_installed, merged
from streamsrv.bench.frontend.variant import BARE_EIGHT, BARE_ONE, Server, Variant, ours
from streamsrv.bench.processes import LISTENING, ListeningProcess, listening_process, on_core
from streamsrv.bench.suite.sse import sse_events
from streamsrv.chunks import ChunkDecoder
from streamsrv.client import make_request
from streamsrv.config import Address
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub

MAX_TOKENS = 96
"""Tokens of a stream: as many as the script has without an end, and as 1,024 streams have room for."""
MOST_STREAMS = 1024
SERVE_FLAGS = (
    *("--engine", "scripted", "--log-level", "warning", "--listen", "127.0.0.1:0"),
    *("--metrics-listen", "127.0.0.1:0", "--drain-grace-s", "0", "--log-memory-mib", "512"),
    *("--max-running", str(MOST_STREAMS), "--max-waiting", str(MOST_STREAMS)),
    *("--max-waiting-per-caller", str(2 * MOST_STREAMS), "--max-step-tokens", str(4 * MOST_STREAMS)),
)
_GENERATE = "/streamsrv.v1.InferenceService/Generate"
_MESSAGES = "streamsrv_messages_total "


@dataclass(frozen=True, slots=True)
class Cores:
    """Which processors are used; None where there is only one, which all share."""

    server: int | None
    load: int | None

    @classmethod
    def choose(cls) -> "Cores":
        """Take the first two of those that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[1]) if len(allowed) > 1 else cls(None, None)


def generate_request(variant: Variant, max_tokens: int = MAX_TOKENS) -> pb.GenerateRequest:
    """Make the request that a variant of our own server is measured with."""
    return make_request(
        "x",
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        zstd=variant.zstd,
        max_tokens_per_chunk=variant.tokens_per_message,
        min_chunk_interval_ms=variant.interval_ms,
    )


async def record(address: Address, request: pb.GenerateRequest) -> tuple[list[bytes], list[str]]:
    """Ask our server once; the messages as they came, and the text of each."""
    messages, texts, decoder = [], [], ChunkDecoder(0)
    async with grpc.aio.insecure_channel(str(address)) as channel:
        stub: Any = InferenceServiceStub(channel)
        async for message in stub.Generate(request):
            messages.append(message.SerializeToString())
            texts += [e.tokens.text for e in decoder.decode(message).events if e.HasField("tokens")]
    return messages, texts


class Rig:
    """Runs one variant at a time against servers that are there for all of them."""

    def __init__(
        self, servers: dict[Server, ListeningProcess], folder: Path, cores: Cores, h2load: str | None
    ) -> None:
        """Files for the requests go to `folder`; without `h2load` our own client is used."""
        self._servers = servers
        self._folder = folder
        self._cores = cores
        self._h2load = h2load
        self._clocks = {server: CpuClock(process.pid) for server, process in servers.items()}
        self.num_bare_messages: dict[Variant, int] = {}
        """Of a stream of the first floor."""
        self.pieces: list[str] = []
        """The text of each token."""

    def can_run(self, variant: Variant) -> bool:
        """Whether its server is there."""
        return variant.server in self._servers

    async def run(self, variant: Variant, num_streams: int, num_requests: int) -> Sample:
        """Send so many requests, `num_streams` at a time.

        Raises:
            BenchError: a request failed.
        """
        clock, is_ours = self._clocks[variant.server], variant.server is Server.OURS
        num_before = await self._num_sent() if is_ours else 0
        threads_before_s = self._other_threads(variant.server)
        cpu_before_s = clock.seconds()
        counts = await put_load(
            self._target(variant), num_streams, num_requests, core=self._cores.load, h2load=self._h2load
        )
        cpu_s = clock.seconds() - cpu_before_s
        worker_cpu_s = 0.0
        if is_ours:
            threads_s = self._other_threads(variant.server)
            worker_cpu_s = max(s - threads_before_s.get(i, 0.0) for i, s in threads_s.items())
            num_messages = await self._num_sent() - num_before + num_requests  # with a StreamStart each
        else:
            num_messages = num_requests * self._num_messages(variant)
        num_tokens = num_requests * MAX_TOKENS
        return Sample(counts.seconds, num_messages, num_tokens, cpu_s, counts.wire_bytes, worker_cpu_s)

    def _other_threads(self, server: Server) -> dict[int, float]:
        """Processor time of a server's threads but the event loop's, by their ids.

        Of ours the worker's is by far the greatest; the others are grpc's.
        """
        pid = self._servers[server].pid
        threads = psutil.Process(pid).threads()
        return {t.id: t.user_time + t.system_time for t in threads if t.id != pid}

    def _num_messages(self, variant: Variant) -> int:
        if variant.server is Server.BARE:
            return self.num_bare_messages[variant]
        pieces = merged(self.pieces, variant.tokens_per_message or 1)
        return sum(1 for _ in sse_events(pieces, "", "", 0))

    def _target(self, variant: Variant) -> Target:
        address = self._servers[variant.server].addresses[0]
        if variant.server is Server.OURS:
            request = pack([generate_request(variant).SerializeToString()])
            return Target(Protocol.GRPC, address, _GENERATE, self._file(request))
        if variant.server is Server.BARE:
            path = f"/{SERVICE}/{bare_name(variant)}"
            return Target(Protocol.GRPC, address, path, self._file(pack([b""])))
        body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        path = f"{PATH}?tokens={variant.tokens_per_message}"
        return Target(Protocol.HTTP1, address, path, self._file(json.dumps(body).encode()))

    def _file(self, data: bytes) -> Path:
        path = self._folder / "request"
        path.write_bytes(data)
        return path

    async def _num_sent(self) -> int:
        """Messages with events that our server has sent since its start, as its metrics say."""
        address = self._servers[Server.OURS].addresses[1]
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with contextlib.closing(writer):
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            text = (await reader.read()).decode()
        for line in text.splitlines():
            if line.startswith(_MESSAGES):
                return int(float(line.removeprefix(_MESSAGES)))
        raise BenchError("the server's metrics do not say how many messages it has sent")


def bare_name(variant: Variant) -> str:
    """What the first floor calls the messages of a variant."""
    return f"Send{variant.tokens_per_message}"


@asynccontextmanager
async def running_rig(cores: Cores, h2load: str | None) -> AsyncIterator[Rig]:
    """Start the servers; the floors send what ours has been seen to send. Without FastAPI there is one floor.

    Raises:
        BenchError: one of them cannot be started.
    """
    with tempfile.TemporaryDirectory() as name, on_core(cores.load):
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            serve = ("-m", "streamsrv", "serve", *SERVE_FLAGS)
            mine = await stack.enter_async_context(
                listening_process("the server", *serve, says=(LISTENING, "metrics on "), core=cores.server)
            )
            files, num_messages = [], {}
            pieces: list[str] = []
            for variant in (BARE_ONE, BARE_EIGHT):
                request = generate_request(ours(variant.tokens_per_message))
                messages, texts = await record(mine.addresses[0], request)
                pieces = pieces or texts
                num_messages[variant] = len(messages)
                path = folder / bare_name(variant)
                path.write_bytes(pack(messages))
                files.append(f"{path.name}={path}")
            texts_path = folder / "texts"
            texts_path.write_text(json.dumps(pieces))
            bare = await stack.enter_async_context(
                listening_process(
                    "the bare handler",
                    "-m",
                    "streamsrv.bench.frontend.bare_server",
                    *files,
                    core=cores.server,
                )
            )
            servers = {Server.OURS: mine, Server.BARE: bare}
            if is_installed():
                servers[Server.SSE] = await stack.enter_async_context(
                    listening_process(
                        *("the SSE server", "-m", "streamsrv.bench.frontend.sse_server", str(texts_path)),
                        core=cores.server,
                    )
                )
            rig = Rig(servers, folder, cores, h2load)
            rig.num_bare_messages, rig.pieces = num_messages, pieces
            yield rig
