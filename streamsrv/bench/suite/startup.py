"""How soon a server is ready, and how much memory that takes."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.server_process import server_process

READY_LIMIT_S = {"cold": 15.0, "warm": 5.0}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    ready_s: float
    resident_bytes: int
    peak_bytes: int


async def startup_section(model: str, num_starts: int, say: Callable[[str], None]) -> str:
    """Start servers with an empty and with a filled cache of prepared models."""
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    for number in range(num_starts):
        with tempfile.TemporaryDirectory(prefix="streamsrv-bench-") as folder:
            for kind, list_ in starts.items():
                say(f"{kind} start {number + 1} of {num_starts}")
                async with server_process("--model", model, "--cache-dir", folder) as server:
                    list_.append(Start(server.ready_s, server.resident_bytes(), server.peak_resident_bytes()))
    rows = [_row(kind, list_) for kind, list_ in starts.items()]
    return section(
        "Starting",
        f"From starting the process to `listening on`, default settings, {num_starts} of each, medians. "
        "Cold: an empty cache folder, so the model is read and prepared; its file is in the system's page "
        "cache. Warm: the same folder again. Resident memory includes mapped files (VmRSS when ready, "
        "VmHWM).",
        ("start", "ready, s", "slowest, s", "at most, s", "resident, MiB", "peak, MiB"),
        rows,
    )


def _row(kind: str, starts: list[Start]) -> list[str]:
    return [
        kind,
        f"{statistics.median(start.ready_s for start in starts):.2f}",
        f"{max(start.ready_s for start in starts):.2f}",
        f"{READY_LIMIT_S[kind]:g}",
        f"{statistics.median(start.resident_bytes for start in starts) / MIB:.0f}",
        f"{max(start.peak_bytes for start in starts) / MIB:.0f}",
    ]
