"""`streamsrv health`."""

import argparse
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streamsrv.cli.server_flags import add_server_flag, add_tls_flags, check_server, credentials_of
from streamsrv.client import call_failed
from streamsrv.errors import CallFailedError

_TIMEOUT_S = 5.0


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    health = commands.add_parser(
        "health",
        help="ask a running server whether it serves",
        description="Ask a running server whether it serves: prints SERVING and exits 0, else exits 1.",
    )
    add_server_flag(health)
    add_tls_flags(health)
    health.set_defaults(command=_health)


def _health(arguments: argparse.Namespace) -> None:
    check_server(arguments)
    answer = uvloop.run(_check(arguments.server, credentials_of(arguments)))
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise CallFailedError("UNAVAILABLE", f"the server at {arguments.server} says {name}")
    print(name)


async def _check(server: str, credentials: grpc.ChannelCredentials | None) -> health_pb2.HealthCheckResponse:
    channel = (
        grpc.aio.insecure_channel(server)
        if credentials is None
        else grpc.aio.secure_channel(server, credentials)
    )
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs lack the methods
        try:
            answer: health_pb2.HealthCheckResponse = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None
    return answer
