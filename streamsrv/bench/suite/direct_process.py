"""The direct loop in its process, from the other side."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager

from streamsrv.bench.errors import BenchError
from streamsrv.bench.processes import clean_environment
from streamsrv.bench.suite.direct_loop import DirectTimes

_MAX_LINE_BYTES = 1 << 20


class DirectProcess:
    """Runs batches one at a time; computes nothing in between."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self._output = process.stdout

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> DirectTimes:
        """Generate `max_tokens` for each prompt.

        Raises:
            BenchError: the process has ended.
        """
        self._input.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
        answer = await self.read_line()
        return DirectTimes(**json.loads(answer))

    async def read_line(self) -> bytes:
        """Wait for its next line."""
        line = await self._output.readline()
        if not line:
            raise BenchError("the process of the engine's own loop ended; what it said is above")
        return line


@asynccontextmanager
async def direct_process(model: str, *settings: str) -> AsyncIterator[DirectProcess]:
    """Run `direct_loop` with more of its arguments; inside, its engine is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamsrv.bench.suite.direct_loop", "--model", model, *settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=clean_environment(),
        limit=_MAX_LINE_BYTES,
    )
    try:
        direct = DirectProcess(process)
        await direct.read_line()
        yield direct
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
