"""`streamsrv admin`."""

import argparse
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import uvloop

from streamsrv.cli.flag_values import check_seconds, check_text
from streamsrv.cli.server_flags import add_server_flags, server_of
from streamsrv.client import call_failed
from streamsrv.client.connection import call_metadata

if TYPE_CHECKING:
    from streamsrv.v1.admin_pb2 import RepositoryModel
    from streamsrv.v1.admin_pb2_grpc import AdminServiceAsyncStub

_MAX_GRACE_S = 3600.0  # the server's own bound


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    admin = commands.add_parser(
        "admin",
        help="load and unload models of a running server",
        description="List, load and unload models of a server that has --models and --admin-listen.",
    )
    actions = admin.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the models of the server's folder and their states")
    listing.add_argument("--json", action="store_true", help="print one JSON object a line")
    listing.set_defaults(command=_list)
    load = actions.add_parser(
        "load", help="serve a model of the folder", description="Serve a model; waits until it is ready."
    )
    load.add_argument("model", metavar="NAME", help="its name, as 'streamsrv admin list' shows it")
    load.set_defaults(command=_load)
    unload = actions.add_parser(
        "unload",
        help="serve a model no more",
        description="Take no more requests for a model, let its streams finish, and free its memory.",
    )
    unload.add_argument("model", metavar="NAME", help="its name, as 'streamsrv admin list' shows it")
    unload.add_argument(
        "--grace-s",
        type=float,
        metavar="X",
        help="seconds that its streams may take to finish (default: the server's --drain-grace-s)",
    )
    unload.set_defaults(command=_unload)
    for action in (listing, load, unload):
        add_server_flags(action, is_admin=True)


def _list(arguments: argparse.Namespace) -> None:
    from streamsrv.v1 import admin_pb2 as pb

    response = _call(arguments, lambda stub: stub.ListRepository, pb.ListRepositoryRequest())
    for model in response.models:
        if arguments.json:
            facts = {"name": model.name, "state": _state(model), "path": model.path}
            print(json.dumps(facts | {"streams": model.num_streams, "error": model.error}))
        else:
            print(_line(model))


def _load(arguments: argparse.Namespace) -> None:
    from streamsrv.v1 import admin_pb2 as pb

    check_text("the model's name", arguments.model)
    request = pb.LoadModelRequest(model=arguments.model)
    print(_line(_call(arguments, lambda stub: stub.LoadModel, request).model))


def _unload(arguments: argparse.Namespace) -> None:
    from streamsrv.v1 import admin_pb2 as pb

    check_seconds("--grace-s", arguments.grace_s, _MAX_GRACE_S, may_be_0=True)
    check_text("the model's name", arguments.model)
    request = pb.UnloadModelRequest(model=arguments.model)
    if arguments.grace_s is not None:
        request.grace_ms = round(arguments.grace_s * 1000)
    response = _call(arguments, lambda stub: stub.UnloadModel, request)
    cut = "" if response.all_finished else ", with streams that had not finished"
    print(_line(response.model) + cut)


def _call(
    arguments: argparse.Namespace,
    method_of: "Callable[[AdminServiceAsyncStub], Callable[..., Awaitable[Any]]]",
    request: Any,
) -> Any:
    """Make one call.

    Raises:
        SettingsError: a flag about the server is wrong.
        CallFailedError: the call ended with a status that is not OK.
    """
    server = server_of(arguments)

    async def call() -> Any:
        from streamsrv.v1.admin_pb2_grpc import AdminServiceStub

        async with server.channel() as channel:
            stub: Any = AdminServiceStub(channel)
            metadata = call_metadata(server.api_key)
            try:
                return await method_of(stub)(request, timeout=server.timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise call_failed(error) from None

    return uvloop.run(call())


def _state(model: "RepositoryModel") -> str:
    from streamsrv.v1 import admin_pb2 as pb

    return pb.ModelState.Name(model.state).removeprefix("MODEL_STATE_")


def _line(model: "RepositoryModel") -> str:
    text = f"{model.name:<24}{_state(model):<11}{model.path}"
    if model.phase:
        text += f"  {model.phase} {model.phase_done:.0%}"
    return text + (f"  {model.error}" if model.error else "")
