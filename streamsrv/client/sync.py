"""The blocking client."""

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, Self

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


class SyncGeneration(Progress):
    """A stream being read: an iterator of chunks that have events.

    A broken connection is followed by another, and what comes goes on where it was. Use it with `with`, or
    read it to its end. One that is dropped before closes its call when it is collected, and the server ends
    what still runs when the resume window is over. One thread reads; any may call `cancel` or `close`.
    """

    def __init__(self, client: "SyncClient", follower: Follower) -> None:
        """The client's `generate` and `send` make these."""
        super().__init__(follower)
        self._client = client
        self._reading = threading.Lock()
        self._closing = threading.Event()
        self._next: NextCall | None = None
        self._call: Any = None  # an iterator and a call at once, which no exported type is
        self._failure: StreamsrvError | None = None
        self._open(follower.begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while self._follower.state is not FollowState.COMPLETE:
            if (chunk := self._receive()) is not None:
                return chunk
        raise StopIteration

    def start(self) -> pb.StreamStart:
        """Wait for the first message.

        Raises:
            CallFailedError: the server refused the request, or cannot be reached.
            StreamCorruptError: the stream breaks the contract.
        """
        while self._follower.start is None:
            self._receive(only_start=True)
        return self._follower.start

    def texts(self) -> Iterator[str]:
        """Iterate the pieces of the first output's text."""
        for chunk in self:
            if chunk.text:
                yield chunk.text

    def text(self) -> str:
        """Read to the end; the whole text of the first output."""
        for _ in self:
            pass
        return self.received_text

    def cancel(self) -> str:
        """End the generation; its last events are still to be read. See `SyncClient.cancel`."""
        self.start()
        return self._client.cancel(stream_id=self.stream_id)

    def close(self) -> None:
        """End the generation if it still runs, and read no more."""
        if self._closing.is_set():
            return
        self._closing.set()
        call = self._call
        request = self._follower.cancel_request
        try:
            # In this order the server can still write the stream's last events, and is done with it.
            if request is not None and not self._client._cancel_soon(request) and call is not None:
                # What was not there may have been admitted since; after the end of its call it cannot be.
                call.cancel()
                self._client._cancel_soon(request)
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

    def _receive(self, *, only_start: bool = False) -> Chunk | None:
        """Take one message, or the end, of the current call; None where that tells nothing."""
        with self._reading:
            follower = self._follower
            if follower.state is FollowState.COMPLETE or (only_start and follower.start is not None):
                return None
            if self._failure is not None:
                raise self._failure
            self._check_open()
            if self._next is not None:
                self._closing.wait(self._next.after_s)
                self._check_open()
                self._open(self._next)
            try:
                message = next(self._call, None)
                if message is not None:
                    return follower.received(message, time.monotonic())
                follower.ended()
            except grpc.RpcError as error:
                self._check_open()
                self._follow(call_failed(error))
            except StreamsrvError as error:
                self._failure = error
                raise
            return None

    def _follow(self, error: CallFailedError) -> None:
        self._call = None
        step = self._follower.failed(error, time.monotonic())
        if isinstance(step, GiveUp):
            self._failure = step.error
            raise step.error from None
        self._next = step

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CallFailedError("CANCELLED", "the stream was closed before it had ended")
        self._client.check_open()


class SyncClient:
    """A connection to a server, made when it is first needed. Threads may share it."""

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
        """The arguments are those of `Client`."""
        arguments = channel_options(options)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=arguments)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=arguments)
        self._resume_window_s = resume_window_s
        self._max_retries = max_retries
        self._generations: weakref.WeakSet[SyncGeneration] = weakref.WeakSet()
        self._closed = False
        self.metadata = call_metadata(api_key)
        """What each call carries; to be given to those that are made with the stub."""
        self.stub = InferenceServiceStub(self._channel)
        """The generated stub, for everything that has no method here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every stream that has not ended, and the connection."""
        try:
            for generation in list(self._generations):
                generation.close()
        finally:
            self._closed = True
            self._channel.close()

    def generate(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> SyncGeneration:
        """Start a generation. The arguments are those of `Client.generate`."""
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: pb.GenerateRequest, *, timeout_s: float | None = None) -> SyncGeneration:
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
        generation = SyncGeneration(self, follower)
        self._generations.add(generation)
        return generation

    def cancel(self, *, stream_id: str | None = None, request_id: str | None = None) -> str:
        """End a generation: `ABORTED`, `ALREADY_FINISHED` or `NOT_FOUND`.

        Raises:
            CallFailedError: the call failed.
        """
        response = self._ask(self.stub.Cancel, make_cancel(stream_id, request_id))
        return pb.CancelResult.Name(response.result).removeprefix("CANCEL_RESULT_")

    def tokenize(self, prompt: PromptLike, *, model: str = "") -> list[int]:
        """Give the ids of a prompt, as `generate` would read it.

        Raises:
            CallFailedError: the call failed.
        """
        request = pb.TokenizeRequest(model=model, prompt=make_prompt(prompt))
        return list(self._ask(self.stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Seq[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """Give the text of ids.

        Raises:
            CallFailedError: the call failed.
        """
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        text: str = self._ask(self.stub.Detokenize, request).text
        return text

    def models(self) -> list[pb.Model]:
        """List the models that requests can name.

        Raises:
            CallFailedError: the call failed.
        """
        return list(self._ask(self.stub.ListModels, pb.ListModelsRequest()).models)

    def server_info(self) -> pb.GetServerInfoResponse:
        """Ask for the server's version, engine and limits.

        Raises:
            CallFailedError: the call failed.
        """
        info: pb.GetServerInfoResponse = self._ask(self.stub.GetServerInfo, pb.GetServerInfoRequest())
        return info

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            CallFailedError: the client was closed.
        """
        if self._closed:
            raise CallFailedError("CANCELLED", "the client was closed")

    def _cancel_soon(self, request: pb.CancelRequest) -> bool:
        """Cancel if the server can be reached now; if not, the end of the stream's window does it.

        False if it can be reached and knows no such stream.
        """
        with contextlib.suppress(CallFailedError):
            response = self._ask(self.stub.Cancel, request, timeout_s=CLOSE_TIMEOUT_S)
            return bool(response.result != pb.CANCEL_RESULT_NOT_FOUND)
        return True

    def _ask(self, method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        self.check_open()
        try:
            return method(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            raise call_failed(error) from None
