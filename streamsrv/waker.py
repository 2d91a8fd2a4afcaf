"""How a call waits for its reader to have something to take."""

import asyncio
from collections.abc import Callable


class Waker:
    """Wakes the one task that waits for changes; on one loop's thread, so that none is missed.

    A bare future instead of an asyncio.Event, and none at all for the changes of a pause that do not end it:
    a token of a merged message wakes nobody.
    """

    __slots__ = ("_ends_pause", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._ends_pause: Callable[[], bool] | None = None

    def wake(self) -> None:
        """Say that something has changed."""
        if self._waiter is not None and (self._ends_pause is None or self._ends_pause()):
            self._release()

    async def wait(self) -> None:
        """Wait for the next change."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def pause(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait for a while, or until `is_over` after a change."""
        if is_over():
            return
        self._ends_pause = is_over
        timer = self._loop.call_later(seconds, self._release)
        try:
            await self.wait()
        finally:
            timer.cancel()
            self._ends_pause = None

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
