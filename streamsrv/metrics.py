"""What Prometheus is told of a server."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engines.api import StreamsrvError
from streamsrv.call import DISCONNECTED, Call, CallKind
from streamsrv.chunks import ChunkTotals
from streamsrv.errors import ConsumerStalledError
from streamsrv.histogram import Histogram
from streamsrv.observer import PoolState, StepReport
from streamsrv.sequence import FinishReason
from streamsrv.stream import Stream

# Buckets, in seconds. A first token takes milliseconds on an idle GPU, seconds behind a long prompt on a CPU,
# minutes in a full queue. A reader of 250 words a minute takes 0.18 s a token, at four tokens for three
# words: the buckets of the gaps are dense below that, where a server should be, and go on to where a reader
# sees a pause (a long prompt in the same step, a preemption). Outputs take
# tens of milliseconds to half an hour.
_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    10,
)
_DURATIONS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
# A step's work is bounded by settings that are mostly powers of two.
_SEQUENCES = tuple(float(1 << n) for n in range(11))
_TOKENS = tuple(float(1 << n) for n in range(14))


class ModelMetrics:
    """Counts what the pool of one model reports; a PoolObserver."""

    def __init__(self) -> None:
        self.state: Callable[[], PoolState] | None = None
        """Tells how the pool stands, at each scrape; None until there is one."""
        self.time_to_first_token = Histogram(_WAITS_S)
        self.token_gap = Histogram(_GAPS_S)
        self.queue_time = Histogram(_WAITS_S)
        self.duration = Histogram(_DURATIONS_S)
        self.step_time = Histogram(_GAPS_S)
        self.step_sequences = Histogram(_SEQUENCES)
        self.step_tokens = Histogram(_TOKENS)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        # Known from the start, so that a rate can see the first one.
        self.num_ended = dict.fromkeys((reason.name for reason in FinishReason), 0)
        self.num_resumes = 0
        self.num_stalls = 0
        self.num_disconnects = 0

    def step_taken(self, step: StepReport) -> None:
        """Count a step and what it brought."""
        self.step_time.observe(step.duration_s)
        self.step_sequences.observe(step.num_sequences)
        self.step_tokens.observe(step.num_tokens)
        self.num_output_tokens += step.num_output_tokens
        self.num_prompt_tokens += step.num_prompt_tokens
        for seconds in step.queue_times_s:
            self.queue_time.observe(seconds)
        for seconds in step.times_to_first_token_s:
            self.time_to_first_token.observe(seconds)
        for seconds, times in step.token_gaps_s.items():
            self.token_gap.observe(seconds, times)

    def request_ended(self, stream: Stream) -> None:
        """Count a request that has ended, by its reason."""
        progress = stream.progress
        self.num_ended[progress.reason] = self.num_ended.get(progress.reason, 0) + 1
        if progress.duration_s is not None:
            self.duration.observe(progress.duration_s)


class Metrics(Collector):
    """All metrics of one server, in a registry of their own; a CallObserver.

    Counters and histograms count from the start; gauges are read from the pools when Prometheus asks. Label
    values are the names of models served and the reasons of a fixed set, never a caller's words.
    """

    def __init__(self, version: str) -> None:
        self.chunks = ChunkTotals()
        self._version = version
        self._models: dict[str, ModelMetrics] = {}
        self._num_refused: dict[str, int] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def model(self, name: str) -> ModelMetrics:
        """Begin to count for a model."""
        return self._models.setdefault(name, ModelMetrics())

    def refused(self, error: StreamsrvError) -> None:
        """Count a call that is not let in."""
        self._num_refused[error.reason] = self._num_refused.get(error.reason, 0) + 1

    def call_accepted(self, call: Call) -> None:
        """Count a stream that is picked up again."""
        if call.kind is CallKind.RESUME:
            self._models[call.model].num_resumes += 1

    def call_ended(self, call: Call) -> None:
        """Count a call that was refused, that took nothing, or whose client went away."""
        if call.stream is None:
            if call.error is not None:
                self.refused(call.error)
        elif call.reason == ConsumerStalledError.reason:
            self._models[call.model].num_stalls += 1
        elif call.reason == DISCONNECTED:
            self._models[call.model].num_disconnects += 1

    def collect(self) -> Iterable[Metric]:
        """Give everything as it is now."""
        models = self._models.items()
        for name, text, histogram_of in _HISTOGRAMS:
            histograms = HistogramMetricFamily(name, text, labels=["model"])
            for model, counted in models:
                histogram = histogram_of(counted)
                buckets = [(_bound(bound), float(count)) for bound, count in histogram.cumulative()]
                histograms.add_metric([model], buckets, histogram.total)
            yield histograms
        for name, text, count_of in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, counted in models:
                counter.add_metric([model], count_of(counted))
            yield counter
        yield self._ended()
        yield self._refused()
        states = [(model, counted.state()) for model, counted in models if counted.state is not None]
        for kind, name, text, value_of in _STATE:
            family = kind(name, text, labels=["model"])
            for model, state in states:
                family.add_metric([model], value_of(state))
            yield family
        for name, text, total_of in _CHUNK_COUNTERS:
            yield CounterMetricFamily(name, text, value=total_of(self.chunks))
        yield InfoMetricFamily("streamsrv_build", "The server's version.", value={"version": self._version})

    def _ended(self) -> Metric:
        family = CounterMetricFamily(
            "streamsrv_requests",
            "Requests that have ended, by finish reason (CANCELLED among them) or error reason.",
            labels=["model", "reason"],
        )
        for model, counted in self._models.items():
            for reason, count in counted.num_ended.items():
                family.add_metric([model, reason], count)
        return family

    def _refused(self) -> Metric:
        family = CounterMetricFamily(
            "streamsrv_refusals", "Calls that were not let in, by error reason.", labels=["reason"]
        )
        for reason, count in self._num_refused.items():
            family.add_metric([reason], count)
        return family


_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    (
        "streamsrv_time_to_first_token_seconds",
        "From a call's arrival to its first token.",
        lambda m: m.time_to_first_token,
    ),
    (
        "streamsrv_inter_token_latency_seconds",
        "From a request's token to its next.",
        lambda m: m.token_gap,
    ),
    (
        "streamsrv_queue_time_seconds",
        "From a call's arrival to the first step that computes it.",
        lambda m: m.queue_time,
    ),
    (
        "streamsrv_request_duration_seconds",
        "From a call's arrival to the end of its request, whatever it is.",
        lambda m: m.duration,
    ),
    (
        "streamsrv_step_duration_seconds",
        "Time of a step: computing, sampling, detokenising.",
        lambda m: m.step_time,
    ),
    ("streamsrv_step_sequences", "Sequences in a step (batch size).", lambda m: m.step_sequences),
    ("streamsrv_step_tokens", "Tokens computed in a step.", lambda m: m.step_tokens),
)

_COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics], int]], ...] = (
    (
        "streamsrv_prompt_tokens",
        "Tokens of prompts, counted when the first token follows.",
        lambda m: m.num_prompt_tokens,
    ),
    ("streamsrv_output_tokens", "Tokens generated.", lambda m: m.num_output_tokens),
    ("streamsrv_resumes", "Calls that picked a stream up again.", lambda m: m.num_resumes),
    ("streamsrv_stalls", "Calls cut off because their client took nothing.", lambda m: m.num_stalls),
    (
        "streamsrv_disconnects",
        "Calls whose client went away before the stream's end.",
        lambda m: m.num_disconnects,
    ),
)

_STATE: tuple[
    tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Callable[[PoolState], float]],
    ...,
] = (
    (
        GaugeMetricFamily,
        "streamsrv_requests_running",
        "Requests that own cache blocks.",
        lambda s: s.num_running,
    ),
    (GaugeMetricFamily, "streamsrv_requests_waiting", "Requests that own none.", lambda s: s.num_waiting),
    (GaugeMetricFamily, "streamsrv_streams", "Streams that can be read.", lambda s: s.num_streams),
    (GaugeMetricFamily, "streamsrv_readers", "Streams that are being read.", lambda s: s.num_readers),
    (GaugeMetricFamily, "streamsrv_workers_ready", "Workers that take steps.", lambda s: s.num_ready_workers),
    (
        GaugeMetricFamily,
        "streamsrv_cache_blocks",
        "Blocks of the key/value caches.",
        lambda s: s.num_blocks,
    ),
    (
        GaugeMetricFamily,
        "streamsrv_cache_blocks_used",
        "Blocks of them that requests own.",
        lambda s: s.num_used_blocks,
    ),
    (
        GaugeMetricFamily,
        "streamsrv_log_bytes",
        "Memory of what streams hold for their readers.",
        lambda s: s.log_bytes,
    ),
    (
        GaugeMetricFamily,
        "streamsrv_log_limit_bytes",
        "What that may come to (`--log-memory-mib`).",
        lambda s: s.log_limit_bytes,
    ),
    (
        CounterMetricFamily,
        "streamsrv_preemptions",
        "Requests that had to give their blocks back and be computed again.",
        lambda s: s.counters.num_preemptions,
    ),
    (
        CounterMetricFamily,
        "streamsrv_prefix_cache_hits",
        "Outputs whose prompt began with what was computed before.",
        lambda s: s.counters.num_cache_hits,
    ),
    (
        CounterMetricFamily,
        "streamsrv_prefix_cached_tokens",
        "Tokens of prompts that were not computed for that.",
        lambda s: s.counters.num_cached_tokens,
    ),
    (
        CounterMetricFamily,
        "streamsrv_prefix_cache_evictions",
        "Blocks that could have been found and went to another use.",
        lambda s: s.counters.num_evictions,
    ),
    (
        CounterMetricFamily,
        "streamsrv_guessed_tokens",
        "Tokens guessed by prompt lookup.",
        lambda s: s.counters.num_guessed_tokens,
    ),
    (
        CounterMetricFamily,
        "streamsrv_accepted_tokens",
        "Guesses that were right.",
        lambda s: s.counters.num_accepted_tokens,
    ),
    (
        CounterMetricFamily,
        "streamsrv_worker_restarts",
        "Workers made again after they were lost.",
        lambda s: s.num_restarts,
    ),
)

_CHUNK_COUNTERS: tuple[tuple[str, str, Callable[[ChunkTotals], int]], ...] = (
    ("streamsrv_messages", "Messages with events that were sent.", lambda c: c.num_messages),
    ("streamsrv_event_raw_bytes", "Events in them before compression.", lambda c: c.raw_bytes),
    ("streamsrv_event_sent_bytes", "Events in them as sent.", lambda c: c.sent_bytes),
)


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else str(float(value))
