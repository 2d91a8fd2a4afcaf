"""What is compared, running: streamsrv as it is served, and a peer in its process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from pathlib import Path

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import load_client
from streamsrv.bench.peers.environment import PeerEnvironment
from streamsrv.bench.peers.figures import PeerStream
from streamsrv.bench.peers.http_streams import run_http
from streamsrv.bench.peers.peer import Peer
from streamsrv.bench.peers.peer_process import PeerProcess, PeerSize, peer_process
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import Client, make_request
from streamsrv.errors import CallFailedError, StreamCorruptError


class RunningPeer:
    """A peer in its process, computed with there or reached over HTTP where it serves."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process that computes."""
        return self._process.pid

    @property
    def version(self) -> str:
        """Its version, with what it says of how it was built."""
        ready = self._process.ready
        return " ".join(filter(None, (ready["version"], ready.get("features"))))

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
        """Generate `max_tokens` for each prompt, greedily, all at the same time.

        Raises:
            BenchError: it failed.
        """
        url = self._process.ready.get("address")
        if url is None:
            return await self._process.run(prompts, max_tokens)
        return await run_http(url, prompts, max_tokens)


@asynccontextmanager
async def running_peer(
    peer: Peer, source: Path, environments: Path, size: PeerSize, say: Callable[[str], None]
) -> AsyncIterator[RunningPeer]:
    """Install a peer, convert the model for it, and start it; what is there from before is used again.

    Raises:
        BenchError: one of them failed.
    """
    environment = PeerEnvironment(environments / peer.name, peer.requirements, peer.unwanted)
    await environment.make(say)
    say(f"starting {peer.name}")
    model = await peer.convert(source, environment)
    async with peer_process(environment, peer.module, model, size) as process:
        yield RunningPeer(process)


class Served:
    """Our server over gRPC, with a stream for each prompt on one connection."""

    def __init__(self, client: Client, pid: int, version: str) -> None:
        self._client = client
        self._pid = pid
        self._version = version

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._pid

    @property
    def version(self) -> str:
        """Its version and engine."""
        return self._version

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
        """Generate `max_tokens` for each prompt, greedily, all at the same time.

        Raises:
            BenchError: a stream failed.
        """
        began_s = time.perf_counter()
        try:
            return list(await asyncio.gather(*(self._stream(ids, max_tokens, began_s) for ids in prompts)))
        except (CallFailedError, StreamCorruptError) as error:
            raise BenchError(f"streamsrv: {error}") from None

    async def _stream(self, prompt: Seq[int], max_tokens: int, began_s: float) -> PeerStream:
        # What its peers do not have, or have switched off.
        request = make_request(
            prompt,
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            use_prefix_cache=False,
            prompt_lookup=False,
        )
        arrivals: list[tuple[float, int]] = []
        async with self._client.send(request) as stream:
            async for chunk in stream:
                if chunk.num_tokens:
                    at_s = time.perf_counter() - began_s
                    arrivals.append((at_s, chunk.num_tokens))
        return PeerStream(stream.token_ids, tuple(arrivals))


@asynccontextmanager
async def served(flags: Seq[str]) -> AsyncIterator[Served]:
    """Run `streamsrv serve` with the demo model and further flags.

    Raises:
        BenchError: it did not start.
    """
    async with (
        server_process("--model", "demo", *flags) as server,
        load_client(str(server.address)) as client,
    ):
        info = await client.server_info()
        yield Served(client, server.pid, f"{info.version} ({info.engine})")
