"""A thread that an engine's context lives on."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs calls one after the other on a thread of its own, for one asyncio loop.

    The standard executors join their threads when the process ends; a step that hangs in a driver must not
    keep a server from stopping, so this thread is a daemon that can be left behind. Calls cost one queue
    operation there and one callback back.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the thread and wait for its result, or for what it raises, even SystemExit.

        Cancelling the wait does not stop the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001: whatever ends a step must reach the waiter
                _deliver(loop, _fail, future, error)
            else:
                _deliver(loop, _succeed, future, result)

        self._calls.put(work)
        return await future

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
