"""Real servers for tests: in this process, on 127.0.0.1 and a free port."""

import asyncio
from collections.abc import AsyncIterator, Callable
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
    metrics_port: int | None = None


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nothing announces; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(engine: Engine | None = None, **settings: Any) -> AsyncIterator[TestServer]:
    """Serve an engine, the scripted one by default; afterwards its books must balance."""
    settings = {"listen": "127.0.0.1:0", "drain_grace_s": 5.0, **settings}
    async with serving(Settings(**settings), engine or ScriptedEngine()) as server:
        target = f"127.0.0.1:{server.port}"
        # A client that hides nothing: it neither resumes nor tries again.
        async with Client(target, resume_window_s=0, max_retries=0) as client:
            yield TestServer(server.pool, client, target, server.metrics_port)
            await server.pool.wait_idle()
            server.pool.check_integrity()
