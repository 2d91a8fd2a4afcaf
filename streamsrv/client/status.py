"""gRPC statuses as exceptions."""

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from streamsrv.errors import CallFailedError, FieldViolation

_PUSHBACK = "grpc-retry-pushback-ms"


def call_failed(error: grpc.RpcError) -> CallFailedError:
    """Read a status, of a call of either API, with its google.rpc details."""
    call: Any = error  # each API's error answers for its call, which the types do not tell
    server_reason, retry_after_s = "", None
    metadata: dict[str, str] = {}
    violations: list[FieldViolation] = []
    for detail in _details(call):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            server_reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(detail.value)
            violations += [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry_after_s = delay.seconds + delay.nanos / 1e9
    return CallFailedError(
        call.code().name,
        call.details() or "",
        server_reason=server_reason,
        metadata=metadata,
        violations=tuple(violations),
        retry_after_s=_pushed_back(call, retry_after_s),
    )


def _details(call: Any) -> Any:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the status: none of our server's
        return ()
    return status.details if status else ()


def _pushed_back(call: Any, retry_after_s: float | None) -> float | None:
    """Let gRPC's own trailer count for more than RetryInfo: a number, or anything else for never.

    Source: gRPC proposal A6, "Pushback".
    """
    for key, value in call.trailing_metadata() or ():
        if key == _PUSHBACK:
            text = str(value)
            sound = len(text) < 10 and text.isascii() and text.isdecimal()
            return int(text) / 1000 if sound else None
    return retry_after_s
