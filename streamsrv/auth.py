"""Who calls, and whether it may."""

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Iterable as It
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from engines.api import StreamsrvError
from streamsrv.api_keys import ApiKeys
from streamsrv.errors import UnauthenticatedError
from streamsrv.status import abort
from streamsrv.stream import Caller
from streamsrv.watched_files import WatchedFiles

# Balancers and orchestrators have no key.
_OPEN_SERVICE = "/grpc.health.v1.Health/"

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # no generic class at run time

# Whose key the call that runs now came with. gRPC runs interceptors and handler of a call in one task.
_key_holder: ContextVar[Caller | None] = ContextVar("_key_holder", default=None)


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets no call in without a known key, whatever its method is, but for health checks.

    It comes before the call's message is read, so that a refused one costs no more than its metadata.
    """

    def __init__(
        self, keys: WatchedFiles[ApiKeys], on_refused: Callable[[StreamsrvError], None] = lambda _: None
    ) -> None:
        """`on_refused` is told of each call that is not let in."""
        self._keys = keys
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Give the method's handler, or one that refuses."""
        if not str(handler_call_details.method).startswith(_OPEN_SERVICE):
            try:
                name = self._name(handler_call_details.invocation_metadata)
            except UnauthenticatedError as error:
                self._on_refused(error)
                return _refusal(error)
            _key_holder.set(Caller(name, authenticated=True))
        return await continuation(handler_call_details)

    def _name(self, metadata: It[tuple[str, str | bytes]]) -> str:
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            raise UnauthenticatedError(
                "the call has no API key; send the metadata 'authorization: Bearer KEY'"
            )
        scheme, _, key = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("'authorization' is not of the form 'Bearer KEY', given once")
        name = self._keys.current().name_of(key.strip())
        if name is None:
            raise UnauthenticatedError(
                "the API key is not one that is let in here; ask the server's operator"
            )
        return name


def caller_of(context: Context) -> Caller:
    """Tell who makes the call that runs now.

    It is the API key's holder; without keys, who the client's certificate names; without certificates, the
    peer's address without its port, so that a client's connections are one caller.
    """
    holder = _key_holder.get()
    if holder is not None:
        return holder
    names = certificate_names(context.auth_context())
    if names:
        return Caller(names, authenticated=True)
    peer = context.peer()
    return Caller(peer.rpartition(":")[0] if peer.startswith("ipv") else peer)


def certificate_names(auth_context: Mapping[str, It[bytes]]) -> str:
    """Join what a client's certificate calls it: its common name, then the other alternative names.

    All of them, because some authorities give all clients one common name, and others one alternative name.
    """
    names = [
        *auth_context.get("x509_common_name", ()),
        *auth_context.get("x509_subject_alternative_name", ()),
    ]
    texts = [name.decode("utf-8", "backslashreplace") for name in names]
    return ", ".join(dict.fromkeys(text.replace("\\", "\\\\").replace(",", "\\,") for text in texts if text))


def _refusal(error: UnauthenticatedError) -> Handler:
    async def refuse(_: Any, context: Context) -> None:
        await abort(context, error)

    # Of this kind whatever the method's is: it alone does not wait for the call's message.
    return grpc.stream_stream_rpc_method_handler(refuse)
