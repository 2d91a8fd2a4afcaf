"""What Ctrl-C does to a command that has something to end properly."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engines.api import StreamsrvError


class CommandInterruptedError(StreamsrvError):
    """Ctrl-C ended a command; the message says what became of its work."""

    reason = "INTERRUPTED"


@contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C calls `stop` and the next one cancels this task.

    Where Ctrl-C is ignored, as in what a shell runs in its background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    calls = iter([stop])
    loop.add_signal_handler(signal.SIGINT, lambda: next(calls, task.cancel)())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
