"""A server in a process of its own, as a user starts it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from streamsrv.bench.errors import BenchError
from streamsrv.bench.processes import listening_process
from streamsrv.config import Address

_START_S = 300.0


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


@asynccontextmanager
async def server_process(*flags: str) -> AsyncIterator[ServerProcess]:
    """Run `streamsrv serve` on a free port; inside, it is ready. Leaving stops it.

    Raises:
        BenchError: it ended, or took minutes, before it was ready; its last words are mentioned.
    """
    began_s = time.perf_counter()
    serve = ("-m", "streamsrv", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning", *flags)
    async with listening_process("the server", *serve, start_s=_START_S) as process:
        yield ServerProcess(process.pid, process.addresses[0], time.perf_counter() - began_s)


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
