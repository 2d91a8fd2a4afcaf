"""grpc.health.v1.Health: whether the server takes requests."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Status: TypeAlias = Literal[0, 1, 2, 3]  # as the types of health_pb2 have it

_SERVING: Status = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Status = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """One status for all the services it names, NOT_SERVING at first, and one for each model of the moment.

    Setting it never waits. The servicer of grpcio-health-checking holds a lock while it writes to a watcher,
    so that one which takes nothing keeps every later status, even that of the shutdown, from being set.
    """

    def __init__(self, services: Iterable[str], *, prefix: str = "") -> None:
        """The empty name, for the server as a whole, is always known; `prefix` comes before a model's."""
        self._services = frozenset(("", *services))
        self._prefix = prefix
        self._models: dict[str, Status] = {}
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

    def set(self, *, serving: bool, models: Mapping[str, bool] | None = None) -> None:
        """Say SERVING or NOT_SERVING from now on, of each of the models, too; watchers are told.

        Without `models`, those known are as the server is.
        """
        self._status = _SERVING if serving else _NOT_SERVING
        if models is None:
            self._models = dict.fromkeys(self._models, self._status)
        else:
            self._models = {
                self._prefix + name: _SERVING if healthy else _NOT_SERVING for name, healthy in models.items()
            }
        self._wake()

    def close(self) -> None:
        """End the calls of all watchers, which would keep a server from stopping."""
        self._closed = True
        self._wake()

    async def Check(  # noqa: D102, N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._status_of(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: ARG002, D102, N802
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]
            statuses={
                # No models: health is open to those without an API key, who have no use for their names.
                name: health_pb2.HealthCheckResponse(status=self._status)
                for name in sorted(self._services)
            }
        )

    async def Watch(  # noqa: D102, N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            said: Status | None = None
            while True:
                changed.clear()
                status = self._status_of(request.service)
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

    def _status_of(self, service: str) -> Status:
        return self._status if service in self._services else self._models.get(service, _UNKNOWN)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
