"""A peer in a process of its own, in its own environment."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.environment import PeerEnvironment, last_line
from streamsrv.bench.peers.figures import PeerStream
from streamsrv.bench.processes import ended

_MAX_LINE_BYTES = 1 << 24
_START_S = 600.0
_RUN_S = 900.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class PeerSize:
    """What a peer must have room for."""

    num_threads: int
    num_streams: int
    num_cells: int
    """Tokens of each stream, prompt and output."""


class PeerProcess:
    """Runs batches one at a time; computes nothing in between."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.ready: dict[str, str] = {}
        """What it said of itself."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def start(self) -> None:
        """Wait until it can compute.

        Raises:
            BenchError: it cannot.
        """
        self.ready = (await self._answer(_START_S))["ready"]

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
        """Generate `max_tokens` for each prompt, greedily, all at the same time.

        Raises:
            BenchError: it failed, or has ended.
        """
        assert self._process.stdin is not None
        command = json.dumps({"prompts": prompts, "max_tokens": max_tokens})
        # A process that has ended is told by its answer, which is none.
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(command.encode() + b"\n")
            await self._process.stdin.drain()
        answer = await self._answer(_RUN_S)
        return [
            PeerStream(tuple(token_ids), tuple((at_s, num) for at_s, num in arrivals))
            for token_ids, arrivals in answer["streams"]
        ]

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()  # a late answer would be taken for the next one
            raise BenchError(f"it gave no answer in {limit_s:g} s, and was ended") from None
        if not line:
            self._log.seek(0)
            raise BenchError(f"its process ended: {last_line(self._log.read()) or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer


@asynccontextmanager
async def peer_process(
    environment: PeerEnvironment, module: str, model: Path, size: PeerSize
) -> AsyncIterator[PeerProcess]:
    """Run `workers/worker.py` with a module beside it; inside, it is ready. Leaving stops it.

    Raises:
        BenchError: it cannot start.
    """
    worker = Path(str(files("streamsrv.bench.peers.workers").joinpath("worker.py")))
    sizes = (size.num_threads, size.num_streams, size.num_cells)
    with environment.log.open("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(environment.python), str(worker), module, str(model), *map(str, sizes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=_variables(size.num_threads),
            limit=_MAX_LINE_BYTES,
        )
        try:
            peer = PeerProcess(process, log)
            await peer.start()
            yield peer
        finally:
            await _stop(process)


def _variables(num_threads: int) -> dict[str, str]:
    # Ours would lead to packages of ours; the thread counts are for libraries that take no other word for it.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**own, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await ended(process, _STOP_S)
