"""The end of a load before that of its plan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoadStop:
    """Gives up what a load waits for, once and for good; what it has seen until then stays."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._is_set = False

    @property
    def is_set(self) -> bool:
        """Whether the load is to end."""
        return self._is_set

    def set(self) -> None:
        """End it. To be called by the loop's thread."""
        if self._is_set:
            return
        self._is_set = True
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now_s)

    @asynccontextmanager
    async def cutting(self) -> AsyncIterator[None]:
        """Cancel what is inside when this is set, or at its first wait if it was before.

        What follows then runs as after any other end.
        """
        limit = asyncio.timeout(0 if self._is_set else None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
