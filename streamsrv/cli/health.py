"""`streamsrv health`."""

import argparse
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.api import StreamsrvError
from streamsrv.cli.server_flags import ServerChoice, add_server_flags, server_of
from streamsrv.client import call_failed
from streamsrv.client.connection import call_metadata

_TIMEOUT_S = 5.0


class NotServingError(StreamsrvError):
    """The server says that it does not serve."""

    reason = "NOT_SERVING"


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    health = commands.add_parser(
        "health",
        help="ask a running server whether it serves",
        description="Ask a running server whether it serves: prints SERVING and exits 0, else exits 1.",
    )
    add_server_flags(health, timeout_s=_TIMEOUT_S)
    health.set_defaults(command=_health)


def _health(arguments: argparse.Namespace) -> None:
    server = server_of(arguments)
    answer = uvloop.run(_check(server))
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotServingError(
            f"the server at {server.target} says {name}: it is there, and answers no requests"
        )
    print(name)


async def _check(server: ServerChoice) -> health_pb2.HealthCheckResponse:
    async with server.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs lack the methods
        try:
            answer: health_pb2.HealthCheckResponse = await stub.Check(
                health_pb2.HealthCheckRequest(),
                timeout=server.timeout_s,
                metadata=call_metadata(server.api_key),
            )
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None
    return answer
