"""Statuses as the client reads them, and how it connects."""

from importlib import import_module
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata
from grpc_status import rpc_status

from streamsrv.client import call_failed
from streamsrv.client.connection import call_metadata, channel_options


def failure(*details: Message, trailers: tuple[tuple[str, str], ...] = ()) -> AioRpcError:
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message="full", details=packed))
    trailing = Metadata(*(status.trailing_metadata or ()), *trailers)
    return AioRpcError(code, Metadata(), trailing, details="full")


def retry_info(seconds: int, nanos: int = 0) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))


def test_a_status_is_read_with_all_its_details() -> None:
    info = error_details_pb2.ErrorInfo(reason="BUSY", domain="streamsrv", metadata={"stream_id": "s-1"})
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop", description="is wrong")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    error = call_failed(failure(info, bad, retry_info(1, 500_000_000)))
    assert (error.code, error.server_reason, error.message) == ("RESOURCE_EXHAUSTED", "BUSY", "full")
    assert error.metadata == {"stream_id": "s-1"}
    assert [(v.field, v.description) for v in error.violations] == [("stop", "is wrong")]
    assert error.retry_after_s == 1.5
    assert str(error) == "RESOURCE_EXHAUSTED: full"


def test_a_status_without_details_has_no_reason() -> None:
    error = call_failed(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details="gone"))
    assert (error.code, error.server_reason, error.retry_after_s) == ("UNAVAILABLE", "", None)
    assert not error.metadata


def test_details_that_contradict_their_status_are_left_alone() -> None:
    trailing = Metadata(("grpc-status-details-bin", status_pb2.Status(code=5).SerializeToString()))
    error = call_failed(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), trailing, details="gone"))
    assert (error.code, error.server_reason) == ("UNAVAILABLE", "")


@pytest.mark.parametrize(
    ("pushback", "seconds"),
    [("2500", 2.5), ("0", 0.0), ("-1", None), ("soon", None), ("", None), ("²", None), ("9" * 5000, None)],
)
def test_grpcs_own_pushback_counts_for_more_than_retry_info(pushback: str, seconds: float | None) -> None:
    error = call_failed(failure(retry_info(1), trailers=(("grpc-retry-pushback-ms", pushback),)))
    assert error.retry_after_s == seconds


def test_every_option_of_the_channel_is_one_that_grpc_knows() -> None:
    """A misspelt option is ignored silently, so each name is looked for in grpc's own binary."""
    binary = Path(str(import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    for name, _ in channel_options(()):
        assert name.encode() + b"\0" in binary, name


def test_options_that_are_given_win() -> None:
    options = channel_options([("grpc.keepalive_time_ms", 1), ("grpc.max_concurrent_streams", 2)])
    assert dict(options)["grpc.keepalive_time_ms"] == 1
    assert dict(options)["grpc.max_concurrent_streams"] == 2
    assert len(options) == len(dict(options))


def test_a_key_goes_with_every_call() -> None:
    assert call_metadata(None) == ()
    assert call_metadata("secret") == (("authorization", "Bearer secret"),)
