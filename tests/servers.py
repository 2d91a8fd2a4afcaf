"""Real servers for tests: in this process, on 127.0.0.1 and a free port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engines.api import Engine
from engines.scripted import ScriptedEngine
from streamsrv.client import Client
from streamsrv.config import Settings
from streamsrv.pool import WorkerPool
from streamsrv.server import serving


@dataclass(frozen=True, slots=True)
class TestServer:
    """A server and a client connected to it."""

    __test__ = False

    pool: WorkerPool
    client: Client
    target: str


@asynccontextmanager
async def running(engine: Engine | None = None, **settings: Any) -> AsyncIterator[TestServer]:
    """Serve an engine, the scripted one by default; afterwards its books must balance."""
    settings = {"listen": "127.0.0.1:0", "drain_grace_s": 5.0, **settings}
    async with serving(Settings(**settings), engine or ScriptedEngine()) as server:
        target = f"127.0.0.1:{server.port}"
        async with Client(target) as client:
            yield TestServer(server.pool, client, target)
            await server.pool.wait_idle()
            server.pool.check_integrity()
