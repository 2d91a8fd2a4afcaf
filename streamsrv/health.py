"""grpc.health.v1.Health: whether the server takes requests."""

import asyncio
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Status: TypeAlias = Literal[0, 1, 2, 3]  # as the types of health_pb2 have it

_SERVING: Status = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Status = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """One status for all the services it names, NOT_SERVING at first.

    Setting it never waits. The servicer of grpcio-health-checking holds a lock while it writes to a watcher,
    so that one which takes nothing keeps every later status, even that of the shutdown, from being set.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """The empty name, for the server as a whole, is always known."""
        self._services = frozenset(("", *services))
        self._status = _NOT_SERVING
        self._closed = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def serving(self) -> bool:
        """Whether it says SERVING."""
        return self._status == _SERVING

    @property
    def num_watchers(self) -> int:
        """Calls of Watch that are open."""
        return len(self._watchers)

    def set(self, *, serving: bool) -> None:
        """Say SERVING or NOT_SERVING from now on; watchers are told."""
        self._status = _SERVING if serving else _NOT_SERVING
        self._wake()

    def close(self) -> None:
        """End the calls of all watchers, which would keep a server from stopping."""
        self._closed = True
        self._wake()

    async def Check(  # noqa: D102, N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: ARG002, D102, N802
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]
            statuses={
                name: health_pb2.HealthCheckResponse(status=self._status) for name in sorted(self._services)
            }
        )

    async def Watch(  # noqa: D102, N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        known = request.service in self._services
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            said: Status | None = None
            while True:
                changed.clear()
                status = self._status if known else _UNKNOWN
                if status != said:
                    # While this waits for a slow client, states may come and go; it is told of the last.
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    said = status
                elif self._closed:
                    break
                else:
                    await changed.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
