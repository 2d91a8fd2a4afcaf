"""InferenceService: protobuf on the outside, pools on the inside."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from engines.api import StreamsrvError
from streamsrv import __version__
from streamsrv.chunks import CODEC_TO_PB, MAX_TOKENS_PER_MESSAGE, ChunkEncoder
from streamsrv.errors import FieldViolation, InvalidRequestError, ModelNotFoundError, NotSupportedError
from streamsrv.parsing import check_token_ids, encode_prompt, parse_generate
from streamsrv.pool import CancelOutcome, WorkerPool
from streamsrv.request import MAX_STOP_BYTES, MAX_STOP_STRINGS, GenerateRequest
from streamsrv.status import to_status
from streamsrv.stream import Stream, StreamLog
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceServicer

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_CANCEL_RESULTS = {
    CancelOutcome.ABORTED: pb.CANCEL_RESULT_ABORTED,
    CancelOutcome.ALREADY_FINISHED: pb.CANCEL_RESULT_ALREADY_FINISHED,
    CancelOutcome.NOT_FOUND: pb.CANCEL_RESULT_NOT_FOUND,
}


class InferenceService(InferenceServiceServicer):
    """Answers calls with the pools of the models it serves, the default one first."""

    def __init__(self, pools: Mapping[str, WorkerPool], *, max_message_bytes: int) -> None:
        """`pools` are the models by name, at least one."""
        self._pools = dict(pools)
        self._default = next(iter(pools))
        self._max_message_bytes = max_message_bytes

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with _statuses(context):
            name, pool = self._find(request.model)
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
            parsed = await parse_generate(request, pool.tokenizer, pool.vocab_size, deadline_s)
            stream = pool.submit(parsed)
            try:
                yield _start(stream, parsed, name, pool)
                async for message in _follow(stream, parsed):
                    yield message
            finally:
                pool.release(stream)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        async with _statuses(context):
            for message in _resume():
                yield message

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with _statuses(context):
            target = request.WhichOneof("target")
            if target is None:
                raise InvalidRequestError(
                    FieldViolation("target", "is missing; give stream_id or request_id")
                )
            outcome = CancelOutcome.NOT_FOUND
            for pool in self._pools.values():
                if target == "stream_id":
                    outcome = await pool.cancel(stream_id=request.stream_id)
                else:
                    outcome = await pool.cancel(request_id=request.request_id)
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
                max_waiting_requests=pool.limits.max_waiting * pool.num_workers,
                max_message_bytes=self._max_message_bytes,
                max_stop_strings=MAX_STOP_STRINGS,
                max_stop_bytes=MAX_STOP_BYTES,
            ),
        )

    def _find(self, model: str) -> tuple[str, WorkerPool]:
        name = model or self._default
        if name not in self._pools:
            raise ModelNotFoundError(name, tuple(self._pools))
        return name, self._pools[name]


def _resume() -> Iterator[pb.GenerateResponse]:
    raise NotSupportedError("this server cannot resume streams; send the request again with Generate")


def _start(stream: Stream, request: GenerateRequest, model: str, pool: WorkerPool) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        stream_id=stream.stream_id,
        start=pb.StreamStart(
            request_id=stream.request_id,
            model=model,
            model_revision=pool.engine.model.revision,
            codec=CODEC_TO_PB[request.stream.codec],
            oldest_position=stream.log.oldest_position,
            num_prompt_tokens=len(request.prompt_token_ids),
        ),
    )


async def _follow(stream: Stream, request: GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Send what the log holds, as few messages as the options allow, until it ends.

    Raises:
        StreamsrvError: what the log ended with.
    """
    options, log_ = request.stream, stream.log
    encoder = ChunkEncoder(stream.stream_id, options.codec, request.output)
    most = min(options.max_tokens_per_chunk or MAX_TOKENS_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE)
    changed = asyncio.Event()
    log_.on_change = changed.set
    position = log_.oldest_position
    while True:
        elements = log_.read(position, most)
        if elements:
            message = encoder.encode(position, elements)
            position += len(elements)
            log_.drop_before(position)
            yield message
            if options.min_chunk_interval_s and not log_.ended:
                await _pause(options.min_chunk_interval_s, log_, changed)
        elif log_.ended:
            break
        else:
            changed.clear()
            await changed.wait()
    if log_.error is not None:
        raise log_.error


async def _pause(seconds: float, log_: StreamLog, changed: asyncio.Event) -> None:
    """Let tokens gather for a while; the end of the log ends the wait."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not log_.ended:
                changed.clear()
                await changed.wait()


@asynccontextmanager
async def _statuses(context: Context) -> AsyncIterator[None]:
    """End the call with the status of what goes wrong inside."""
    try:
        yield
    except StreamsrvError as error:
        status = to_status(error)
        await context.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))


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
