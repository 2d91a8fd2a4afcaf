"""The asynchronous Python client.

async with Client("127.0.0.1:50051") as client:
async with client.generate("The capital of France is", max_tokens=16) as stream:
async for chunk in stream:
print(chunk.text, end="")
print(stream.finish_reason, stream.usage)
"""

import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from streamsrv.chunks import ChunkDecoder
from streamsrv.errors import CallFailedError, FieldViolation, StreamCorruptError
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub

# What gRPC puts before each message.
_MESSAGE_PREFIX_BYTES = 5

ChatMessages: TypeAlias = Seq[tuple[str, str]]
"""(role, content) pairs; roles are system, user, assistant and tool."""
PromptLike: TypeAlias = str | Seq[int] | ChatMessages | pb.Prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message's events."""

    position: int
    """Of its first element in the stream."""
    events: tuple[pb.Event, ...]
    num_bytes: int
    """Of the gRPC message as received, with its 5-byte prefix and without HTTP/2's framing."""

    @property
    def text(self) -> str:
        """Text of the first output, to be appended."""
        pieces = []
        for event in self.events:
            kind = event.WhichOneof("kind")
            if kind == "tokens" and event.tokens.output_index == 0:
                pieces.append(event.tokens.text)
            elif kind == "output_end" and event.output_end.output_index == 0:
                pieces.append(event.output_end.text)
        return "".join(pieces)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first output's tokens."""
        return [
            token_id
            for event in self.events
            if event.WhichOneof("kind") == "tokens" and event.tokens.output_index == 0
            for token_id in event.tokens.token_ids
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(event.num_positions or 1 for event in self.events if event.WhichOneof("kind") == "tokens")


class Generation:
    """A stream being read: an asynchronous iterator of chunks that have events, and what it has told so far.

    Use it with `async with`, or read it to its end: a stream that is dropped goes on until it is collected.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
        self._call = call
        self._decoder = ChunkDecoder()
        self._began_s = time.monotonic()
        self.stream_id = ""
        """The stream's tag; known after `start`."""
        self.finish_reason: str | None = None
        """"STOP", "LENGTH" or "CANCELLED", once the first output has ended."""
        self.matched: int | str | None = None
        """The token id or the text that stopped it."""
        self.usage: pb.Usage | None = None
        """What it cost, once the stream has ended."""
        self.num_tokens = 0
        """Tokens received."""
        self.num_bytes = 0
        """Bytes of gRPC messages received."""
        self.first_token_s: float | None = None
        """Seconds from the call to the first token."""
        self._start: pb.StreamStart | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the call; the server cancels what still runs."""
        self._call.cancel()

    async def start(self) -> pb.StreamStart:
        """Wait for the first message.

        Raises:
            CallFailedError: the server refused the request.
        """
        if self._start is None:
            response = await self._read()
            if response is None or response.WhichOneof("payload") != "start":
                raise StreamCorruptError("the stream does not begin with a StreamStart")
            self._decoder.decode(response)
            self.stream_id = response.stream_id
            self._start = response.start
        return self._start

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        await self.start()
        while (response := await self._read()) is not None:
            position = response.seq
            events = self._decoder.decode(response)
            if events.events:
                chunk = Chunk(position, tuple(events.events), response.ByteSize() + _MESSAGE_PREFIX_BYTES)
                self._note(chunk)
                yield chunk
        if self.usage is None:
            raise StreamCorruptError(f"stream {self.stream_id} ended with status OK but without a StreamEnd")

    async def text(self) -> str:
        """Read to the end; the whole text of the first output."""
        return "".join([chunk.text async for chunk in self])

    def _note(self, chunk: Chunk) -> None:
        self.num_tokens += chunk.num_tokens
        if self.first_token_s is None and chunk.num_tokens:
            self.first_token_s = time.monotonic() - self._began_s
        for event in chunk.events:
            kind = event.WhichOneof("kind")
            if kind == "output_end" and event.output_end.output_index == 0:
                end = event.output_end
                self.finish_reason = pb.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_")
                matched = end.WhichOneof("matched")
                self.matched = getattr(end, matched) if matched else None
            elif kind == "stream_end":
                self.usage = event.stream_end.usage

    async def _read(self) -> pb.GenerateResponse | None:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None
        if not isinstance(response, pb.GenerateResponse):  # grpc's end-of-stream marker
            return None
        self.num_bytes += response.ByteSize() + _MESSAGE_PREFIX_BYTES
        return response


class Client:
    """A connection to a server."""

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        """`target` is HOST:PORT; the connection is plain text."""
        self._channel = grpc.aio.insecure_channel(
            target, options=[("grpc.max_receive_message_length", 16 << 20)]
        )
        self.stub = InferenceServiceStub(self._channel)
        """The generated stub, for everything that has no method here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; streams that are being read end."""
        await self._channel.close()

    def generate(self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Any) -> Generation:
        """Start a generation.

        `options` are those of `make_request`; `timeout_s` is the call's deadline.
        """
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: pb.GenerateRequest, *, timeout_s: float | None = None) -> Generation:
        """Start a generation from a message made by hand."""
        return Generation(self.stub.Generate(request, timeout=timeout_s))

    async def cancel(self, *, stream_id: str | None = None, request_id: str | None = None) -> str:
        """End a generation: "ABORTED", "ALREADY_FINISHED" or "NOT_FOUND".

        Raises:
            CallFailedError: the call failed.
        """
        if stream_id is not None:
            request = pb.CancelRequest(stream_id=stream_id)
        else:
            request = pb.CancelRequest(request_id=request_id or "")
        response = await self._call(self.stub.Cancel(request))
        return pb.CancelResult.Name(response.result).removeprefix("CANCEL_RESULT_")

    async def tokenize(self, prompt: PromptLike, *, model: str = "") -> list[int]:
        """Give the ids of a prompt, as `generate` would read it.

        Raises:
            CallFailedError: the call failed.
        """
        request = pb.TokenizeRequest(model=model, prompt=make_prompt(prompt))
        return list((await self._call(self.stub.Tokenize(request))).token_ids)

    async def detokenize(
        self, token_ids: Seq[int], *, model: str = "", skip_special_tokens: bool = False
    ) -> str:
        """Give the text of ids.

        Raises:
            CallFailedError: the call failed.
        """
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        text: str = (await self._call(self.stub.Detokenize(request))).text
        return text

    async def models(self) -> list[pb.Model]:
        """List the models that requests can name.

        Raises:
            CallFailedError: the call failed.
        """
        return list((await self._call(self.stub.ListModels(pb.ListModelsRequest()))).models)

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Ask for the server's version, engine and limits.

        Raises:
            CallFailedError: the call failed.
        """
        info: pb.GetServerInfoResponse = await self._call(self.stub.GetServerInfo(pb.GetServerInfoRequest()))
        return info

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None


def make_prompt(prompt: PromptLike) -> pb.Prompt:
    """Make a Prompt from a text, token ids, or (role, content) pairs."""
    if isinstance(prompt, pb.Prompt):
        return prompt
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    messages, ids = [], []
    for part in prompt:
        if isinstance(part, tuple):
            role, content = part
            messages.append(pb.ChatMessage(role=pb.Role.Value(f"ROLE_{role.upper()}"), content=content))
        else:
            ids.append(part)
    if messages:
        return pb.Prompt(chat=pb.Chat(messages=messages))
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def make_request(
    prompt: PromptLike,
    *,
    model: str = "",
    request_id: str = "",
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool | None = None,
    include_stop: bool | None = None,
    zstd: bool = True,
    max_tokens_per_chunk: int | None = None,
    min_chunk_interval_ms: int | None = None,
) -> pb.GenerateRequest:
    """Make a GenerateRequest; what is left out takes the contract's default, but that zstd is accepted."""
    return pb.GenerateRequest(
        request_id=request_id,
        model=model,
        prompt=make_prompt(prompt),
        sampling=pb.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        stop=pb.StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            include_stop=include_stop,
        ),
        stream=pb.StreamOptions(
            accepted_codecs=[pb.CODEC_ZSTD] if zstd else [],
            max_tokens_per_chunk=max_tokens_per_chunk,
            min_chunk_interval_ms=min_chunk_interval_ms,
        ),
    )


def call_failed(error: grpc.aio.AioRpcError) -> CallFailedError:
    """Read a status with its google.rpc details."""
    server_reason, retry_after_s = "", None
    violations: list[FieldViolation] = []
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            server_reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(detail.value)
            violations += [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry_after_s = delay.seconds + delay.nanos / 1e9
    return CallFailedError(
        error.code().name,
        error.details() or "",
        server_reason=server_reason,
        violations=tuple(violations),
        retry_after_s=retry_after_s,
    )
