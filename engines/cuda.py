"""CUDA through PyCUDA: the one file that imports it, implementing `engines.cuda_api`.

What PyCUDA (2026.1) makes one keep to, each seen in its source:

- Its Context remembers the thread that made it, and what belongs to a context frees itself on another
  thread only if that very Context is current there; otherwise it warns and leaks. So every thread pushes the
  same Context object, and every `close` here insists on it.
- A primary context that is not released explicitly is released by the wrong call, and so not at all.
- A thread that ends with a context still pushed aborts the process. So nothing pushes but `activate`.
- Copies, fills, and waiting for events and streams release the GIL; everything else is short and holds it.
- Streams and events have no way to be destroyed but to lose their last reference, so they never leave here.
- Errors while freeing are printed to stderr and not raised: closing does not fail on a lost device.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines import cuda_api
from engines.api import EngineNotInstalledError
from engines.cuda_api import CudaError
from engines.cuda_errors import CudaErrors, driver_words
from engines.cuda_graphs import CudaGraphs

_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING, for which PyCUDA has no name: a stream that does not wait for the default one."""


class _Driver:
    """The module pycuda.driver, and how to call it."""

    def __init__(self, module: Any, errors: CudaErrors) -> None:
        self.module = module
        self.errors = errors

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of PyCUDA, with its errors made ours."""
        try:
            return function(*args)
        except self.module.Error as error:
            del function, args  # The traceback would keep streams and events from being destroyed.
            raise self.errors.from_text(str(error)) from error


class PyCuda:
    """CUDA as a whole, as `cuda_api.Cuda`."""

    def open_device(self, index: int) -> "PyCudaDevice":
        """Take a GPU's primary context.

        Raises:
            EngineNotInstalledError: PyCUDA is missing.
            CudaError: there is no driver, or no such GPU; the message says which there are.

        """
        driver = _load()
        try:
            driver.call(driver.module.init)
            count = driver.call(driver.module.Device.count)
        except CudaError as error:
            raise CudaError(f"no GPU can be used: {error}. Does nvidia-smi list one?") from error
        if not 0 <= index < count:
            names = (f"{i} ({driver.call(driver.module.Device(i).name)})" for i in range(count))
            raise CudaError(f"there is no GPU {index}; there are: {', '.join(names) or 'none'}")
        return PyCudaDevice(driver, index)


class PyCudaDevice:
    """A GPU with its primary context, as `cuda_api.Device`."""

    def __init__(self, driver: _Driver, index: int) -> None:
        device = driver.call(driver.module.Device, index)
        self.name: str = driver.call(device.name)
        self.compute_capability: tuple[int, int] = driver.call(device.compute_capability)
        self.driver_version: int = driver.call(driver.module.get_driver_version)
        self._driver = driver
        self._graphs: CudaGraphs | None = None
        self._lock = threading.Lock()
        self._num_active = 0
        self._context: Any = driver.call(device.retain_primary_context)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the context current on this thread, and afterwards what was current before."""
        with self._lock:
            if self._context is None:
                raise CudaError("the device is closed")
            self._num_active += 1
        try:
            self._driver.call(self._context.push)
            try:
                yield
            finally:
                self._driver.call(self._driver.module.Context.pop)
        finally:
            with self._lock:
                self._num_active -= 1

    def require_active(self, call: str) -> None:
        """Refuse to free from a thread on which PyCUDA would warn and leak."""
        if self._context is None or self._driver.module.Context.get_current() != self._context:
            raise CudaError(f"{call} failed: invalid device context: the device is not active on this thread")

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = self._driver.call(self._driver.module.mem_get_info)
        return int(free), int(total)

    def stream(self) -> "PyCudaStream":
        """Make a stream that does not wait for the default one."""
        return PyCudaStream(self, self._driver)

    def event(self) -> "PyCudaEvent":
        """Make an event."""
        return PyCudaEvent(self, self._driver)

    def allocate(self, num_bytes: int) -> "PyCudaMemory":
        """Take memory of the device.

        Raises:
            CudaOutOfMemoryError: there is not as much.

        """
        return PyCudaMemory(self, self._driver, num_bytes)

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> "PyCudaPinnedArray":
        """Take pinned host memory, zeroed.

        Raises:
            CudaOutOfMemoryError: there is not as much.

        """
        return PyCudaPinnedArray(self, self._driver, shape, np.dtype(dtype))

    def copy_in(self, address: int, source: NDArray[Any], stream: cuda_api.Stream) -> None:
        """Queue a copy of a C-contiguous pinned array to the device."""
        self._driver.call(self._driver.module.memcpy_htod_async, address, _buffer(source), _raw(stream))

    def copy_out(self, target: NDArray[Any], address: int, stream: cuda_api.Stream) -> None:
        """Queue a copy from the device into a C-contiguous pinned array."""
        self._driver.call(self._driver.module.memcpy_dtoh_async, _buffer(target), address, _raw(stream))

    def copy(self, target: int, source: int, num_bytes: int, stream: cuda_api.Stream) -> None:
        """Queue a copy on the device; the ranges do not overlap."""
        self._driver.call(self._driver.module.memcpy_dtod_async, target, source, num_bytes, _raw(stream))

    def fill(self, address: int, byte: int, num_bytes: int, stream: cuda_api.Stream) -> None:
        """Queue setting each byte."""
        self._driver.call(self._driver.module.memset_d8_async, address, byte, num_bytes, _raw(stream))

    def begin_capture(self, stream: cuda_api.Stream) -> None:
        """Record what is queued from now on, instead of running it.

        Raises:
            EngineNotInstalledError: the package cuda-bindings is missing.

        """
        if self._graphs is None:
            self._graphs = CudaGraphs(self._driver.errors)
        self._graphs.begin(stream)

    def end_capture(self, stream: cuda_api.Stream) -> cuda_api.Graph:
        """Stop recording, and make it launchable."""
        assert self._graphs is not None, "no capture was begun"
        return self._graphs.end(stream)

    def close(self) -> None:
        """Release the primary context, after everything made here is closed. Closing twice is allowed.

        Raises:
            CudaError: the device is still active on some thread.

        """
        with self._lock:
            if self._context is None:
                return
            if self._num_active:
                raise CudaError(f"the device is closed while it is active {self._num_active} times")
            context, self._context = self._context, None
        # Not current, PyCUDA would release it on the thread that made it and on no other. Released, it stays
        # on CUDA's stack, as cuDevicePrimaryCtxRelease is documented, while PyCUDA takes it off its own.
        self._driver.call(context.push)
        self._driver.call(context.detach)
        ctypes.CDLL("libcuda.so.1").cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class PyCudaStream:
    """A stream, as `cuda_api.Stream`."""

    def __init__(self, device: PyCudaDevice, driver: _Driver) -> None:
        self._device = device
        self._driver = driver
        self.raw: Any = driver.call(driver.module.Stream, _NON_BLOCKING)
        self.handle: int = self.raw.handle

    def synchronize(self) -> None:
        """Wait for everything queued, without holding the GIL."""
        self._driver.call(_raw(self).synchronize)

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        if self.raw is not None:
            self._device.require_active("cuStreamDestroy")
            self.raw = None


