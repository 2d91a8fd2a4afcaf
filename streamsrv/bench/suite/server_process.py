"""A server in a process of its own, as a user starts it."""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from streamsrv.bench.errors import BenchError
from streamsrv.config import ENV_PREFIX, Address

_READY = "listening on "
_START_S = 300.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is ready."""

    pid: int
    address: Address
    ready_s: float
    """From starting the process to its line that says so."""

    def resident_bytes(self) -> int:
        """Memory that it holds now, mapped files included (VmRSS)."""
        return _status_bytes(self.pid, "VmRSS:")

    def peak_resident_bytes(self) -> int:
        """The most that it ever held (VmHWM)."""
        return _status_bytes(self.pid, "VmHWM:")


def clean_environment() -> dict[str, str]:
    """This process's variables without those that change a server's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


@asynccontextmanager
async def server_process(*flags: str) -> AsyncIterator[ServerProcess]:
    """Run `streamsrv serve` on a free port; inside, it is ready. Leaving stops it.

    Raises:
        BenchError: it ended, or took minutes, before it was ready; its last words are mentioned.
    """
    with tempfile.TemporaryFile() as errors:
        began_s = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamsrv", "serve", "--listen", "127.0.0.1:0"),
            *("--log-level", "warning", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=clean_environment(),
        )
        try:
            assert process.stdout is not None
            line = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    line = (await process.stdout.readline()).decode().strip()
            ready_s = time.perf_counter() - began_s
            if not line.startswith(_READY):
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise BenchError(
                    f"the server did not start: {last or line or f'it said nothing in {_START_S:g} s'}"
                )
            yield ServerProcess(process.pid, Address.parse(line.removeprefix(_READY), "its address"), ready_s)
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _status_bytes(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise BenchError(
            f"cannot read the memory of process {pid}: {error.strerror}; this needs Linux"
        ) from None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise BenchError(f"/proc/{pid}/status has no {name[:-1]}; this needs Linux")
