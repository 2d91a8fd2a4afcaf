"""A CUDA stream's work on a thread of its own, so that a copy happens when a copy happens."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Task: TypeAlias = Callable[[], None]


class Queue:
    """Runs tasks in order on its own thread. `run` gets each of them and does not raise.

    A lazy queue runs nothing until something waits for it: then whatever the host changes too early or
    reads too early shows every time, not once in a thousand runs.
    """

    def __init__(self, run: Callable[[Task], None], *, lazy: bool) -> None:
        self._run = run
        self._lazy = lazy
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._num_put = self._num_done = self._num_awaited = 0
        self._closed = False
        threading.Thread(target=self._work, name="stand-in stream", daemon=True).start()

    def put(self, task: Task) -> int:
        """Add a task, and say which one it is."""
        with self._changed:
            self._tasks.append(task)
            self._num_put += 1
            if not self._lazy:
                self._changed.notify_all()
            return self._num_put

    def wait(self, number: int | None = None) -> None:
        """Wait until that task, or everything put so far, is done."""
        with self._changed:
            number = self._num_put if number is None else number
            self._num_awaited = max(self._num_awaited, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_done >= number)

    def close(self) -> None:
        """Let the thread end when everything is done, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _due(self) -> bool:
        if not self._tasks:
            return self._closed
        return not self._lazy or self._closed or self._num_done < self._num_awaited

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            self._run(task)
            del task
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()
