"""How long something that is done again and again may take: a message that waits for its client, a step."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from streamsrv.errors import ConsumerStalledError


class StallWatch:
    """Ends what runs inside `async with` when one of its writes, or steps, takes too long.

    It looks at the clock when the limit has passed, and not for each write: a timer that is made and
    cancelled for each costs as much as encoding the message.
    """

    def __init__(self, limit_s: float, error: Callable[[float], Exception] = ConsumerStalledError) -> None:
        """`limit_s` is the longest that a write may take, in seconds; `error` is made of it."""
        self._limit_s = limit_s
        self._error = error
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
            ConsumerStalledError: a write took too long; or another error that is its own.
        """
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._error(self._limit_s) from None

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
