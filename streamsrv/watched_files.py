"""Files that are read again when they change."""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from streamsrv.errors import SettingsError

log = logging.getLogger(__name__)

T = TypeVar("T")

_Signature: TypeAlias = tuple[int, int, int, int]
_MISSING: _Signature = (0, 0, 0, 0)

# File times advance in ticks, of two seconds on some file systems: a file that was changed so shortly before
# it was read may change again and look the same, so it is read once more at the next look.
_TICK_NS = 2_000_000_000


class WatchedFiles(Generic[T]):
    """What some files say together, held until they say something else that is valid.

    Nothing watches: each `current()` looks at the files, one `stat` for each. It may be called from several
    threads. Files that become unreadable or wrong leave the value as it was, and that is logged once.
    """

    def __init__(
        self, paths: Seq[Path], parse: Callable[..., T], clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`parse` makes the value of the files' contents, bytes in the order of `paths`.

        Raises:
            SettingsError: a file cannot be read, or `parse` refuses what it says.
        """
        self._paths = tuple(paths)
        self._parse = parse
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._signatures = self._look()
        self._settled = self._is_settled()
        self._contents: tuple[bytes, ...] | None = self._read()
        self._value = parse(*self._contents)

    def current(self) -> T:
        """Give the value: of what the files say now, if it can be used."""
        with self._lock:
            signatures = self._look()
            if signatures != self._signatures or not self._settled:
                # Both are from before the reading, so that a change in between is found at the next look.
                self._signatures = signatures
                self._settled = self._is_settled()
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            contents = self._read()
        except SettingsError as error:
            if self._contents is not None:
                self._contents = None
                log.error("%s; what it said before stays in force", error)  # noqa: TRY400
            return
        if contents == self._contents:
            return
        self._contents = contents
        try:
            self._value = self._parse(*contents)
        except SettingsError as error:
            log.error("%s; what it said before stays in force", error)  # noqa: TRY400
        else:
            log.info("changed and read again: %s", ", ".join(map(str, self._paths)))

    def _look(self) -> tuple[_Signature, ...]:
        return tuple(map(_signature, self._paths))

    def _is_settled(self) -> bool:
        now_ns = self._clock_ns()
        return all(now_ns - max(mtime, ctime) > _TICK_NS for mtime, ctime, _, _ in self._signatures)

    def _read(self) -> tuple[bytes, ...]:
        return tuple(map(read_file, self._paths))


def _signature(path: Path) -> _Signature:
    try:
        stat = path.stat()
    except OSError:
        return _MISSING
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def read_file(path: Path) -> bytes:
    """Read a whole file.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
