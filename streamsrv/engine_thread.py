"""A thread that an engine's context lives on."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_PAUSE_S = 0.001


class EngineThread:
    """Runs calls one after the other on a thread of its own, for one asyncio loop.

    The standard executors join their threads when the process ends; a step that hangs in a driver must not
    keep a server from stopping, so this thread is a daemon that can be left behind. Calls cost one queue
    operation there and one callback back.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Run a function on the thread; the future brings its result, or what it raises, even SystemExit.

        Cancelling the future does not stop the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # whatever ends a step must reach the waiter
                _deliver(loop, _fail, future, error)
            else:
                _deliver(loop, _succeed, future, result)

        while not self._begun.empty():
            self._begun.get()  # of calls that nobody waited for
        self._calls.put(work)
        return future

    def let_begin(self) -> None:
        """Pause the loop until the thread has begun what it was called for last, for a millisecond at most.

        Both need the interpreter's lock, which the loop gives up after 5 ms if it has so much to do: in
        steps of 1 ms with 64 readers who take 30 us each, the thread stood still for 4.3 ms in between, and
        with this for 0.2 ms.
        """
        with contextlib.suppress(queue.Empty):
            self._begun.get(timeout=_LONGEST_PAUSE_S)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the thread after everything called before; nobody waits for it."""
        self._calls.put(function)

    def close(self) -> None:
        """Let the thread end after everything called before."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it has not within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._begun.put(None)
            call()


def _deliver(loop: asyncio.AbstractEventLoop, *callback: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(*callback)  # type: ignore[arg-type]


def _succeed(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        # An asyncio future takes neither StopIteration nor what would end the loop itself.
        wrapped = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        future.set_exception(wrapped)
