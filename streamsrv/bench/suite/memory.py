"""How much memory a server holds with its cache full."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan, run_closed_loop
from streamsrv.bench.measure import RequestShape
from streamsrv.bench.prompts import prompt_maker
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.server_process import ServerProcess, server_process
from streamsrv.bench.suite.startup import MIB
from streamsrv.client import Client

CACHE_GIB = 0.5
LIMIT_BYTES = 1_500_000_000
# The cache takes 23,301 of the demo model's tokens in bf16 (30 layers of 3 key/value heads of 64). More than
# fit are asked for: the last streams wait until blocks are free, so every block has been used by then.
_SHAPE = RequestShape(num_prompt_tokens=1_500, max_tokens=64)
_NUM_STREAMS = 18


@dataclass(frozen=True, slots=True)
class _Reading:
    name: str
    resident_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, name: str, server: ServerProcess) -> "_Reading":
        return cls(name, server.resident_bytes(), server.peak_resident_bytes())


async def memory_section(model: str, say: Callable[[str], None]) -> str:
    """Fill a cache of 0.5 GiB with long streams."""
    async with server_process("--model", model, "--kv-cache-gib", str(CACHE_GIB)) as server:
        readings = [_Reading.of("ready, cache empty", server)]
        say(f"filling a cache of {CACHE_GIB} GiB with {_NUM_STREAMS} streams")
        async with Client(str(server.address)) as client:
            maker = await prompt_maker(client, _SHAPE.num_prompt_tokens, secrets.randbits(32))
            plan = LoadPlan(_NUM_STREAMS, num_requests=_NUM_STREAMS)
            run = await run_closed_loop(client, lambda index: _SHAPE.request(maker.make(index)), plan)
            failure = next((r.failure for r in run.records if r.failure is not None), None)
            if failure is not None:
                raise BenchError(f"a stream failed while the cache was being filled: {failure.message}")
        readings.append(_Reading.of("cache filled", server))
    return section(
        "Memory with a full cache",
        f"A warm start with `--kv-cache-gib {CACHE_GIB}`, then {_NUM_STREAMS} concurrent streams of "
        f"{_SHAPE.num_prompt_tokens:,} tokens of prompt and {_SHAPE.max_tokens} of output, which together "
        "need more than the cache holds, so that all of it is written. The goal is less than "
        f"{LIMIT_BYTES / MIB:.0f} MiB (1.5 GB) at the peak.",
        ("state", "resident, MiB", "peak, MiB"),
        [[r.name, f"{r.resident_bytes / MIB:.0f}", f"{r.peak_bytes / MIB:.0f}"] for r in readings],
    )
