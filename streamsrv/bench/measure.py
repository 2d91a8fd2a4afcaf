"""One measurement of a server: connect, warm up, load, count."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamsrv.bench.cpu_time import CpuClock, listening_pid
from streamsrv.bench.endpoint import Endpoint
from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan
from streamsrv.bench.load_messages import Job, Plan, Progress
from streamsrv.bench.load_processes import LoadProcesses, load_processes
from streamsrv.bench.report import LoadReport
from streamsrv.bench.schedule import OpenPlan
from streamsrv.bench.workload import RequestShape, Workload
from streamsrv.errors import ModelNotFoundError

__all__ = ["Bench", "Measured", "RequestShape", "bench", "measure"]

# Of an open loop's warm-up: it fills what a server makes at first use, and has no rate to keep.
_WARM_UP_CONCURRENCY = 8

LOST_AFTER_S = 30.0
"""In which all requests that end are UNAVAILABLE: a worker is made again in less."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A server's report, with what was measured."""

    engine: str
    version: str
    seed: int
    plan: Plan
    report: LoadReport
    was_stopped: bool = False
    """Whether the load was ended before its plan was; the report is of what came until then."""

    @property
    def load(self) -> float:
        """Clients of a closed loop, or requests a second of an open one."""
        plan = self.plan
        return plan.rate_per_s if isinstance(plan, OpenPlan) else plan.concurrency


class Bench:
    """Measures one server, one load after the other."""

    def __init__(
        self,
        engine: str,
        version: str,
        seed: int,
        processes: LoadProcesses,
        server_cpu: CpuClock | None,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self._engine = engine
        self._version = version
        self._seed = seed
        self._processes = processes
        self._server_cpu = server_cpu
        self._lost_after_s = lost_after_s
        self._unavailable_since_s: float | None = None
        self._is_lost = False

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._processes.is_stopped

    @property
    def is_lost(self) -> bool:
        """Whether the load was stopped because the server was not to be had for some time."""
        return self._is_lost

    def stop(self) -> None:
        """End the load that runs: `run` then gives what was measured until now. None runs after it."""
        self._processes.stop()

    async def run(
        self,
        plan: Plan,
        *,
        num_warmup: int = 0,
        on_warmup: Callable[[Progress], None] = lambda _: None,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Measured:
        """Put a load on the server, behind `num_warmup` requests that are not measured.

        Raises:
            BenchError: nothing could be measured, or nothing was before it was stopped.
        """
        if num_warmup:
            most = _WARM_UP_CONCURRENCY if isinstance(plan, OpenPlan) else plan.concurrency
            await self._processes.run(
                LoadPlan(min(most, num_warmup), num_requests=num_warmup), self._watching(on_warmup)
            )
            if self._is_lost:
                raise BenchError(f"the server did not answer for {self._lost_after_s:g} s of the warm-up")
        server_before_s = self._server_cpu_s()
        joined = await self._processes.run(plan, self._watching(on_progress))
        server_after_s = self._server_cpu_s()
        server_cpu_s = None
        if server_before_s is not None and server_after_s is not None:
            server_cpu_s = server_after_s - server_before_s
        report = LoadReport.of(
            joined.run,
            client_cpu_s=joined.cpu_s,
            num_client_processes=joined.num_processes,
            server_cpu_s=server_cpu_s,
            wire_bytes=joined.wire,
        )
        return Measured(self._engine, self._version, self._seed, plan, report, self.is_stopped)

    def _server_cpu_s(self) -> float | None:
        if self._server_cpu is not None:
            with contextlib.suppress(BenchError):  # it has ended, and what was seen of it is to be told
                return self._server_cpu.seconds()
        return None

    def _watching(self, on_progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """Stop a load that nobody answers any more; else it would go on to the end of its plan."""

        def heard(progress: Progress) -> None:
            on_progress(progress)
            if not progress.num_requests:
                return
            now_s = time.monotonic()
            if progress.num_requests > progress.num_unavailable:
                self._unavailable_since_s = None
            elif self._unavailable_since_s is None:
                self._unavailable_since_s = now_s
            elif now_s - self._unavailable_since_s >= self._lost_after_s and not self.is_stopped:
                self._is_lost = True
                self.stop()

        return heard


@asynccontextmanager
async def bench(
    endpoint: Endpoint,
    workload: Workload,
    *,
    seed: int,
    num_processes: int = 1,
    server_pid: int | None = None,
    lost_after_s: float = LOST_AFTER_S,
) -> AsyncIterator[Bench]:
    """Start load processes for a server; inside, they are connected.

    `server_pid` is the server's process; None looks for it, if the address is of this machine.
    A load is stopped after `lost_after_s` in which the server was not to be had.

    Raises:
        CallFailedError: the server could not be asked about itself.
        ModelNotFoundError: it does not serve the workload's model.
        BenchError: a process could not begin, `server_pid` is none, or the model would refuse each request.
    """
    if server_pid is None:
        server_pid = listening_pid(endpoint.address)
    server_cpu = CpuClock(server_pid) if server_pid is not None else None
    async with endpoint.connect() as client:
        info, models = await client.server_info(), await client.models()
    name = workload.shape.model
    model = next((model for model in models if not name or model.name == name), None)
    if model is None:
        raise ModelNotFoundError(name, tuple(model.name for model in models))
    workload.check(model)
    async with load_processes(num_processes, Job(endpoint, workload, seed)) as processes:
        yield Bench(model.engine, info.version, seed, processes, server_cpu, lost_after_s)


async def measure(
    endpoint: Endpoint,
    plan: Plan,
    workload: Workload,
    *,
    seed: int,
    num_warmup: int = 0,
    num_processes: int = 1,
    server_pid: int | None = None,
) -> Measured:
    """Measure one load. See `bench` and `Bench.run`."""
    async with bench(
        endpoint, workload, seed=seed, num_processes=num_processes, server_pid=server_pid
    ) as running:
        return await running.run(plan, num_warmup=num_warmup)
