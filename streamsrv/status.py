"""The one table from the server's errors to gRPC statuses with google.rpc details."""

import asyncio
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engines.api import StreamsrvError
from streamsrv import errors
from streamsrv.chat import ChatTemplateError
from streamsrv.constraint.spec import ConstraintFailedError, InvalidConstraintError
from streamsrv.logit_changes import NothingAllowedError

ERROR_DOMAIN = "streamsrv"

STATUS_CODES: dict[type[StreamsrvError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PromptTooLongError: grpc.StatusCode.INVALID_ARGUMENT,
    ChatTemplateError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidConstraintError: grpc.StatusCode.INVALID_ARGUMENT,
    NothingAllowedError: grpc.StatusCode.INVALID_ARGUMENT,
    ConstraintFailedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ModelLoadError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
    errors.TooManyWaitingError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CallerShareUsedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LogMemoryFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StreamNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.StreamExpiredError: grpc.StatusCode.NOT_FOUND,
    errors.StreamElsewhereError: grpc.StatusCode.NOT_FOUND,
    errors.PositionEvictedError: grpc.StatusCode.OUT_OF_RANGE,
    errors.PositionInFutureError: grpc.StatusCode.OUT_OF_RANGE,
    errors.ReaderReplacedError: grpc.StatusCode.ABORTED,
    errors.ConsumerStalledError: grpc.StatusCode.ABORTED,
    errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
    errors.StoppedError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlinePassedError: grpc.StatusCode.DEADLINE_EXCEEDED,
    StreamsrvError: grpc.StatusCode.INTERNAL,
}
_DRAINING_RETRY_S = 1.0
# How long grpc may take to notice that a call has ended.
_NOTICE_S = 1.0


def status_code(error: StreamsrvError) -> grpc.StatusCode:
    """Look up an error's code: that of its class, or of the nearest class above it."""
    return next(STATUS_CODES[cls] for cls in type(error).__mro__ if cls in STATUS_CODES)


def to_status(error: StreamsrvError) -> grpc.Status:
    """Make the status that a call ends with: code, sentence, and ErrorInfo with what applies besides."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=_metadata(error))
    ]
    if isinstance(error, errors.InvalidRequestError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
            for v in error.violations
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if isinstance(error, errors.OverloadedError):
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=str(error))
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if (retry_s := retry_after_s(error)) is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    code: int = status_code(error).value[0]
    return rpc_status.to_status(status_pb2.Status(code=code, message=str(error), details=packed))


async def abort(context: Any, error: StreamsrvError) -> None:
    """End a call with an error's status, and with the hint that gRPC's own retries understand."""
    status = to_status(error)
    metadata = tuple(status.trailing_metadata or ())
    if (retry_s := retry_after_s(error)) is not None:
        metadata += (("grpc-retry-pushback-ms", str(round(retry_s * 1000))),)
    try:
        await context.abort(status.code, status.details or "", metadata)
    except grpc.aio.InternalError:
        await call_ended()
        raise


async def call_ended() -> None:
    """Wait for the end of a call on which a send has failed, because the client has gone or its time is over.

    grpc cancels the handler then, which raises CancelledError here. A handler that fails before grpc has
    noticed would be logged as a fault, with a traceback.
    """
    await asyncio.sleep(_NOTICE_S)


def retry_after_s(error: StreamsrvError) -> float | None:
    """Tell how long a client should wait before it tries again; None where trying again is of no use."""
    if isinstance(error, errors.OverloadedError):
        return error.retry_after_s
    return _DRAINING_RETRY_S if isinstance(error, errors.DrainingError) else None


def _metadata(error: StreamsrvError) -> dict[str, str]:
    if isinstance(error, errors.ModelNotFoundError):
        return {"model": error.model, "served": ",".join(error.served)}
    if isinstance(error, errors.ModelLoadError):
        return {"model": error.model}
    if isinstance(error, errors.RequestIdInUseError):
        return {"request_id": error.request_id, "stream_id": error.stream_id}
    if isinstance(error, errors.OverloadedError):
        return {"used": str(error.used), "limit": str(error.limit)}
    if isinstance(error, errors.StreamElsewhereError):
        return {"stream_id": error.stream_id, "instance_id": error.instance_id}
    if isinstance(error, errors.PositionEvictedError):
        return {"position": str(error.position), "oldest_position": str(error.oldest_position)}
    if isinstance(error, errors.PositionInFutureError):
        return {
            "position": str(error.position),
            "oldest_position": str(error.oldest_position),
            "next_position": str(error.next_position),
        }
    return {}
