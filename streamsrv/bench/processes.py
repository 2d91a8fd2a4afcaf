"""Processes that say where they listen."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.config import ENV_PREFIX, Address

LISTENING = "listening on "
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """A process that has said where it listens."""

    pid: int
    addresses: tuple[Address, ...]
    """In the order in which they were asked for."""


def clean_environment() -> dict[str, str]:
    """This process's variables without those that change a server's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


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
async def listening_process(
    name: str,
    *arguments: str,
    says: tuple[str, ...] = (LISTENING,),
    start_s: float = 60.0,
    core: int | None = None,
) -> AsyncIterator[ListeningProcess]:
    """Run `python ARGUMENTS`, on a processor if one is given; inside, it has said its lines.

    Leaving stops it.

    Raises:
        BenchError: it ended, or took longer than `start_s` for a line; `name` and its last words are in it.
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
                line = await _line(process, start_s)
                if not line.startswith(beginning):
                    errors.seek(0)
                    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise BenchError(
                        f"{name} did not start: {last or line or f'it said nothing in {start_s:g} s'}"
                    )
                addresses.append(Address.parse(line.removeprefix(beginning), "its address"))
            yield ListeningProcess(process.pid, tuple(addresses))
        finally:
            await _stop(process)


async def _line(process: asyncio.subprocess.Process, limit_s: float) -> str:
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            return (await process.stdout.readline()).decode().strip()
    return ""


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await ended(process, _STOP_S)


async def ended(process: asyncio.subprocess.Process, limit_s: float) -> None:
    """Wait for a process that was told to end; kill it after the limit, or when nobody waits any more."""
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    except asyncio.CancelledError:
        process.kill()
        raise
