import re
from dataclasses import replace

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from engines.api import StreamsrvError
from streamsrv.call import DISCONNECTED, Call, CallKind
from streamsrv.errors import ConsumerStalledError, DrainingError, UnauthenticatedError
from streamsrv.metrics import Metrics, ModelMetrics
from streamsrv.observer import PoolState, StepReport
from streamsrv.request import OutputOptions
from streamsrv.scheduler import SchedulerCounters
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import Caller, LogMemory, Stream, StreamLog

STATE = PoolState(
    num_running=1,
    num_waiting=2,
    num_streams=3,
    num_readers=4,
    log_bytes=5,
    log_limit_bytes=6,
    num_blocks=7,
    num_used_blocks=8,
    num_ready_workers=9,
    counters=SchedulerCounters(10, 20, 30, 40, 50, 60),
    num_restarts=11,
)


def made() -> tuple[Metrics, ModelMetrics]:
    metrics = Metrics("1.2.3")
    model = metrics.model("m")
    model.state = lambda: STATE
    return metrics, model


def families(metrics: Metrics) -> dict[str, Metric]:
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: Metrics, sample: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(sample, labels)


def make_stream() -> Stream:
    memory = LogMemory(1 << 20)
    return Stream(
        "s-1", "r", StreamLog(memory), caller=Caller("me"), output=OutputOptions(), num_prompt_tokens=3
    )


def make_call(
    reason: str,
    kind: CallKind = CallKind.GENERATE,
    stream: Stream | None = None,
    error: StreamsrvError | None = None,
) -> Call:
    return Call(kind, Caller("me"), 0.0, model="m", stream=stream, reason=reason, error=error)


def test_every_name_follows_the_conventions() -> None:
    metrics, _ = made()
    for name, family in families(metrics).items():
        if name.startswith("process_"):
            continue
        assert re.fullmatch(r"streamsrv_[a-z]+(_[a-z]+)*", name), name
        assert family.documentation.endswith("."), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), "suffixes are the format's"
        if family.type == "histogram" and not name.startswith("streamsrv_step_"):
            assert name.endswith("_seconds"), name
        for sample in family.samples:
            assert set(sample.labels) <= {"model", "reason", "le", "version"}, name


def test_a_step_is_counted_with_all_that_it_brought() -> None:
    metrics, model = made()
    model.step_taken(
        StepReport(
            duration_s=0.02,
            num_sequences=3,
            num_tokens=40,
            num_output_tokens=3,
            num_prompt_tokens=38,
            queue_times_s=(0.5,),
            times_to_first_token_s=(0.7,),
            token_gaps_s={0.021: 2},
        )
    )
    for name, count, total in (
        ("streamsrv_step_duration_seconds", 1, 0.02),
        ("streamsrv_step_sequences", 1, 3),
        ("streamsrv_step_tokens", 1, 40),
        ("streamsrv_queue_time_seconds", 1, 0.5),
        ("streamsrv_time_to_first_token_seconds", 1, 0.7),
        ("streamsrv_inter_token_latency_seconds", 2, 0.042),
    ):
        assert value(metrics, f"{name}_count", model="m") == count, name
        assert value(metrics, f"{name}_sum", model="m") == total, name
    assert value(metrics, "streamsrv_inter_token_latency_seconds_bucket", model="m", le="0.02") == 0
    assert value(metrics, "streamsrv_inter_token_latency_seconds_bucket", model="m", le="0.03") == 2
    assert value(metrics, "streamsrv_prompt_tokens_total", model="m") == 38
    assert value(metrics, "streamsrv_output_tokens_total", model="m") == 3


def test_finish_reasons_are_there_from_the_start_and_other_reasons_when_they_come() -> None:
    metrics, model = made()
    for reason in FinishReason:
        assert value(metrics, "streamsrv_requests_total", model="m", reason=reason.name) == 0
    stream = make_stream()
    stream.progress.outcome = Finish(FinishReason.CANCELLED)
    model.request_ended(stream)
    stream.progress.outcome, stream.progress.ended_s = ConsumerStalledError(1), 2.0
    model.request_ended(stream)
    assert value(metrics, "streamsrv_requests_total", model="m", reason="CANCELLED") == 1
    assert value(metrics, "streamsrv_requests_total", model="m", reason="CONSUMER_STALLED") == 1
    assert value(metrics, "streamsrv_request_duration_seconds_sum", model="m") == 2.0


def test_calls_are_counted_by_how_they_ended() -> None:
    metrics, _ = made()
    stream = make_stream()
    metrics.call_ended(make_call(DrainingError.reason, error=DrainingError()))
    metrics.refused(UnauthenticatedError("no key"))
    metrics.call_ended(make_call(DISCONNECTED))  # before anything was known: neither let in nor refused
    metrics.call_accepted(make_call("", CallKind.RESUME, stream))
    metrics.call_accepted(make_call("", CallKind.GENERATE, stream))
    metrics.call_ended(make_call(ConsumerStalledError.reason, stream=stream))
    metrics.call_ended(make_call(DISCONNECTED, stream=stream))
    metrics.call_ended(make_call("STOP", stream=stream))
    assert value(metrics, "streamsrv_refusals_total", reason="DRAINING") == 1
    assert value(metrics, "streamsrv_refusals_total", reason="UNAUTHENTICATED") == 1
    assert value(metrics, "streamsrv_refusals_total", reason=DISCONNECTED) is None
    for name in ("resumes", "stalls", "disconnects"):
        assert value(metrics, f"streamsrv_{name}_total", model="m") == 1


def test_the_state_of_the_pool_is_read_at_each_scrape() -> None:
    metrics, model = made()
    expected = {
        "requests_running": 1,
        "requests_waiting": 2,
        "streams": 3,
        "readers": 4,
        "log_bytes": 5,
        "log_limit_bytes": 6,
        "cache_blocks": 7,
        "cache_blocks_used": 8,
        "workers_ready": 9,
        "preemptions_total": 10,
        "prefix_cache_hits_total": 20,
        "prefix_cached_tokens_total": 30,
        "prefix_cache_evictions_total": 40,
        "guessed_tokens_total": 50,
        "accepted_tokens_total": 60,
        "worker_restarts_total": 11,
    }
    for name, count in expected.items():
        assert value(metrics, f"streamsrv_{name}", model="m") == count
    model.state = lambda: replace(STATE, num_streams=100)
    assert value(metrics, "streamsrv_streams", model="m") == 100


def test_two_servers_in_one_process_count_apart() -> None:
    first, _ = made()
    second, model = made()
    model.step_taken(StepReport(0.01, 1, 1, 1))
    assert value(first, "streamsrv_output_tokens_total", model="m") == 0
    assert value(second, "streamsrv_output_tokens_total", model="m") == 1
