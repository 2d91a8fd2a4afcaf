"""The first floor: a grpc.aio handler that sends what was serialised before it started.

    python -m streamsrv.bench.frontend.bare_server NAME=FILE ...

Method `/streamsrv.bench.Bare/NAME` answers with the messages of FILE, one after the other.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from streamsrv.bench.frontend.prefixed import unpack
from streamsrv.config import Settings
from streamsrv.server import grpc_options

SERVICE = "streamsrv.bench.Bare"


class _Bare(grpc.GenericRpcHandler):
    def __init__(self, messages: Mapping[str, list[bytes]]) -> None:
        self._handlers: dict[str, Any] = {
            f"/{SERVICE}/{name}": grpc.unary_stream_rpc_method_handler(_sender(own))
            for name, own in messages.items()
        }

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(call.method)


def _sender(messages: list[bytes]) -> Any:
    async def send(_: bytes, context: Any) -> None:
        for message in messages:
            await context.write(message)

    return send


@asynccontextmanager
async def bare_server(messages: Mapping[str, list[bytes]]) -> AsyncIterator[int]:
    """Answer on a free port of 127.0.0.1, with the options of our own server; gives the port."""
    server = grpc.aio.server(options=grpc_options(Settings(max_streams_per_connection=4096)))
    server.add_generic_rpc_handlers((_Bare(messages),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def _serve(files: Mapping[str, Path]) -> None:
    messages = {name: unpack(path.read_bytes()) for name, path in files.items()}
    async with bare_server(messages) as port:
        print(f"listening on 127.0.0.1:{port}", flush=True)
        await asyncio.get_running_loop().create_future()


def main() -> None:
    """Serve until a signal."""
    named = (argument.partition("=") for argument in sys.argv[1:])
    uvloop.run(_serve({name: Path(path) for name, _, path in named}))


if __name__ == "__main__":
    main()
