"""TensorRT's Python module, chosen by name, and its log.

Two libraries have the same interface where we use it: `tensorrt` for data-centre GPUs and `tensorrt_rtx` for
RTX cards. All code takes the module from here, so that the tests can put one of their own in its place.
"""

import importlib
import logging
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from engines.api import EngineNotInstalledError

_LOG = logging.getLogger(__name__)

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt_rtx"
LIBRARY_NAMES = (TENSORRT, TENSORRT_RTX)
"""As `--engine` takes them, and as Python imports them."""

_NUM_LINES = 16
"""Lines of each kind that are kept to be quoted."""
_IDLE_WARNING = "has int64 binding"
"""Part of the parser's reminder of each input and output of 64 bits; they have them."""
_REFUSED_WARNINGS = ("unused input", "inconsistent")
"""Parts of warnings after which a plan would compute something else than the graph says, or refuse shapes
that the profiles allow. The parser gives the first for an input that it silently ignores."""


@dataclass(frozen=True, slots=True)
class TrtLibrary:
    """One of the two libraries, loaded."""

    name: str
    """One of LIBRARY_NAMES."""
    module: Any
    """The Python module: `tensorrt`, `tensorrt_rtx`, or a stand-in with their names."""
    version: str
    """The library's version, on which plans depend."""

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether plans are for a compute capability, not for one GPU, and so need none to be built."""
        return self.name == TENSORRT_RTX

    @property
    def targets(self) -> tuple[int, ...]:
        """The compute capabilities that plans can be built for without such a GPU, as 89 for 8.9."""
        if not self.is_ahead_of_time:
            return ()
        names = self.module.ComputeCapability.__members__
        return tuple(sorted(int(name[2:]) for name in names if name.startswith("SM")))


def load_library(name: str) -> TrtLibrary:
    """Import one of the libraries.

    Raises:
        EngineNotInstalledError: it is not installed or cannot be loaded; says how to install it, or that
            there is nothing to install on this machine.

    """
    assert name in LIBRARY_NAMES
    try:
        module = importlib.import_module(name)
        version = str(module.__version__)
    except (ImportError, OSError, AttributeError) as error:  # a wheel without its shared libraries
        raise EngineNotInstalledError(
            f"the {name} engine needs the package {name.replace('_', '-')} ({error}); {_remedy(name)}"
        ) from error
    return TrtLibrary(name, module, version)


_WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("win32", "amd64")}
"""Systems and machines that both libraries have wheels for (TensorRT 11.4, TensorRT-RTX 1.7)."""


def _remedy(name: str) -> str:
    machine = platform.machine().lower()
    if (sys.platform, machine) in _WHEELS:
        return f"install it with: pip install 'streamsrv[{name}]'"
    return f"NVIDIA publishes none for {sys.platform} on {machine}; take another engine"


class TrtLog:
    """Takes TensorRT's lines into Python's logging, and keeps those that exceptions quote.

    TensorRT logs from the thread that called it and from threads of its own, and has one logger in a process:
    while anything made with the first lives, it ignores every other. So all logs of a library share one, and
    each keeps every line.
    """

    def __init__(self, library: TrtLibrary) -> None:
        """Make a log for a library's builders, parsers and runtimes."""
        self._errors: deque[tuple[int, str]] = deque(maxlen=_NUM_LINES)
        self._refusals: list[str] = []
        self._name = library.name
        self._tap = _tap(library)
        self._tap.logs.add(self)
        self.logger = self._tap.logger
        """The ILogger to hand to TensorRT."""

    @property
    def refusals(self) -> list[str]:
        """Warnings since the last `clear` that make a plan unusable."""
        return list(self._refusals)

    def clear(self) -> None:
        """Forget all lines, before something that will be judged by its own."""
        self._errors.clear()
        self._refusals.clear()

    def quote(self) -> str:
        """Return what TensorRT last said was wrong, for the end of a message; "" if nothing was.

        Takes the calling thread's lines where it has any: others may belong to another context.
        """
        lines = list(self._errors)
        own = [line for thread, line in lines if thread == threading.get_ident()]
        said = own or [line for _, line in lines]
        return f" ({self._name} says: {'; '.join(dict.fromkeys(said[-3:]))})" if said else ""

    def take(self, severity: int, text: str) -> None:
        """Keep a line if it matters; `severity` is as in `_LEVELS`."""
        if severity <= _ERROR:
            self._errors.append((threading.get_ident(), text))
        elif severity == _WARNING and any(part in text.lower() for part in _REFUSED_WARNINGS):
            self._refusals.append(text)


_ERROR, _WARNING, _INFO = 1, 2, 3
_LEVELS = (logging.ERROR, logging.ERROR, logging.WARNING, logging.DEBUG, logging.DEBUG)
"""By TensorRT's severities: internal error, error, warning, info, verbose. What it calls info is chatter."""


class _Tap:
    """The one ILogger of a library in this process, and the logs that want its lines."""

    def __init__(self, library: TrtLibrary) -> None:
        self.logs: WeakSet[TrtLog] = WeakSet()
        self._name = library.name
        self._module = library.module  # held, since taps go by its identity
        self.logger = _make_logger(library.module, self._take)

    def _take(self, severity: int, text: str) -> None:
        text = " ".join(text.split())
        if severity == _WARNING and _IDLE_WARNING in text.lower():
            severity = _INFO
        for log in list(self.logs):
            log.take(severity, text)
        _LOG.log(_LEVELS[severity], "%s: %s", self._name, text)


# By the module's identity. A tap lives as long as a log or, through its ILogger, anything made with it.
_TAPS: WeakValueDictionary[int, _Tap] = WeakValueDictionary()
_TAPS_LOCK = threading.Lock()


def _tap(library: TrtLibrary) -> _Tap:
    with _TAPS_LOCK:
        tap = _TAPS.get(id(library.module))
        if tap is None:
            tap = _TAPS[id(library.module)] = _Tap(library)
        return tap


def _make_logger(module: Any, take: Callable[[int, str], None]) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]  # the base is known only now
        def __init__(self) -> None:
            module.ILogger.__init__(self)  # pybind11 wants it called so

        def log(self, severity: Any, msg: str) -> None:
            take(int(severity), msg)

    return Logger()
