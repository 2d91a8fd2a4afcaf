"""One measurement of a server: connect, warm up, load, count."""

from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamsrv.bench.cpu_time import CpuClock
from streamsrv.bench.load import LoadPlan, RequestRecord, load_client, run_closed_loop
from streamsrv.bench.prompts import prompt_maker
from streamsrv.bench.relay import ByteRelay
from streamsrv.bench.report import LoadReport
from streamsrv.client import Client, make_request
from streamsrv.config import Address
from streamsrv.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What each request asks for: greedy, and exactly `max_tokens` tokens."""

    num_prompt_tokens: int = 200
    prompts: tuple[str, ...] | None = None
    """Prompts to send in turn, in place of those of `num_prompt_tokens` cut from the shipped text."""
    max_tokens: int = 64
    model: str = ""
    zstd: bool = True
    max_tokens_per_chunk: int | None = None
    min_chunk_interval_ms: int | None = None
    prompt_lookup: bool | None = None
    use_prefix_cache: bool | None = None

    def request(self, prompt: str | Seq[int]) -> pb.GenerateRequest:
        """Make the request for a prompt."""
        return make_request(
            prompt,
            model=self.model,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            zstd=self.zstd,
            max_tokens_per_chunk=self.max_tokens_per_chunk,
            min_chunk_interval_ms=self.min_chunk_interval_ms,
            prompt_lookup=self.prompt_lookup,
            use_prefix_cache=self.use_prefix_cache,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """A server's report, with what was measured."""

    engine: str
    version: str
    seed: int
    report: LoadReport


async def measure(
    address: Address,
    plan: LoadPlan,
    shape: RequestShape,
    *,
    seed: int,
    num_warmup: int = 0,
    count_wire: bool = False,
    server_pid: int | None = None,
    on_record: Callable[[RequestRecord], None] = lambda _record: None,
) -> Measured:
    """Put load on a server; `on_record` is called for each request that ended, those of the warm-up excepted.

    Raises:
        CallFailedError: the server could not be asked about itself.
        BenchError: nothing could be measured.
    """
    server_cpu = CpuClock(server_pid) if server_pid is not None else None
    client_cpu = CpuClock()
    async with _connection(address, count_wire) as (client, relay):
        info = await client.server_info()
        requests = await _requests(client, shape, seed)
        if num_warmup:
            warm_up = LoadPlan(min(plan.concurrency, num_warmup), num_requests=num_warmup)
            await run_closed_loop(client, requests, warm_up)
        wire_before = relay.count if relay else None
        client_before_s = client_cpu.seconds()
        server_before_s = server_cpu.seconds() if server_cpu else 0.0
        run = await run_closed_loop(client, requests, plan, first_index=num_warmup, on_record=on_record)
        report = LoadReport.of(
            run,
            client_cpu_s=client_cpu.seconds() - client_before_s,
            server_cpu_s=server_cpu.seconds() - server_before_s if server_cpu else None,
            wire_bytes=relay.count - wire_before if relay and wire_before else None,
        )
    return Measured(info.engine, info.version, seed, report)


@asynccontextmanager
async def _connection(address: Address, count_wire: bool) -> AsyncIterator[tuple[Client, ByteRelay | None]]:
    if not count_wire:
        async with load_client(str(address)) as client:
            yield client, None
        return
    async with ByteRelay(address.host, address.port) as relay, load_client(relay.target) as client:
        yield client, relay


async def _requests(client: Client, shape: RequestShape, seed: int) -> Callable[[int], pb.GenerateRequest]:
    """Make the maker of requests by their number."""
    prompts = shape.prompts
    if prompts is not None:
        return lambda index: shape.request(prompts[index % len(prompts)])
    maker = await prompt_maker(client, shape.num_prompt_tokens, seed, shape.model)
    return lambda index: shape.request(maker.make(index))
