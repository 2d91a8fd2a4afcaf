"""InferenceService: protobuf on the outside, pools on the inside."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from engines.api import StreamsrvError
from streamsrv import __version__
from streamsrv.auth import caller_of
from streamsrv.call import DISCONNECTED, Call, CallKind, CallObserver
from streamsrv.chunks import CODEC_TO_PB, ChunkEncoder, ChunkTotals, most_tokens
from streamsrv.errors import (
    DeadlinePassedError,
    FieldViolation,
    InvalidRequestError,
    ReaderReplacedError,
    StreamElsewhereError,
    StreamExpiredError,
    StreamNotFoundError,
)
from streamsrv.log_format import FieldValue, fields
from streamsrv.parsing import check_token_ids, encode_prompt, parse_generate, parse_stream, shown_prompt
from streamsrv.pool import CancelOutcome, WorkerPool
from streamsrv.request import Codec, RequestLimits, StreamOptions
from streamsrv.served_models import ServedModels
from streamsrv.stall_watch import StallWatch
from streamsrv.status import abort, call_ended
from streamsrv.stream import Caller, Stream
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceServicer
from streamsrv.waker import Waker

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# The metadata that a caller's trace comes in, as W3C Trace Context names it.
_TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
# When a deadline passes, the client hangs up; that comes about when the server's own clock says so, too.
_DEADLINE_SLACK_S = 0.05
# How long a status may wait behind messages that the client does not take.
_ABORT_S = 2.0

_CANCEL_RESULTS = {
    CancelOutcome.ABORTED: pb.CANCEL_RESULT_ABORTED,
    CancelOutcome.ALREADY_FINISHED: pb.CANCEL_RESULT_ALREADY_FINISHED,
    CancelOutcome.NOT_FOUND: pb.CANCEL_RESULT_NOT_FOUND,
}


class InferenceService(InferenceServiceServicer):
    """Answers calls with the pools of the models that are served."""

    def __init__(
        self,
        models: ServedModels,
        *,
        max_message_bytes: int,
        stall_limit_s: float,
        limits: RequestLimits,
        min_chunk_interval_s: float = 0.0,
        observers: Iterable[CallObserver] = (),
        chunk_totals: ChunkTotals | None = None,
        log_prompts: bool = False,
    ) -> None:
        """`models` may come and go; a client may take nothing for `stall_limit_s`.

        `min_chunk_interval_s` is for requests that do not say theirs. `observers` are told of each Generate
        and Resume, with the prompt if `log_prompts`.
        """
        self._models = models
        self._max_message_bytes = max_message_bytes
        self._stall_limit_s = stall_limit_s
        self._limits = limits
        self._min_chunk_interval_s = min_chunk_interval_s
        self._observers = tuple(observers)
        self._chunk_totals = chunk_totals
        self._log_prompts = log_prompts

    # A streaming method of grpc.aio may be a coroutine that writes, which the generated types do not know.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with self._told(context, CallKind.GENERATE) as call:
            call.request_id = request.request_id
            call.is_chat = request.prompt.WhichOneof("kind") == "chat"
            if self._log_prompts:
                call.prompt = shown_prompt(request.prompt)
            call.model, pool = self._models.find(request.model)
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
            parsed = await parse_generate(request, pool.tokenizer, pool.vocab_size, deadline_s, self._limits)
            call.request = parsed
            constraint = await pool.compile(parsed)
            self._models.check_served(call.model, pool)  # it may have been unloaded meanwhile
            for other in self._models:
                if other is not pool:
                    other.check_request_id(call.caller, parsed.request_id)
            stream = pool.submit(parsed, call.caller, arrived_s=call.arrived_s, constraint=constraint)
            await self._send(context, call, stream, pool, parsed.stream)

    async def Resume(  # type: ignore[override]
        self, request: pb.ResumeRequest, context: Context
    ) -> None:
        async with self._told(context, CallKind.RESUME) as call:
            call.request_id, call.position = request.request_id, request.position
            options = parse_stream(request.stream)
            call.model, pool, stream = self._find_stream(request, call.caller)
            await self._send(context, call, stream, pool, options)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with statuses(context):
            target = request.WhichOneof("target")
            if target is None:
                raise InvalidRequestError(
                    FieldViolation("target", "is missing; give stream_id or request_id")
                )
            outcome, caller = CancelOutcome.NOT_FOUND, caller_of(context)
            for pool in self._models:
                if target == "stream_id":
                    outcome = await pool.cancel(caller, stream_id=request.stream_id)
                else:
                    outcome = await pool.cancel(caller, request_id=request.request_id)
                if outcome is not CancelOutcome.NOT_FOUND:
                    break
        return pb.CancelResponse(result=_CANCEL_RESULTS[outcome])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with statuses(context):
            _, pool = self._models.find(request.model)
            ids = await encode_prompt(request.prompt, pool.tokenizer, pool.vocab_size)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with statuses(context):
            _, pool = self._models.find(request.model)
            check_token_ids(request.token_ids, pool.vocab_size, "token_ids")
            ids, skip = list(request.token_ids), request.skip_special_tokens
            text = await asyncio.to_thread(pool.tokenizer.decode, ids, skip_special=skip)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[_describe(name, pool) for name, pool in self._models.served()])

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        served = self._models.served()
        pool = served[0][1] if served else None
        return pb.GetServerInfoResponse(
            version=__version__,
            instance_id=self._models.instance_id,
            engine=pool.engine.name if pool else "",
            codecs=list(CODEC_TO_PB.values()),
            limits=pb.Limits(
                max_prompt_tokens=pool.max_context - 1 if pool else 0,
                max_output_tokens=pool.max_context - 1 if pool else 0,
                max_running_sequences=pool.limits.max_running * pool.num_workers if pool else 0,
                max_waiting_requests=pool.limits.max_waiting if pool else 0,
                max_message_bytes=self._max_message_bytes,
                max_stop_strings=self._limits.max_stop_strings,
                max_stop_bytes=self._limits.max_stop_bytes,
                max_stop_token_ids=self._limits.max_stop_token_ids,
                max_outputs=self._limits.max_outputs,
                max_top_logprobs=self._limits.max_top_logprobs,
                max_logit_biases=self._limits.max_logit_biases,
                max_constraint_bytes=self._limits.max_constraint_bytes,
            ),
        )

    def _find_stream(self, request: pb.ResumeRequest, caller: Caller) -> tuple[str, WorkerPool, Stream]:
        target = request.WhichOneof("target")
        if target is None:
            raise InvalidRequestError(FieldViolation("target", "is missing; give stream_id or request_id"))
        by_stream_id = target == "stream_id"
        instance_id = request.stream_id.rpartition("-")[0]
        for name, pool in self._models.every():
            if by_stream_id and pool.instance_id != instance_id:
                continue
            with contextlib.suppress(StreamNotFoundError):
                stream = pool.find(
                    caller,
                    stream_id=request.stream_id if by_stream_id else None,
                    request_id=None if by_stream_id else request.request_id,
                    resume_token=request.resume_token,
                )
                return name, pool, stream
        raise self._why_missing(request.stream_id, request.request_id)

    def _why_missing(self, stream_id: str, request_id: str) -> StreamsrvError:
        """Tell why no pool has a stream; a pool that knows why has said so itself."""
        instance_id, _, number = stream_id.rpartition("-")
        if not (instance_id and number.isascii() and number.isalnum()):
            return StreamNotFoundError(stream_id or request_id)
        if any(pool.instance_id == instance_id for pool in self._models):
            return StreamNotFoundError(stream_id)
        if self._models.has_had(instance_id):
            return StreamExpiredError(stream_id)  # its model has been unloaded
        return StreamElsewhereError(stream_id, self._models.instance_id)

    @asynccontextmanager
    async def _told(self, context: Context, kind: CallKind) -> AsyncIterator[Call]:
        """End a call with the status of what goes wrong inside, and tell the observers how it ended."""
        arrived_s = time.monotonic()
        metadata = context.invocation_metadata() or ()
        trace_headers = {key: str(value) for key, value in metadata if key in _TRACE_HEADERS}
        call = Call(kind, caller_of(context), arrived_s, trace_headers=trace_headers)
        async with statuses(context):
            try:
                yield call
                assert call.stream is not None
                call.reason = call.stream.progress.reason
            except BaseException as error:
                call.error = _what_ended(error, context)
                call.reason = call.error.reason if call.error else DISCONNECTED
                raise
            finally:
                call.ended_s = time.monotonic()
                for observer in self._observers:
                    observer.call_ended(call)

    async def _send(
        self, context: Context, call: Call, stream: Stream, pool: WorkerPool, options: StreamOptions
    ) -> None:
        """Send what the log holds from a position on, in as few messages as the options allow, to its end.

        Raises:
            StreamsrvError: what the log ended with, or why this reader may not go on.

        """
        waker = Waker()
        reader = pool.attach(stream, call.position, waker.wake)
        try:
            call.stream = stream
            for observer in self._observers:
                observer.call_accepted(call)
            async with StallWatch(self._stall_limit_s) as watch:
                watch.begin()
                await context.write(_start(stream, call.position, options.codec, call.model, pool))
                watch.end()
                encoder = ChunkEncoder(stream.stream_id, options.codec, stream.output, self._chunk_totals)
                most = most_tokens(stream.output)
                if options.max_tokens_per_chunk is not None:
                    most = min(options.max_tokens_per_chunk, most)
                interval_s = options.min_chunk_interval_s
                if interval_s is None:
                    interval_s = self._min_chunk_interval_s
                while not reader.replaced:
                    position = reader.position
                    elements = reader.take(most)
                    if elements:
                        if log.isEnabledFor(logging.DEBUG):
                            num_taken = reader.position - position
                            log.debug("chunk", extra=fields(_chunk(stream, position, num_taken)))
                        message = encoder.encode(position, elements)
                        watch.begin()
                        await context.write(message)
                        watch.end()
                        if interval_s and not (stream.log.ended or reader.replaced):
                            # The tokens of a merged message wake nobody.
                            stream.log.is_quiet = True
                            await waker.pause(interval_s)
                            if not reader.replaced:
                                stream.log.is_quiet = False
                    elif reader.at_end:
                        break
                    else:
                        await waker.wait()
        finally:
            pool.release(reader)
        if reader.replaced:
            raise ReaderReplacedError
        if stream.log.error is not None:
            raise stream.log.error


def _start(stream: Stream, position: int, codec: Codec, model: str, pool: WorkerPool) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        stream_id=stream.stream_id,
        seq=position,
        start=pb.StreamStart(
            request_id=stream.request_id,
            model=model,
            model_revision=pool.engine.model.revision,
            codec=CODEC_TO_PB[codec],
            resume_token=stream.resume_token,
            resume_window_ms=round(stream.resume_window_s * 1000),
            oldest_position=stream.log.oldest_position,
            num_prompt_tokens=stream.num_prompt_tokens,
        ),
    )


def _what_ended(error: BaseException, context: Context) -> StreamsrvError | None:
    """Tell with which error a call ends; None where its client has gone."""
    if isinstance(error, StreamsrvError):
        return error
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
        return StreamsrvError("a fault of the server")
    remaining_s = context.time_remaining()
    late = remaining_s is not None and remaining_s < _DEADLINE_SLACK_S
    return DeadlinePassedError(started=True) if late else None


def _chunk(stream: Stream, position: int, num_elements: int) -> dict[str, FieldValue]:
    return {"stream_id": stream.stream_id, "position": position, "elements": num_elements}


@asynccontextmanager
async def statuses(context: Context) -> AsyncIterator[None]:
    """End the call with the status of what goes wrong inside."""
    try:
        yield
    except StreamsrvError as error:
        # A status waits behind messages that the client does not take; the call's resources do not.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await abort(context, error)
    except grpc.aio.InternalError:
        await call_ended()
        raise
    except grpc.aio.BaseError:
        raise  # an abort of our own
    except Exception:
        # Not to hide it: grpc would tell the client what broke inside, and nobody here.
        log.exception("a fault of ours ended a call")
        await abort(context, StreamsrvError("the server made a fault; its log has the details"))


def _describe(name: str, pool: WorkerPool) -> pb.Model:
    model = pool.engine.model
    return pb.Model(
        name=name,
        revision=model.revision,
        family=model.spec.family.value,
        engine=pool.engine.name,
        context_length=pool.max_context,
        vocab_size=pool.vocab_size,
        num_layers=model.spec.num_layers,
        num_parameters=model.spec.num_parameters,
        has_chat_template=model.vocabulary.chat_template is not None,
        has_prefix_cache=pool.limits.prefix_cache,
        tool_call_format=form.value if (form := pool.tokenizer.tool_call_format) is not None else "",
    )
