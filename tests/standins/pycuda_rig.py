"""Real PyCUDA over the libcuda stand-in (tests/fakecuda), where the loader finds that as libcuda.so.1."""

import ctypes
import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Final, cast

import numpy as np
from numpy.typing import NDArray

from engines.cuda import PyCuda, PyCudaDevice
from engines.cuda_api import CudaError, CudaOutOfMemoryError
from engines.cuda_errors import CudaErrors, driver_words
from tests.standins.cuda_gpu import Call, Failure
from tests.standins.cuda_rig import RigDevice

USED_NAMES: Final = frozenset(
    {
        "Context",
        "Device",
        "Error",
        "Event",
        "Stream",
        "event_flags",
        "get_driver_version",
        "init",
        "mem_alloc",
        "mem_get_info",
        "memcpy_dtod_async",
        "memcpy_dtoh_async",
        "memcpy_htod_async",
        "memset_d8_async",
        "pagelocked_empty",
    }
)
"""The names of pycuda.driver that engines/cuda.py uses: tests hold that it is so, and that each was run."""

_CODES: Final = {
    Failure.INVALID_VALUE: 1,
    Failure.OUT_OF_MEMORY: 2,
    Failure.DEVICE_LOST: 214,
    Failure.LAUNCH_FAILED: 719,
}
_RETRIED: Final = (Call.ALLOCATE, Failure.OUT_OF_MEMORY)
"""PyCUDA collects Python's garbage then, and tries once more."""
_KINDS: Final = ("device memory", "pinned array", "stream", "event", "graph", "launchable graph", "device")
_DEVICE_MEMORY: Final = 0
_HOST_FUNCTION: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Recorder(ModuleType):
    """A module that notes which of its names are asked for."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__["names"] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__["names"].add(name)
        return getattr(self.__dict__["_module"], name)


def record_names() -> set[str]:
    """Note from now on which names of pycuda.driver are asked for."""
    recorder = Recorder(import_module("pycuda.driver"))
    sys.modules["pycuda.driver"] = recorder
    names: set[str] = recorder.names
    return names


class _Device:
    """A device with what `tests.standins.cuda_rig.RigDevice` adds."""

    def __init__(self, device: PyCudaDevice, library: ctypes.CDLL) -> None:
        self._device = device
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @property
    def num_calls(self) -> dict[Call, int]:
        return {call: self._library.fakecuda_num_calls(_name(call)) for call in Call}

    def fail(self, call: Call, failure: Failure, nth: int = 1) -> None:
        self._library.fakecuda_fail(_name(call), ctypes.c_long(nth), _CODES[failure])
        if (call, failure) == _RETRIED:
            self._library.fakecuda_fail(_name(call), ctypes.c_long(nth + 1), _CODES[failure])

    def lose(self) -> None:
        self._library.fakecuda_lose(_CODES[Failure.DEVICE_LOST])


class PyCudaRig(PyCuda):
    """`tests.standins.cuda_rig.CudaRig` over PyCUDA. One at a time: the library is one for the process."""

    _current: ClassVar["PyCudaRig | None"] = None

    def __init__(self, total_bytes: int, *, lazy: bool = False) -> None:
        PyCudaRig._current = self
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fakecuda_begin_anew()
        self._library.fakecuda_set_total_bytes(ctypes.c_size_t(total_bytes))
        self._library.fakecuda_set_lazy(int(lazy))
        self._library.fakecuda_live.restype = ctypes.c_long
        self._library.fakecuda_num_calls.restype = ctypes.c_long
        self._errors = CudaErrors(driver_words())
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[Callable[[], None], bool]] = {}
        self._numbers = itertools.count(1)
        self._function = _HOST_FUNCTION(self._run)

    def open_device(self, index: int) -> "RigDevice":  # type: ignore[override]
        return cast(RigDevice, _Device(super().open_device(index), self._library))

    def leaks(self) -> list[str]:
        kinds = enumerate(_KINDS)
        return [what for kind, what in kinds for _ in range(self._library.fakecuda_live(kind))]

    def enqueue(self, handle: int, task: Callable[[], None], name: str) -> None:
        if handle == 0:
            raise CudaError(f"{name} was queued on the default stream")
        number = next(self._numbers)
        with self._lock:
            self._tasks[number] = task, self.is_captured(handle)
        self._check("cuLaunchHostFunc", ctypes.c_void_p(handle), self._function, ctypes.c_void_p(number))

    def _run(self, number: int) -> None:
        with self._lock:
            task, is_captured = self._tasks[number]
            if not is_captured:  # What is captured runs at each launch.
                del self._tasks[number]
        try:
            task()
        except BaseException:
            traceback.print_exc()  # CUDA's error does not carry it.
            self._library.fakecuda_lose(_CODES[Failure.LAUNCH_FAILED])

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        if not self._library.fakecuda_holds(
            _DEVICE_MEMORY, ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        ):
            raise CudaError(f"an illegal memory access was encountered: {num_bytes} bytes at {address:#x}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def is_captured(self, handle: int) -> bool:
        status = ctypes.c_int()
        code = self._library.cuStreamIsCapturing(ctypes.c_void_p(handle), ctypes.byref(status))
        return code == 0 and status.value != 0  # A lost device shows at the next call.

    def take(self, num_bytes: int, what: str) -> Callable[[], None]:  # noqa: ARG002
        address = ctypes.c_uint64()
        arguments = ctypes.byref(address), ctypes.c_size_t(num_bytes)
        try:
            self._check("cuMemAlloc_v2", *arguments)
        except CudaOutOfMemoryError:
            self._check("cuMemAlloc_v2", *arguments)  # as PyCUDA does, for a failure asked for is as long

        def free() -> None:
            if PyCudaRig._current is self:  # A later rig's memory may be at the same address.
                self._library.fakecuda_free(ctypes.c_void_p(address.value))

        return free

    def _check(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code != 0:
            raise self._errors.from_code(call.removesuffix("_v2"), code)


def _name(call: Call) -> bytes:
    return b"cuLaunchHostFunc" if call is Call.ENQUEUE else call.value.encode()
