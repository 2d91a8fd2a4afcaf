"""A lock between processes, held through a file; the kernel frees it when its holder dies."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """One holder's lock on a file: exclusive to change what the file stands for, shared to use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Let go at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def exclusive(self, *, wait: bool = True) -> bool:
        """Take the lock alone; False if others hold it and `wait` is off."""
        return self._take(fcntl.LOCK_EX, wait)

    def shared(self) -> None:
        """Take the lock together with other users, or go down to that from the exclusive one."""
        self._take(fcntl.LOCK_SH, wait=True)

    def release(self) -> None:
        """Let go. Releasing twice is allowed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def discard(self) -> None:
        """Delete the file while holding it alone, and let go."""
        self._path.unlink(missing_ok=True)
        self.release()

    def _take(self, kind: int, wait: bool) -> bool:
        while True:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, kind if wait else kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
            if self._is_current(self._fd):
                return True
            self.release()  # somebody discarded the file while we waited: lock the new one

    def _is_current(self, fd: int) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(fd)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
