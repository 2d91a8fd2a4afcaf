"""A closed loop of clients: each sends its next request when the one before has ended."""

import asyncio
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import grpc

from streamsrv.bench.load_stop import LoadStop
from streamsrv.client import Client
from streamsrv.errors import CallFailedError, StreamCorruptError
from streamsrv.v1 import inference_pb2 as pb

# After a refusal without a hint of the server's: enough that a server that refuses is not stormed.
_PAUSE_AFTER_ERROR_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How much load, and until when: by a number of requests or by a time, exactly one of them."""

    concurrency: int
    """Clients, and so streams at the same time."""
    num_requests: int | None = None
    """Requests in all."""
    duration_s: float | None = None
    """Seconds in which requests are begun; those that run then are read to their end."""

    def __post_init__(self) -> None:
        """Check what the command line has checked already."""
        assert self.concurrency >= 1
        assert (self.num_requests is None) != (self.duration_s is None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message with tokens."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request failed."""

    code: str
    """The status code's name, or the reason of an error that the client found itself."""
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What was seen of one request. Times are those of `time.perf_counter`, in seconds.

    On Linux that clock is one for all processes of a machine.
    """

    began_s: float
    ended_s: float
    num_prompt_tokens: int
    arrivals: tuple[Arrival, ...]
    num_bytes: int
    """Of gRPC messages received, each with its 5-byte prefix, the StreamStart included."""
    failure: Failure | None
    due_s: float | None = None
    """When it was to be sent; None where it was sent as soon as it could be."""
    was_cut: bool = False
    """Whether the load was stopped before this had ended: neither a success of the server nor a failure."""

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def counted_from_s(self) -> float:
        """Where its latencies begin."""
        return self.began_s if self.due_s is None else self.due_s


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a loop of clients has seen."""

    concurrency: int | None
    """None in an open loop."""
    began_s: float
    ended_s: float
    idle_s: float
    """When the first client found nothing more to send: until then all of them had a request. In an open
    loop, the end."""
    records: tuple[RequestRecord, ...]
    """In the order of their ends."""
    rate_per_s: float | None = None
    """Requests offered a second in an open loop."""

    @staticmethod
    def merged(runs: "Seq[LoadRun]") -> "LoadRun":
        """Join the shares of one load, which ran at the same time."""
        records = sorted(
            (record for run in runs for record in run.records), key=lambda record: record.ended_s
        )
        counts = [run.concurrency for run in runs if run.concurrency is not None]
        return LoadRun(
            sum(counts) if counts else None,
            min(run.began_s for run in runs),
            max(run.ended_s for run in runs),
            min(run.idle_s for run in runs),
            tuple(records),
            runs[0].rate_per_s,
        )


def load_client(
    target: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
) -> Client:
    """Make a client that hides nothing: it neither resumes a stream nor tries a request again."""
    return Client(target, credentials=credentials, api_key=api_key, resume_window_s=0, max_retries=0)


async def run_closed_loop(
    client: Client,
    make_request: Callable[[int], pb.GenerateRequest],
    plan: LoadPlan,
    *,
    first_index: int = 0,
    timeout_s: float | None = None,
    on_record: Callable[[RequestRecord], None] = lambda _record: None,
    stop: LoadStop | None = None,
) -> LoadRun:
    """Send requests `first_index` and on from `plan.concurrency` clients over one connection.

    A request that has not ended after `timeout_s` fails. `stop` ends the run at once.
    """
    stop = stop or LoadStop()
    indices = itertools.count(first_index)
    end_index = None if plan.num_requests is None else first_index + plan.num_requests
    records: list[RequestRecord] = []
    idle_s: list[float] = []
    began_s = time.perf_counter()

    def next_index() -> int | None:
        if stop.is_set:
            return None
        if plan.duration_s is not None and time.perf_counter() - began_s >= plan.duration_s:
            return None
        index = next(indices)
        return index if end_index is None or index < end_index else None

    async def loop() -> None:
        pause_s = 0.0
        while (index := next_index()) is not None:
            if pause_s:
                async with stop.cutting():
                    await asyncio.sleep(pause_s)
                if stop.is_set:
                    break
            record, pause_s = await send_one(client, make_request(index), timeout_s=timeout_s, stop=stop)
            records.append(record)
            on_record(record)
        idle_s.append(time.perf_counter())

    async with asyncio.TaskGroup() as clients:
        for _ in range(plan.concurrency):
            clients.create_task(loop())
    return LoadRun(plan.concurrency, began_s, time.perf_counter(), min(idle_s), tuple(records))


async def send_one(
    client: Client,
    request: pb.GenerateRequest,
    *,
    due_s: float | None = None,
    timeout_s: float | None = None,
    stop: LoadStop | None = None,
) -> tuple[RequestRecord, float]:
    """Read one stream; what was seen, and how long a client is to wait before its next."""
    stop = stop or LoadStop()
    began_s = time.perf_counter()
    arrivals: list[Arrival] = []
    failure, pause_s, num_prompt_tokens, was_cut = None, 0.0, 0, True
    async with client.send(request, timeout_s=timeout_s) as stream:
        try:
            async with stop.cutting():
                num_prompt_tokens = (await stream.start()).num_prompt_tokens
                async for chunk in stream:
                    if chunk.num_tokens:
                        # One by one, so that those before an error are kept.
                        arrivals.append(Arrival(time.perf_counter(), chunk.num_tokens))  # noqa: PERF401
                was_cut = False
        except CallFailedError as error:
            failure, was_cut = Failure(error.code, str(error)), False
            pause_s = error.retry_after_s or _PAUSE_AFTER_ERROR_S
        except StreamCorruptError as error:
            failure, was_cut = Failure(error.reason, str(error)), False
            pause_s = _PAUSE_AFTER_ERROR_S
    ended_s = time.perf_counter()
    record = RequestRecord(
        began_s, ended_s, num_prompt_tokens, tuple(arrivals), stream.num_bytes, failure, due_s, was_cut
    )
    return record, pause_s
