"""How much memory a server holds with its cache full."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engines.demo_model import model_path
from engines.memory import GIB
from engines.registry import inspect_model
from engines.spec import ModelSpec
from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan, load_client, run_closed_loop
from streamsrv.bench.measure import RequestShape
from streamsrv.bench.prompts import prompt_maker
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.server_process import ServerProcess, server_process
from streamsrv.bench.suite.startup import MIB

CACHE_GIB = 0.5
LIMIT_BYTES = 1_500_000_000
_SHAPE = RequestShape(num_prompt_tokens=1_500, max_tokens=128, use_prefix_cache=False)
# More than fit, and an output takes more steps than all prompts together: when the first stream ends, the
# last ones wait for blocks, so every block has been used.
_OVERFILL = 1.2
_BYTES_PER_VALUE = 2  # bf16; a cache of four bytes is filled all the more


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
    num_streams = _streams_to_fill(inspect_model(model_path(model)).spec)
    async with server_process("--model", model, "--kv-cache-gib", str(CACHE_GIB)) as server:
        readings = [_Reading.of("ready, cache empty", server)]
        say(f"filling a cache of {CACHE_GIB} GiB with {num_streams} streams")
        async with load_client(str(server.address)) as client:
            maker = await prompt_maker(client, _SHAPE.num_prompt_tokens, secrets.randbits(32))
            plan = LoadPlan(num_streams, num_requests=num_streams)
            run = await run_closed_loop(client, lambda index: _SHAPE.request(maker.make(index)), plan)
            failure = next((r.failure for r in run.records if r.failure is not None), None)
            if failure is not None:
                raise BenchError(f"a stream failed while the cache was being filled: {failure.message}")
        readings.append(_Reading.of("cache filled", server))
    return section(
        "Memory with a full cache",
        f"A warm start with `--kv-cache-gib {CACHE_GIB}`, then {num_streams} concurrent streams of "
        f"{_SHAPE.num_prompt_tokens:,} tokens of prompt and {_SHAPE.max_tokens} of output, which together "
        "need more than the cache holds, so that all of it is written. The goal is less than "
        f"{LIMIT_BYTES / MIB:.0f} MiB (1.5 GB) at the peak.",
        ("state", "resident, MiB", "peak, MiB"),
        [[r.name, f"{r.resident_bytes / MIB:.0f}", f"{r.peak_bytes / MIB:.0f}"] for r in readings],
    )


def _streams_to_fill(spec: ModelSpec) -> int:
    bytes_per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * _BYTES_PER_VALUE
    num_tokens = _OVERFILL * CACHE_GIB * GIB / bytes_per_token
    return math.ceil(num_tokens / (_SHAPE.num_prompt_tokens + _SHAPE.max_tokens))
