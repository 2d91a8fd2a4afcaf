"""How long a message may wait for a client that takes nothing."""

import asyncio
from types import TracebackType
from typing import Self

from streamsrv.errors import ConsumerStalledError


class StallWatch:
    """Ends what runs inside `async with` when one of its writes takes too long.

    It looks at the clock when the limit has passed, and not for each write: a timer that is made and
    cancelled for each costs as much as encoding the message.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the longest that a write may take, in seconds."""
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since_s: float | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the watch.

        Raises:
            ConsumerStalledError: a write took too long.
        """
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ConsumerStalledError(self._limit_s) from None

    def begin(self) -> None:
        """Note that a write begins."""
        self._since_s = self._loop.time()

    def end(self) -> None:
        """Note that it has ended."""
        self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        # Whatever has begun since the last look is younger than the limit now, so no write is missed.
        due_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self._timeout.reschedule(now_s)
