"""What a run of load brought, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadRun, RequestRecord
from streamsrv.bench.percentiles import Distribution
from streamsrv.bench.relay import ByteCount

# A request that leaves later than this is late for whoever waits for it: it is a small model's step.
_LATE_S = 0.010
# Of one processor. Python does one thing at a time: the nearer to 1, the longer waits what has arrived.
_BUSY = 0.85


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens over a span of time."""

    seconds: float
    num_output_tokens: int
    num_prompt_tokens: int
    """Of the requests whose first token came in this time."""

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens received a second."""
        return self.num_output_tokens / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.num_prompt_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """The requests that failed with one status code."""

    code: str
    num: int
    message: str
    """Of the first of them."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run in numbers. Latencies are in seconds and of the requests that came to their end.

    They count from the sending of a request or, in an open loop, from the time when it was due.
    """

    num_completed: int
    errors: tuple[ErrorCount, ...]
    whole: Rate
    """From the first request's beginning, or the start of an open loop, to the last one's end or, if that is
    later, the end of an open loop's time."""
    steady: Rate | None
    """While all clients had a request and each had seen its first token; None if there was no such time, and
    in an open loop, where the tokens that come are those that were asked for."""
    time_to_first_token_s: Distribution | None
    inter_token_s: Distribution | None
    """The time between two messages of a stream, divided by the tokens in the second one and counted once
    for each of them. A stream's first message counts for the time to the first token alone."""
    message_gap_s: Distribution | None
    """The time between two messages of a stream."""
    end_to_end_s: Distribution | None
    tokens_per_message: float
    message_bytes_per_token: float
    """Of gRPC messages received, with their 5-byte prefixes."""
    wire_bytes: ByteCount | None
    """What passed on the connection, of failed requests too; None if it was not measured."""
    server_cpu_s: float | None
    client_cpu_s: float
    """Of all load processes."""
    num_client_processes: int = 1
    num_cut: int = 0
    """Requests that had not ended when the load was stopped. Their tokens are part of the rates."""
    offered_per_s: float | None = None
    """Requests a second that were due in an open loop."""
    lateness_s: Distribution | None = None
    """How long after they were due an open loop's requests were sent, failed ones too. It is part of the
    latencies."""

    @property
    def num_failed(self) -> int:
        """Requests that did not come to their end."""
        return sum(error.num for error in self.errors)

    @property
    def completed_per_s(self) -> float:
        """Requests that came to their end, a second of the whole run."""
        return self.num_completed / self.whole.seconds

    @property
    def client_busy(self) -> float:
        """Processors' worth of time that a load process took, on average."""
        return self.client_cpu_s / self.whole.seconds / self.num_client_processes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before believing the numbers."""
        notes = []
        if self.num_cut:
            notes.append(
                f"the load was stopped while {self.num_cut} of its requests ran; the latencies are those of "
                "requests that had ended, so the longest are missing from them"
            )
        late = self.lateness_s
        if late is not None and late.p99 > _LATE_S:
            notes.append(
                f"the sender did not keep its schedule: requests left {1000 * late.p50:.1f} ms late in the "
                f"median, {1000 * late.p99:.1f} ms at the 99th percentile; the latencies count it, so they "
                "are not the server's alone; use more --processes, or a machine with processors to spare"
            )
        if self.client_busy > _BUSY:
            notes.append(
                f"a load process was busy {100 * self.client_busy:.0f}% of the time, so what it saw may be "
                "its own delay; use more --processes"
            )
        return tuple(notes)

    @classmethod
    def of(
        cls,
        run: LoadRun,
        *,
        client_cpu_s: float,
        num_client_processes: int = 1,
        server_cpu_s: float | None = None,
        wire_bytes: ByteCount | None = None,
    ) -> "LoadReport":
        """Count a run.

        Raises:
            BenchError: not one request came to its end.
        """
        done = [record for record in run.records if record.failure is None and not record.was_cut]
        num_cut = sum(record.was_cut for record in run.records)
        errors = _errors(run.records)
        if not done:
            detail = "the time was over before the first could begin"
            if num_cut:
                detail = "the load was stopped before"
            if errors:
                detail = errors[0].message
            raise BenchError(f"not one of {len(run.records)} requests came to its end; {detail}")
        arrivals = [arrival for record in done for arrival in record.arrivals]
        num_tokens = sum(arrival.num_tokens for arrival in arrivals)
        gaps, weights = _gaps(done)
        return cls(
            num_completed=len(done),
            errors=errors,
            whole=_rate(run.records, run.began_s, run.ended_s),
            steady=_steady(run),
            time_to_first_token_s=Distribution.of([_first_s(r) for r in done if r.arrivals]),
            inter_token_s=Distribution.of(
                [gap / weight for gap, weight in zip(gaps, weights, strict=True)], weights
            ),
            message_gap_s=Distribution.of(gaps),
            end_to_end_s=Distribution.of([r.ended_s - r.counted_from_s for r in done]),
            tokens_per_message=num_tokens / max(len(arrivals), 1),
            message_bytes_per_token=sum(r.num_bytes for r in done) / max(num_tokens, 1),
            wire_bytes=wire_bytes,
            server_cpu_s=server_cpu_s,
            client_cpu_s=client_cpu_s,
            num_client_processes=num_client_processes,
            num_cut=num_cut,
            offered_per_s=run.rate_per_s,
            lateness_s=Distribution.of([r.began_s - r.due_s for r in run.records if r.due_s is not None]),
        )


def _first_s(record: RequestRecord) -> float:
    return record.arrivals[0].at_s - record.counted_from_s


def _gaps(records: Iterable[RequestRecord]) -> tuple[list[float], list[float]]:
    """Times between the messages of each stream, and the tokens in the later one of each two."""
    gaps, weights = [], []
    for record in records:
        for before, after in zip(record.arrivals, record.arrivals[1:], strict=False):
            gaps.append(after.at_s - before.at_s)
            weights.append(float(after.num_tokens))
    return gaps, weights


def _rate(records: Iterable[RequestRecord], begin_s: float, end_s: float) -> Rate:
    """Count what came in the time after `begin_s`, up to `end_s`."""
    num_output_tokens = num_prompt_tokens = 0
    for record in records:
        num_output_tokens += sum(a.num_tokens for a in record.arrivals if begin_s < a.at_s <= end_s)
        if record.arrivals and begin_s < record.arrivals[0].at_s <= end_s:
            num_prompt_tokens += record.num_prompt_tokens
    return Rate(end_s - begin_s, num_output_tokens, num_prompt_tokens)


def _steady(run: LoadRun) -> Rate | None:
    if run.concurrency is None:
        return None
    # The first requests of the clients are those begun first, however they ended.
    first = sorted(run.records, key=lambda record: record.began_s)[: run.concurrency]
    if len(first) < run.concurrency:
        return None
    begin_s = max(record.arrivals[0].at_s if record.arrivals else record.ended_s for record in first)
    rate = _rate(run.records, begin_s, run.idle_s) if run.idle_s > begin_s else None
    return rate if rate is not None and rate.num_output_tokens else None


def _errors(records: Iterable[RequestRecord]) -> tuple[ErrorCount, ...]:
    by_code: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            by_code.setdefault(record.failure.code, []).append(record.failure.message)
    counts = [ErrorCount(code, len(messages), messages[0]) for code, messages in by_code.items()]
    return tuple(sorted(counts, key=lambda count: -count.num))
