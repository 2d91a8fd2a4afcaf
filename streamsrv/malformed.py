"""Requests that are no protobuf messages."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from engines.api import StreamsrvError
from streamsrv.errors import MalformedRequestError
from streamsrv.status import abort


@dataclass(frozen=True, slots=True)
class _Malformed:
    reason: str


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Answers bytes that cannot be read with INVALID_ARGUMENT.

    grpc alone answers UNKNOWN, with what broke inside. What the methods answer may be serialised already.
    """

    def __init__(self, service: str, on_refused: Callable[[StreamsrvError], None] = lambda _: None) -> None:
        """`service` is the full name of the one whose methods are guarded; each is a coroutine function.

        `on_refused` is told of each call that is answered here.
        """
        self._prefix = f"/{service}/"
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Put a guard around the method that a call names."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        read, write = _tolerant(handler.request_deserializer), _as_it_is(handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._guarded(handler.unary_stream), read, write)
        return grpc.unary_unary_rpc_method_handler(self._guarded(handler.unary_unary), read, write)

    def _guarded(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, _Malformed):
                error = MalformedRequestError(request.reason)
                self._on_refused(error)
                await abort(context, error)
            return await method(request, context)

        return answer


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return read


def _as_it_is(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def write(message: Any) -> bytes:
        return message if isinstance(message, bytes) else serialize(message)

    return write
