"""InferenceService: protobuf on the outside, pools on the inside."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from engines.api import StreamsrvError
from streamsrv import __version__
from streamsrv.auth import caller_of
from streamsrv.chunks import CODEC_TO_PB, MAX_TOKENS_PER_MESSAGE, ChunkEncoder
from streamsrv.errors import (
    ConsumerStalledError,
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    ReaderReplacedError,
    StreamNotFoundError,
)
from streamsrv.parsing import check_token_ids, encode_prompt, parse_generate, parse_stream
from streamsrv.pool import CancelOutcome, WorkerPool
from streamsrv.request import Codec, RequestLimits, StreamOptions
from streamsrv.status import abort
from streamsrv.stream import Caller, Reader, Stream
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceServicer

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# How long a status may wait behind messages that the client does not take.
_ABORT_S = 2.0

_CANCEL_RESULTS = {
    CancelOutcome.ABORTED: pb.CANCEL_RESULT_ABORTED,
    CancelOutcome.ALREADY_FINISHED: pb.CANCEL_RESULT_ALREADY_FINISHED,
    CancelOutcome.NOT_FOUND: pb.CANCEL_RESULT_NOT_FOUND,
}


class InferenceService(InferenceServiceServicer):
    """Answers calls with the pools of the models it serves, the default one first."""

    def __init__(
        self,
        pools: Mapping[str, WorkerPool],
        *,
        max_message_bytes: int,
        stall_limit_s: float,
        limits: RequestLimits,
    ) -> None:
        """`pools` are the models by name, at least one; a client may take nothing for `stall_limit_s`."""
        self._pools = dict(pools)
        self._default = next(iter(pools))
        self._max_message_bytes = max_message_bytes
        self._stall_limit_s = stall_limit_s
        self._limits = limits

    # A streaming method of grpc.aio may be a coroutine that writes, which the generated types do not know.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with _statuses(context):
            name, pool = self._find(request.model)
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
            parsed = await parse_generate(request, pool.tokenizer, pool.vocab_size, deadline_s, self._limits)
            stream = pool.submit(parsed, caller_of(context))
            await self._send(context, stream, name, pool, 0, parsed.stream)

    async def Resume(  # type: ignore[override]
        self, request: pb.ResumeRequest, context: Context
    ) -> None:
        async with _statuses(context):
            options = parse_stream(request.stream)
            name, pool, stream = self._find_stream(request, caller_of(context))
            await self._send(context, stream, name, pool, request.position, options)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with _statuses(context):
            target = request.WhichOneof("target")
            if target is None:
                raise InvalidRequestError(
                    FieldViolation("target", "is missing; give stream_id or request_id")
                )
            outcome, caller = CancelOutcome.NOT_FOUND, caller_of(context)
            for pool in self._pools.values():
                if target == "stream_id":
                    outcome = await pool.cancel(caller, stream_id=request.stream_id)
                else:
                    outcome = await pool.cancel(caller, request_id=request.request_id)
                if outcome is not CancelOutcome.NOT_FOUND:
                    break
        return pb.CancelResponse(result=_CANCEL_RESULTS[outcome])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with _statuses(context):
            _, pool = self._find(request.model)
            ids = await encode_prompt(request.prompt, pool.tokenizer, pool.vocab_size)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with _statuses(context):
            _, pool = self._find(request.model)
            check_token_ids(request.token_ids, pool.vocab_size, "token_ids")
            ids, skip = list(request.token_ids), request.skip_special_tokens
            text = await asyncio.to_thread(pool.tokenizer.decode, ids, skip_special=skip)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[_describe(name, pool) for name, pool in self._pools.items()])

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        pool = self._pools[self._default]
        return pb.GetServerInfoResponse(
            version=__version__,
            instance_id=pool.instance_id,
            engine=pool.engine.name,
            codecs=list(CODEC_TO_PB.values()),
            limits=pb.Limits(
                max_prompt_tokens=pool.max_context - 1,
                max_output_tokens=pool.max_context - 1,
                max_running_sequences=pool.limits.max_running * pool.num_workers,
                max_waiting_requests=pool.limits.max_waiting,
                max_message_bytes=self._max_message_bytes,
                max_stop_strings=self._limits.max_stop_strings,
                max_stop_bytes=self._limits.max_stop_bytes,
                max_stop_token_ids=self._limits.max_stop_token_ids,
            ),
        )

    def _find_stream(self, request: pb.ResumeRequest, caller: Caller) -> tuple[str, WorkerPool, Stream]:
        target = request.WhichOneof("target")
        if target is None:
            raise InvalidRequestError(FieldViolation("target", "is missing; give stream_id or request_id"))
        missing: StreamsrvError | None = None
        for name, pool in self._pools.items():
            try:
                return (
                    name,
                    pool,
                    pool.find(
                        caller,
                        stream_id=request.stream_id if target == "stream_id" else None,
                        request_id=request.request_id if target == "request_id" else None,
                        resume_token=request.resume_token,
                    ),
                )
            except StreamNotFoundError as error:
                missing = error
        assert missing is not None
        raise missing

    async def _send(
        self,
        context: Context,
        stream: Stream,
        model: str,
        pool: WorkerPool,
        position: int,
        options: StreamOptions,
    ) -> None:
        """Send what the log holds from `position` on, in as few messages as the options allow, to its end.

        Raises:
            StreamsrvError: what the log ended with, or why this reader may not go on.

        """
        changed = asyncio.Event()
        reader = pool.attach(stream, position, changed.set)
        try:
            await self._write(context, _start(stream, position, options.codec, model, pool))
            encoder = ChunkEncoder(stream.stream_id, options.codec, stream.output)
            most = min(options.max_tokens_per_chunk or MAX_TOKENS_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE)
            while not reader.replaced:
                position = reader.position
                elements = reader.take(most)
                if elements:
                    await self._write(context, encoder.encode(position, elements))
                    if options.min_chunk_interval_s and not stream.log.ended:
                        await _pause(options.min_chunk_interval_s, reader, changed)
                elif reader.at_end:
                    break
                else:
                    changed.clear()
                    await changed.wait()
        finally:
            pool.release(reader)
        if reader.replaced:
            raise ReaderReplacedError
        if stream.log.error is not None:
            raise stream.log.error

    async def _write(self, context: Context, message: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await context.write(message)
        except TimeoutError:
            raise ConsumerStalledError(self._stall_limit_s) from None

    def _find(self, model: str) -> tuple[str, WorkerPool]:
        name = model or self._default
        if name not in self._pools:
            raise ModelNotFoundError(name, tuple(self._pools))
        return name, self._pools[name]


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


async def _pause(seconds: float, reader: Reader, changed: asyncio.Event) -> None:
    """Let tokens gather for a while; the stream's end, or the reader's, ends the wait."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not (reader.stream.log.ended or reader.replaced):
                changed.clear()
                await changed.wait()


@asynccontextmanager
async def _statuses(context: Context) -> AsyncIterator[None]:
    """End the call with the status of what goes wrong inside."""
    try:
        yield
    except StreamsrvError as error:
        # A status waits behind messages that the client does not take; the call's resources do not.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await abort(context, error)
    except grpc.aio.BaseError:
        raise  # the call is over already: the client has gone
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
    )
