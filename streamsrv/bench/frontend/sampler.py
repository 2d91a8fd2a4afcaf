"""Where the time of an event loop goes: a signal for every so much processor time of its thread.

A thread that looked at the loop's stack would see it only where the loop lets go of the interpreter, which is
in a few C functions. A timer on the thread's own processor clock fires wherever it runs, and the handler runs
on that thread at the next function that begins or goes on, or the next turn of a loop: the time of C code
(grpc, uvloop, protobuf, zstd) goes to the Python function that called it.
"""

import ctypes
import dis
import os
import signal
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import FrameType

from streamsrv.bench.errors import BenchError

INTERVAL_S = 0.001
_SIGEV_SIGNAL = 0
_RESUME = dis.opmap["RESUME"]


class _SigEvent(ctypes.Structure):
    # As in <signal.h> of Linux, padded to the 64 bytes that the kernel copies.
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


@dataclass(slots=True)
class Profile:
    """Processor time in seconds."""

    total_s: float = 0.0
    """Of the whole process."""
    threads_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each thread that Python knows, by name."""
    own_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the loop's functions and the C code that they called, without other functions."""
    all_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The same with the functions that they called."""

    @property
    def native_s(self) -> float:
        """Of threads that Python knows nothing of."""
        return max(0.0, self.total_s - sum(self.threads_s.values()))


class Sampler:
    """Samples the main thread from `start` to `stop`; made on that thread, for its handler of SIGPROF."""

    def __init__(self) -> None:
        self._profile = Profile()
        self._before_s: dict[threading.Thread, float] = {}
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        self._last_s = 0.0
        signal.signal(signal.SIGPROF, self._note)

    def start(self) -> None:
        """Begin, on any thread.

        Raises:
            BenchError: the system has no such timers.
        """
        self._profile.total_s = -time.process_time()
        self._before_s = _thread_times()
        self._last_s = _seconds(threading.main_thread())
        event = _SigEvent(signo=signal.SIGPROF, notify=_SIGEV_SIGNAL)
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        spec = _TimerSpec(0, int(INTERVAL_S * 1e9), 0, int(INTERVAL_S * 1e9))
        if self._library.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)) or (
            self._library.timer_settime(self._timer, 0, ctypes.byref(spec), None)
        ):
            raise BenchError(f"no timer for a thread's processor time: {os.strerror(ctypes.get_errno())}")

    def stop(self) -> Profile:
        """Give what was seen."""
        self._library.timer_delete(self._timer)
        self._profile.total_s += time.process_time()
        for thread, seconds in _thread_times().items():
            if thread is not threading.current_thread():
                self._profile.threads_s[thread.name] += seconds - self._before_s.get(thread, 0.0)
        return self._profile

    def _note(self, _: int, frame: FrameType | None) -> None:
        now_s = time.thread_time()
        used_s, self._last_s = now_s - self._last_s, now_s
        if frame is not None and frame.f_code.co_code[frame.f_lasti] == _RESUME:
            frame = frame.f_back  # it has done nothing yet: what has been done was before it
        if frame is None:
            return
        profile = self._profile
        profile.own_s[function_name(frame)] += used_s
        on_stack = set()
        while frame is not None:
            on_stack.add(function_name(frame))
            frame = frame.f_back
        for function in on_stack:
            profile.all_s[function] += used_s


def _thread_times() -> dict[threading.Thread, float]:
    return {thread: _seconds(thread) for thread in threading.enumerate() if thread.is_alive()}


def _seconds(thread: threading.Thread) -> float:
    """Processor time of a thread that lives."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def function_name(frame: FrameType) -> str:
    """Tell a function from others: its qualified name and the end of its file's name."""
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(code.co_filename.split('/')[-2:])})"
