"""OpenTelemetry spans of calls. The only file that knows OpenTelemetry, which is an extra."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import grpc

from streamsrv.call import DISCONNECTED, Call, CallKind
from streamsrv.errors import SettingsError
from streamsrv.sequence import Finish
from streamsrv.status import status_code

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

AttributeValue: TypeAlias = str | bool | int | float | list[str]

# A collector that does not answer must not hold up the server's end for longer.
_SHUTDOWN_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_MAX_INT64 = 2**63 - 1
# Statuses that are a server's fault. Source: OpenTelemetry's semantic conventions for gRPC, server spans.
_SERVER_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


@asynccontextmanager
async def tracing(endpoint: str, *, instance_id: str, version: str) -> AsyncIterator["CallTracer"]:
    """Send spans to an OTLP endpoint over gRPC, in the background; what cannot be sent is dropped.

    The variables of OpenTelemetry's SDK (OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES, ...) apply.

    Raises:
        SettingsError: the extra is not installed, or the endpoint is no URL.
    """
    scheme, _, host = endpoint.partition("://")
    if scheme not in ("http", "https") or not host:
        raise SettingsError(
            f"--otlp-endpoint is {endpoint!r}; it must be a URL such as http://127.0.0.1:4317, "
            "or https://... for TLS"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = make_provider(instance_id, version)
    except ImportError as error:
        raise SettingsError(
            f"--otlp-endpoint needs OpenTelemetry ({error}): pip install 'streamsrv[otel]'"
        ) from None
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=scheme == "http", timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield CallTracer(provider.get_tracer("streamsrv", version))
    finally:
        # Each may block for long where the collector does not answer.
        if not await _ended_within(_SHUTDOWN_S, _start(provider.shutdown)):
            _start(exporter.shutdown)  # what is still waiting to be sent is given up


def make_provider(instance_id: str, version: str) -> "TracerProvider":
    """Make a provider of tracers that names this server; no processor yet, and nothing global."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    attributes = {"service.version": version, "service.instance.id": instance_id}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "streamsrv"
    return TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)


class CallTracer:
    """Makes one span a call, which continues the caller's trace; a CallObserver.

    A span is made when its call has ended, out of the times that were noted: nothing is done before.
    """

    def __init__(self, tracer: "Tracer", clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is that of the calls' times."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def call_accepted(self, call: Call) -> None:
        """Do nothing."""

    def call_ended(self, call: Call) -> None:
        """Make the call's span."""
        now_s, now_ns = self._clock(), time.time_ns()

        def epoch_ns(at_s: float) -> int:
            return now_ns - round((now_s - at_s) * 1e9)

        attributes = _attributes(call)
        span = self._tracer.start_span(
            " ".join(filter(None, (_operation(call), call.model))),
            self._propagator.extract(call.trace_headers),
            self._kind,
            attributes,
            start_time=epoch_ns(call.arrived_s),
        )
        first_token_s = call.stream.progress.first_token_s if call.stream else None
        if first_token_s is not None and first_token_s >= call.arrived_s:
            span.add_event("first_token", timestamp=epoch_ns(first_token_s))
        if call.error is not None and status_code(call.error) in _SERVER_FAULTS:
            span.set_status(self._failed)
        span.end(epoch_ns(call.ended_s))


def _operation(call: Call) -> str:
    if call.kind is CallKind.RESUME:
        return "resume"
    return "chat" if call.is_chat else "text_completion"


def _attributes(call: Call) -> dict[str, AttributeValue]:
    """Say what the GenAI and gRPC conventions have names for, and nothing of what was written.

    Source: OpenTelemetry's semantic conventions, GenAI inference spans (in development) and gRPC.
    """
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(call),
        "gen_ai.provider.name": "streamsrv",
        "gen_ai.request.stream": True,
        "rpc.system.name": "grpc",
        "rpc.method": f"streamsrv.v1.InferenceService/{call.kind.value}",
        "rpc.response.status_code": _status_name(call),
    }
    if call.model:
        attributes["gen_ai.request.model"] = call.model
    if call.kind is CallKind.RESUME:
        attributes["streamsrv.position"] = call.position
    if call.reason == DISCONNECTED or call.error is not None:
        attributes["error.type"] = call.reason
    return attributes | _of_request(call) | _of_stream(call)


def _of_request(call: Call) -> dict[str, AttributeValue]:
    if call.request is None:
        return {}
    sampling, stop = call.request.sampling, call.request.stop
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if sampling.seed is not None:
        # A seed has 64 bits, an attribute has 63 and a sign.
        fits = sampling.seed <= _MAX_INT64
        attributes["gen_ai.request.seed"] = sampling.seed if fits else str(sampling.seed)
    if stop.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = stop.max_tokens
    return attributes


def _of_stream(call: Call) -> dict[str, AttributeValue]:
    stream = call.stream
    if stream is None:
        return {}
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": stream.stream_id,
        "gen_ai.response.model": call.model,
        "streamsrv.request_id": stream.request_id,
    }
    if call.kind is CallKind.GENERATE:
        # Not in a Resume: what is summed over spans must count once.
        attributes["gen_ai.usage.input_tokens"] = stream.num_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = stream.num_output_tokens
        if (seconds := stream.progress.time_to_first_token_s) is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = seconds
        if (seconds := stream.progress.queue_time_s) is not None:
            attributes["streamsrv.queue_time_s"] = seconds
    if isinstance(outcome := stream.progress.outcome, Finish):
        attributes["gen_ai.response.finish_reasons"] = [outcome.reason.value]
    return attributes


def _status_name(call: Call) -> str:
    if call.error is not None:
        return status_code(call.error).name
    return grpc.StatusCode.CANCELLED.name if call.reason == DISCONNECTED else grpc.StatusCode.OK.name


def _start(work: Callable[[], object]) -> threading.Thread:
    """Run work on a thread that the process does not wait for."""
    thread = threading.Thread(target=work, name="streamsrv-tracing", daemon=True)
    thread.start()
    return thread


async def _ended_within(limit_s: float, thread: threading.Thread) -> bool:
    await asyncio.to_thread(thread.join, limit_s)
    return not thread.is_alive()
