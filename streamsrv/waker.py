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

    def wait(self) -> "asyncio.Future[None]":
        """Begin to wait for the next change; the future, to be awaited at once, is done with it."""
        self._waiter = self._loop.create_future()
        return self._waiter

    async def pause(self, seconds: float) -> None:
        """Wait for a while, or for the next change."""
        timer = self._loop.call_later(seconds, self.wake)
        try:
            await self.wait()
        finally:
            timer.cancel()
