"""The asynchronous client."""

import asyncio
import contextlib
import random
import time
import weakref
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from engines.api import StreamsrvError
from streamsrv.client.chunk import Chunk
from streamsrv.client.connection import (
    CLOSE_TIMEOUT_S,
    DEFAULT_MAX_RETRIES,
    DEFAULT_RESUME_WINDOW_S,
    DEFAULT_TARGET,
    ChannelOptions,
    call_metadata,
    channel_options,
)
from streamsrv.client.follower import Follower, FollowState, GiveUp, NextCall
from streamsrv.client.progress import Progress
from streamsrv.client.request import PromptLike, make_cancel, make_prompt, make_request, make_resumable
from streamsrv.client.status import call_failed
from streamsrv.errors import CallFailedError
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub

_Call: TypeAlias = grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]


class Generation(Progress):
    """A stream being read: an asynchronous iterator of chunks that have events.

    A broken connection is followed by another, and what comes goes on where it was. Use it with
    `async with`, or read it to its end. One that is dropped before closes its call when it is collected, and
    the server ends what still runs when the resume window is over.
    """

    def __init__(self, client: "Client", follower: Follower) -> None:
        """The client's `generate` and `send` make these."""
        super().__init__(follower)
        self._client = client
        self._reading = asyncio.Lock()
        self._next: NextCall | None = None
        self._call: _Call | None = None
        self._dropped: weakref.finalize[..., Generation] | None = None
        self._failure: StreamsrvError | None = None
        self._closed = False
        self._open(follower.begin())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while self._follower.state is not FollowState.COMPLETE:
            if (chunk := await self._receive()) is not None:
                return chunk
        raise StopAsyncIteration

    async def start(self) -> pb.StreamStart:
        """Wait for the first message.

        Raises:
            CallFailedError: the server refused the request, or cannot be reached.
            StreamCorruptError: the stream breaks the contract.
        """
        while self._follower.start is None:
            await self._receive(only_start=True)
        return self._follower.start

    async def texts(self) -> AsyncIterator[str]:
        """Iterate the pieces of the first output's text."""
        async for chunk in self:
            if chunk.text:
                yield chunk.text

    async def text(self) -> str:
        """Read to the end; the whole text of the first output."""
        async for _ in self:
            pass
        return self.received_text

    async def cancel(self) -> str:
        """End the generation; its last events are still to be read. See `Client.cancel`."""
        await self.start()
        return await self._client.cancel(stream_id=self.stream_id)

    async def close(self) -> None:
        """End the generation if it still runs, and read no more."""
        if self._closed:
            return
        self._closed = True
        call = self._forget_call()
        request = self._follower.cancel_request
        try:
            # In this order the server can still write the stream's last events, and is done with it.
            if request is not None and not await self._client._cancel_soon(request) and call is not None:
                # What was not there may have been admitted since; after the end of its call it cannot be.
                call.cancel()
                await self._client._cancel_soon(request)
        finally:
            if call is not None:
                call.cancel()

    def _open(self, step: NextCall) -> None:
        client, request = self._client, step.request
        timeout = self._follower.remaining_s(time.monotonic())
        if isinstance(request, pb.GenerateRequest):
            self._call = client.stub.Generate(request, timeout=timeout, metadata=client.metadata)
        else:
            self._call = client.stub.Resume(request, timeout=timeout, metadata=client.metadata)
        self._next = None
        # The channel holds on to a call that is dropped, so it would never end by itself.
        self._dropped = weakref.finalize(self, _end, asyncio.get_running_loop(), self._call)
        self._dropped.atexit = False

    def _forget_call(self) -> _Call | None:
        call, self._call = self._call, None
        if self._dropped is not None:
            self._dropped.detach()
        return call

    async def _receive(self, *, only_start: bool = False) -> Chunk | None:
        """Take one message, or the end, of the current call; None where that tells nothing."""
        async with self._reading:
            follower = self._follower
            if follower.state is FollowState.COMPLETE or (only_start and follower.start is not None):
                return None
            if self._failure is not None:
                raise self._failure
            self._check_open()
            if self._next is not None:
                await asyncio.sleep(self._next.after_s)
                self._check_open()
                self._open(self._next)
            assert self._call is not None
            try:
                message = await self._call.read()
                if isinstance(message, pb.GenerateResponse):
                    return follower.received(message, time.monotonic())
                follower.ended()
                self._forget_call()
            except grpc.aio.AioRpcError as error:
                self._follow(call_failed(error))
            except asyncio.CancelledError:
                if not _task_is_cancelled():
                    self._check_open()
                # A read that is cancelled takes its whole call with it.
                self._follow(CallFailedError("CANCELLED", "reading the stream was cancelled"), quiet=True)
                raise
            except StreamsrvError as error:
                self._failure = error
                raise
            return None

    def _follow(self, error: CallFailedError, *, quiet: bool = False) -> None:
        self._forget_call()
        step = self._follower.failed(error, time.monotonic())
        if isinstance(step, GiveUp):
            self._failure = step.error
            if not quiet:
                raise step.error from None
        else:
            self._next = step

    def _check_open(self) -> None:
        if self._closed:
            raise CallFailedError("CANCELLED", "the stream was closed before it had ended")
        self._client.check_open()


