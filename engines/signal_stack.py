"""The stack that a thread's signal handlers run on."""

import contextlib
import ctypes
from collections.abc import Iterator


class _Stack(ctypes.Structure):
    """What sigaltstack(2) calls stack_t."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("num_bytes", ctypes.c_size_t))


@contextlib.contextmanager
def keeping_signal_stack() -> Iterator[None]:
    """Leave the calling thread's alternate signal stack as it was.

    A library that sets one of its own may free it later, and give the thread back one that was freed before:
    the next signal then ends the process.
    """
    before = _Stack()
    library = ctypes.CDLL(None)
    known = hasattr(library, "sigaltstack") and library.sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            library.sigaltstack(ctypes.byref(before), None)
