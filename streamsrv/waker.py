"""How a call waits for its reader to have something to take."""

import asyncio


class Waker:
    """Wakes the one task that waits for changes; on one loop's thread, so that none is missed.

    A bare future instead of an asyncio.Event.
    """

    __slots__ = ("_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Say that something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next change."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def pause(self, seconds: float) -> None:
        """Wait for a while, or for the next change."""
        timer = self._loop.call_later(seconds, self.wake)
        try:
            await self.wait()
        finally:
            timer.cancel()
