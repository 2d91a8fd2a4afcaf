import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from streamsrv.call import DISCONNECTED, Call, CallKind
from streamsrv.errors import DeadlinePassedError, InvalidRequestError, SettingsError, WorkerLostError
from streamsrv.request import GenerateRequest, OutputOptions, SamplingParams, StopConditions
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import Caller, LogMemory, Stream, StreamEnd, StreamLog, Token
from streamsrv.tracing import CallTracer, make_provider, tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOW_S = 1000.0


class Spans:
    """A tracer whose clock stands still, and what it has made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = make_provider("abc", "1.2.3")
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.resource = provider.resource.attributes
        self.tracer = CallTracer(provider.get_tracer("test"), clock=lambda: NOW_S)

    def of(self, call: Call) -> ReadableSpan:
        self._exporter.clear()
        self.tracer.call_ended(call)
        (span,) = self._exporter.get_finished_spans()
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    return Spans()


def make_request(**options: Any) -> GenerateRequest:
    return GenerateRequest("mine", (1, 2, 3), **options)


def make_call(*, flags: str = "01", **fields: Any) -> Call:
    """A call that has arrived 3 s ago and ended 1 s ago."""
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}
    defaults: dict[str, Any] = {
        "ended_s": NOW_S - 1,
        "trace_headers": headers,
        "model": "m",
        "reason": "STOP",
    }
    return Call(CallKind.GENERATE, Caller("me"), NOW_S - 3, **{**defaults, **fields})


def make_stream() -> Stream:
    """A stream that was queued for 0.5 s, had its first token after 1 s, and its second and last after 2."""
    log = StreamLog(LogMemory(1 << 20))
    stream = Stream(
        "abc-1",
        "mine",
        log,
        caller=Caller("me"),
        output=OutputOptions(),
        num_prompt_tokens=3,
        arrived_s=NOW_S - 3,
    )
    log.append(Token(0, 5, "a"), Token(0, 6, "b"), StreamEnd(3, 2))
    progress = stream.progress
    progress.started_s, progress.first_token_s, progress.ended_s = NOW_S - 2.5, NOW_S - 2, NOW_S - 1
    progress.num_output_tokens, progress.outcome = 2, Finish(FinishReason.STOP)
    return stream


def test_a_span_continues_the_callers_trace_and_has_the_calls_times(spans: Spans) -> None:
    before_ns = time.time_ns()
    span = spans.of(make_call(stream=make_stream()))
    after_ns = time.time_ns()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.parent.is_remote
    assert span.kind is SpanKind.SERVER
    assert span.start_time is not None
    assert span.end_time is not None
    assert before_ns <= span.start_time + 3_000_000_000 <= after_ns
    assert span.end_time - span.start_time == 2_000_000_000
    (event,) = span.events
    assert event.name == "first_token"
    assert event.timestamp - span.start_time == 1_000_000_000


def test_the_names_are_those_of_the_conventions(spans: Spans) -> None:
    request = make_request(
        sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=40, seed=7),
        stop=StopConditions(max_tokens=100, stop=("what a user has written",)),
    )
    span = spans.of(make_call(request=request, stream=make_stream()))
    assert span.name == "text_completion m"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "streamsrv",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 100,
        "gen_ai.response.id": "abc-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "rpc.system.name": "grpc",
        "rpc.method": "streamsrv.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "streamsrv.request_id": "mine",
        "streamsrv.queue_time_s": 0.5,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_conversation_is_a_chat(spans: Spans) -> None:
    assert spans.of(make_call(is_chat=True)).name == "chat m"


def test_what_is_not_said_has_no_attribute(spans: Spans) -> None:
    span = spans.of(make_call(request=make_request()))
    assert span.attributes is not None
    for name in ("top_k", "seed", "max_tokens"):
        assert f"gen_ai.request.{name}" not in span.attributes


@pytest.mark.parametrize(
    ("error", "code", "is_fault"),
    [
        (InvalidRequestError(), "INVALID_ARGUMENT", False),
        (WorkerLostError("x"), "UNAVAILABLE", True),
        (DeadlinePassedError(started=False), "DEADLINE_EXCEEDED", True),
    ],
)
def test_an_error_is_named_and_a_fault_of_the_server_is_one(
    error: Any, code: str, is_fault: bool, spans: Spans
) -> None:
    span = spans.of(make_call(model="", reason=error.reason, error=error))
    assert span.name == "text_completion"
    assert span.attributes is not None
    assert span.attributes["error.type"] == error.reason
    assert span.attributes["rpc.response.status_code"] == code
    assert (span.status.status_code is StatusCode.ERROR) == is_fault


def test_a_client_that_went_away_is_cancelled(spans: Spans) -> None:
    span = spans.of(make_call(reason=DISCONNECTED, stream=make_stream()))
    assert span.attributes is not None
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert span.attributes["error.type"] == DISCONNECTED
    assert span.status.status_code is StatusCode.UNSET


def test_a_resume_does_not_count_tokens_again(spans: Spans) -> None:
    stream = make_stream()
    call = make_call(stream=stream, position=4)
    call.kind, call.arrived_s = CallKind.RESUME, NOW_S - 1.5
    span = spans.of(call)
    assert span.name == "resume m"
    assert span.attributes is not None
    assert span.attributes["streamsrv.position"] == 4
    assert "gen_ai.usage.output_tokens" not in span.attributes
    assert not span.events, "the first token came before this call"


def test_a_caller_that_does_not_sample_gets_no_span(spans: Spans) -> None:
    with pytest.raises(ValueError, match="not enough values"):
        spans.of(make_call(flags="00"))


@given(st.text(st.characters(codec="ascii"), max_size=60), st.text(st.characters(codec="ascii"), max_size=60))
def test_any_headers_give_a_span(traceparent: str, tracestate: str) -> None:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    assert Spans().of(make_call(trace_headers=headers)).name == "text_completion m"


@given(st.integers(0, 2**64 - 1))
def test_any_seed_can_be_sent(seed: int) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    span = Spans().of(make_call(request=make_request(sampling=SamplingParams(seed=seed))))
    encoded = encode_spans([span]).resource_spans[0].scope_spans[0].spans[0]
    values = {each.key: each.value for each in encoded.attributes}
    found = values["gen_ai.request.seed"]
    assert str(found.int_value or found.string_value or 0) == str(seed)


def test_the_server_is_named(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans.resource["service.name"] == "streamsrv"
    assert spans.resource["service.instance.id"] == "abc"
    assert spans.resource["service.version"] == "1.2.3"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-models")
    assert Spans().resource["service.name"] == "my-models"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://x", "http://", ""])
async def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"http://127\.0\.0\.1:4317"):
        async with tracing(endpoint, instance_id="a", version="1"):
            pass


async def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SettingsError, match=r"pip install 'streamsrv\[otel\]'"):
        async with tracing("http://127.0.0.1:4317", instance_id="a", version="1"):
            pass