class PyCudaEvent:
    """An event, as `cuda_api.Event`."""

    def __init__(self, device: PyCudaDevice, driver: _Driver) -> None:
        self._device = device
        self._driver = driver
        flags = driver.module.event_flags
        # Blocking: the waiting thread sleeps. By default it may spin, which takes a core from each worker.
        self._raw: Any = driver.call(driver.module.Event, flags.DISABLE_TIMING | flags.BLOCKING_SYNC)

    def record(self, stream: cuda_api.Stream) -> None:
        """Set the mark after everything queued so far."""
        self._driver.call(self._open().record, _raw(stream))

    def synchronize(self) -> None:
        """Wait until the stream has come to the mark, without holding the GIL."""
        self._driver.call(self._open().synchronize)

    def _open(self) -> Any:
        if self._raw is None:
            raise CudaError("the event is closed")
        return self._raw

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        if self._raw is not None:
            self._device.require_active("cuEventDestroy")
            self._raw = None


class PyCudaMemory:
    """Memory of the device, as `cuda_api.DeviceMemory`."""

    def __init__(self, device: PyCudaDevice, driver: _Driver, num_bytes: int) -> None:
        self._device = device
        self._raw: Any = driver.call(driver.module.mem_alloc, num_bytes)
        self.address = int(self._raw)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Free it. Closing twice is allowed."""
        if self._raw is not None:
            self._device.require_active("cuMemFree")
            self._raw.free()
            self._raw = None


class PyCudaPinnedArray:
    """Pinned host memory, as `cuda_api.PinnedArray`."""

    def __init__(
        self, device: PyCudaDevice, driver: _Driver, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._device = device
        array = driver.call(driver.module.pagelocked_empty, shape, dtype)
        array.fill(0)
        self._array: NDArray[Any] | None = array

    @property
    def array(self) -> NDArray[Any]:
        """The memory as an array; not to be used after `close`."""
        assert self._array is not None, "a pinned array was used after it was closed"
        return self._array

    def close(self) -> None:
        """Free it. Closing twice is allowed."""
        if self._array is not None:
            self._device.require_active("cuMemFreeHost")
            allocation: Any = self._array.base
            self._array = None
            allocation.free()


def _load() -> _Driver:
    try:
        module = import_module("pycuda.driver")
    except ModuleNotFoundError as error:
        raise EngineNotInstalledError(
            f"the TensorRT engines need PyCUDA ({error}): pip install 'streamsrv[tensorrt]' or "
            "'streamsrv[tensorrt_rtx]'. PyCUDA is compiled when it is installed, which needs a C++ compiler "
            "and a CUDA toolkit, with nvcc on the PATH."
        ) from error
    except ImportError as error:
        raise CudaError(
            f"PyCUDA cannot be loaded: {error}. libcuda.so.1 comes with NVIDIA's driver, which is as new as "
            "the CUDA toolkit that PyCUDA was compiled with, or newer."
        ) from error
    return _Driver(module, CudaErrors(driver_words()))


def _raw(stream: cuda_api.Stream) -> Any:
    if not isinstance(stream, PyCudaStream) or stream.raw is None:
        raise CudaError("the stream is closed or another library's")
    return stream.raw


def _buffer(array: NDArray[Any]) -> NDArray[Any]:
    """Check an array whose bytes PyCUDA is to copy; it would take the other order for contiguous, too."""
    if not array.flags.c_contiguous:
        raise CudaError("the host array is not contiguous")
    # Types that are not NumPy's own, such as bfloat16, have no buffer interface.
    return array if array.dtype.isbuiltin == 1 else array.reshape(-1).view(np.uint8)
