"""Load from processes of its own, so that whoever measures is in nobody's way."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan, LoadRun
from streamsrv.bench.load_messages import (
    HEADER_BYTES,
    Done,
    Failed,
    Job,
    Plan,
    Progress,
    Ready,
    Run,
    Share,
    Stop,
    body_length,
    decode,
    encode,
)
from streamsrv.bench.relay import ByteCount

# Until all processes have read what to do: they begin together, and an open loop begins in time.
_HEAD_START_S = 0.2


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """What all processes together have done."""

    run: LoadRun
    cpu_s: float
    wire: ByteCount | None
    num_processes: int
    """Those that had something to do."""


class LoadProcesses:
    """Processes with a connection each, that put load on one server."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self._next_index = 0
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopped

    def stop(self) -> None:
        """End the load that runs: `run` then gives what was seen until now. None runs after it."""
        self._is_stopped = True
        for process in self._processes:
            _send(process, Stop())

    async def run(self, plan: Plan, on_progress: Callable[[Progress], None] = lambda _: None) -> JoinedRun:
        """Put one load on the server; its requests are others than all before.

        Raises:
            BenchError: a process has ended, or could not do it, or all were stopped before.
        """
        if self._is_stopped:
            raise BenchError("the load was stopped before it began")
        most = len(self._processes) if plan.num_requests is None else plan.num_requests
        if isinstance(plan, LoadPlan):
            most = min(most, plan.concurrency)
        busy = self._processes[: max(most, 1)]
        begin_s = time.perf_counter() + _HEAD_START_S
        for number, process in enumerate(busy):
            _send(process, Run(plan, Share(number, len(busy)), self._next_index, begin_s))
        answers = await asyncio.gather(*(self._answer(process, on_progress) for process in busy))
        self._next_index += len(busy) * max(len(answer.run.records) for answer in answers)
        wires = [answer.wire for answer in answers]
        wire: ByteCount | None = ByteCount(0, 0)
        for each in wires:
            wire = wire + each if wire is not None and each is not None else None
        return JoinedRun(
            LoadRun.merged([answer.run for answer in answers]),
            sum(answer.cpu_s for answer in answers),
            wire,
            len(busy),
        )

    async def begin(self, job: Job) -> None:
        """Give all of them their job, and wait until they are ready.

        Raises:
            BenchError: one of them could not begin.
        """
        for process in self._processes:
            _send(process, job)
        answers = await asyncio.gather(*(_receive(process) for process in self._processes))
        assert all(isinstance(answer, Ready) for answer in answers)

    async def _answer(
        self, process: asyncio.subprocess.Process, on_progress: Callable[[Progress], None]
    ) -> Done:
        while not isinstance(answer := await _receive(process), Done):
            assert isinstance(answer, Progress)
            on_progress(answer)
        return answer


@asynccontextmanager
async def load_processes(num_processes: int, job: Job) -> AsyncIterator[LoadProcesses]:
    """Start processes; inside, they are connected and ready. Leaving ends them.

    Raises:
        BenchError: one of them could not begin.
    """
    started: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(num_processes):
            started.append(  # noqa: PERF401 (one by one: those before a failure are to be ended)
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "streamsrv.bench.load_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # Ctrl-C is for whoever started this, which tells them; they would hear it, too.
                    start_new_session=True,
                )
            )
        processes = LoadProcesses(started)
        await processes.begin(job)
        yield processes
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # what it held, the server lets go of when the connection breaks
        for process in started:
            await process.wait()


def _send(process: asyncio.subprocess.Process, message: Job | Run | Stop) -> None:
    assert process.stdin is not None
    process.stdin.write(encode(message))


async def _receive(process: asyncio.subprocess.Process) -> Ready | Progress | Done:
    assert process.stdout is not None
    try:
        header = await process.stdout.readexactly(HEADER_BYTES)
        answer = decode(await process.stdout.readexactly(body_length(header)))
    except asyncio.IncompleteReadError:
        raise BenchError("a load process ended before its work was done; what it said is above") from None
    if isinstance(answer, Failed):
        raise BenchError(answer.message)
    assert isinstance(answer, Ready | Progress | Done)
    return answer
