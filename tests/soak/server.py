"""The server under soak: a process, its gauges and its memory."""

import asyncio
import os
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

# What must be 0 when nobody asks for anything any more.
IDLE_GAUGES = (
    "streamsrv_requests_running",
    "streamsrv_requests_waiting",
    "streamsrv_streams",
    "streamsrv_readers",
    "streamsrv_cache_blocks_used",
    "streamsrv_log_bytes",
)


class SoakedServer:
    """A server process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, metrics: str) -> None:
        self.address = address
        self._process = process
        self._metrics = metrics
        self._memory = psutil.Process(process.pid)

    @property
    def resident_mib(self) -> float:
        """What it holds of the machine's memory."""
        return float(self._memory.memory_info().rss) / 2**20

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name, summed over labels."""
        text = await asyncio.to_thread(self._scrape)
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def _scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as response:
            data: bytes = response.read()
        return data.decode()


@asynccontextmanager
async def soaked_server(flags: Sequence[str]) -> AsyncIterator[SoakedServer]:
    """Start a server; at the end it must stop by itself within its grace, with exit code 0."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "streamsrv", "serve", "--listen", "127.0.0.1:0",
                "--metrics-listen", "127.0.0.1:0", *flags,
                stdout=asyncio.subprocess.PIPE, stderr=errors, env=os.environ,
            )  # fmt: skip
        try:
            addresses: dict[str, str] = {}
            assert process.stdout is not None
            while len(addresses) < 2:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise SystemExit(f"soak: the server did not start:\n{log.read_text()}")
                what, _, address = line.strip().partition(" on ")
                addresses[what] = address
            yield SoakedServer(process, addresses["listening"], addresses["metrics"])
            process.terminate()
            code = await asyncio.wait_for(process.wait(), 60)
            if code != 0:
                raise SystemExit(
                    f"soak: the server stopped with exit code {code}:\n{log.read_text()[-4000:]}"
                )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        faults = [line for line in log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]
        if faults:
            raise SystemExit("soak: the server's log has faults:\n" + log.read_text()[-4000:])