class Client:
    """A connection to a server, made when it is first needed."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        resume_window_s: float = DEFAULT_RESUME_WINDOW_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        options: ChannelOptions = (),
    ) -> None:
        """`target` is HOST:PORT; without `credentials` the connection is plain text.

        Generations ask to outlive a broken connection for `resume_window_s` seconds, 0 for not at all, and
        are tried again `max_retries` times at most until their first message. `options` are gRPC's, for the
        channel.
        """
        arguments = channel_options(options)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=arguments)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=arguments)
        self._resume_window_s = resume_window_s
        self._max_retries = max_retries
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._closed = False
        self.metadata = call_metadata(api_key)
        """What each call carries; to be given to those that are made with the stub."""
        self.stub = InferenceServiceStub(self._channel)
        """The generated stub, for everything that has no method here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every stream that has not ended, and the connection."""
        try:
            await asyncio.gather(*[generation.close() for generation in self._generations])
        finally:
            self._closed = True
            await self._channel.close()

    def generate(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generation:
        """Start a generation.

        `options` are those of `make_request`; its `resume_window_s` is in place of the client's own.
        `timeout_s` is the time for all of it, resumes included.
        """
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: pb.GenerateRequest, *, timeout_s: float | None = None) -> Generation:
        """Start a generation from a message made by hand; a resume window that it names stays."""
        self.check_open()
        now_s = time.monotonic()
        follower = Follower(
            make_resumable(request, self._resume_window_s),
            max_retries=self._max_retries,
            began_s=now_s,
            deadline_s=None if timeout_s is None else now_s + timeout_s,
            random=random.random,
        )
        generation = Generation(self, follower)
        self._generations.add(generation)
        return generation

    async def cancel(self, *, stream_id: str | None = None, request_id: str | None = None) -> str:
        """End a generation: `ABORTED`, `ALREADY_FINISHED` or `NOT_FOUND`.

        Raises:
            CallFailedError: the call failed.
        """
        response = await self._ask(self.stub.Cancel, make_cancel(stream_id, request_id))
        return pb.CancelResult.Name(response.result).removeprefix("CANCEL_RESULT_")

    async def tokenize(self, prompt: PromptLike, *, model: str = "") -> list[int]:
        """Give the ids of a prompt, as `generate` would read it.

        Raises:
            CallFailedError: the call failed.
        """
        request = pb.TokenizeRequest(model=model, prompt=make_prompt(prompt))
        return list((await self._ask(self.stub.Tokenize, request)).token_ids)

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
        text: str = (await self._ask(self.stub.Detokenize, request)).text
        return text

    async def models(self) -> list[pb.Model]:
        """List the models that requests can name.

        Raises:
            CallFailedError: the call failed.
        """
        return list((await self._ask(self.stub.ListModels, pb.ListModelsRequest())).models)

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Ask for the server's version, engine and limits.

        Raises:
            CallFailedError: the call failed.
        """
        info: pb.GetServerInfoResponse = await self._ask(self.stub.GetServerInfo, pb.GetServerInfoRequest())
        return info

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            CallFailedError: the client was closed.
        """
        if self._closed:
            raise CallFailedError("CANCELLED", "the client was closed")

    async def _cancel_soon(self, request: pb.CancelRequest) -> bool:
        """Cancel if the server can be reached now; if not, the end of the stream's window does it.

        False if it can be reached and knows no such stream.
        """
        with contextlib.suppress(CallFailedError):
            response = await self._ask(self.stub.Cancel, request, timeout_s=CLOSE_TIMEOUT_S)
            return bool(response.result != pb.CANCEL_RESULT_NOT_FOUND)
        return True

    async def _ask(self, method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        self.check_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None
        except asyncio.CancelledError:
            if not _task_is_cancelled():
                self.check_open()
            raise


def _end(loop: asyncio.AbstractEventLoop, call: _Call) -> None:
    # The collector runs on any thread.
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
        loop.call_soon_threadsafe(call.cancel)


def _task_is_cancelled() -> bool:
    """Tell a task's own cancellation from that of a call, which grpc raises as the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
