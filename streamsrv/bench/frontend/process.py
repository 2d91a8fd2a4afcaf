"""Servers as processes of their own, kept to one processor."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.bench.suite.server_process import clean_environment
from streamsrv.config import Address

_START_S = 60.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class PinnedProcess:
    """A process that has said where it listens."""

    pid: int
    addresses: tuple[Address, ...]
    """In the order in which they were asked for."""


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep this thread, and so the processes it starts inside, to a processor; None changes nothing."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def pinned_process(
    core: int | None, *arguments: str, says: tuple[str, ...] = ("listening on ",)
) -> AsyncIterator[PinnedProcess]:
    """Run `python ARGUMENTS` on a processor; inside, it has said its lines. Leaving stops it.

    Raises:
        BenchError: it ended, or took a minute, before it was ready; its last words are mentioned.
    """
    with tempfile.TemporaryFile() as errors:
        with on_core(core):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=clean_environment(),
            )
        try:
            addresses = []
            for beginning in says:
                line = await _line(process)
                if not line.startswith(beginning):
                    errors.seek(0)
                    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise BenchError(
                        f"{' '.join(arguments[:3])} did not start: {last or line or 'it said nothing'}"
                    )
                addresses.append(Address.parse(line.removeprefix(beginning), "its address"))
            yield PinnedProcess(process.pid, tuple(addresses))
        finally:
            await _stop(process)


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            return (await process.stdout.readline()).decode().strip()
    return ""


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
