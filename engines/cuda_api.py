"""What the TensorRT engines need of CUDA: the seam in front of PyCUDA.

`engines.cuda` is the one file that imports PyCUDA and implements it; the tests implement it on host memory.
Addresses are plain integers, sizes bytes. Every call but `open_device` needs the device's context current on
the calling thread (`Device.activate`), and raises `CudaError` with the call that failed.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray

from engines.api import DeviceLostError, EngineError, OutOfMemoryError


class CudaError(EngineError):
    """A CUDA call failed; the message names the call and CUDA's reason."""

    reason = "CUDA_FAILED"


class CudaOutOfMemoryError(CudaError, OutOfMemoryError):
    """There is not as much device or pinned memory."""

    reason = "CUDA_OUT_OF_MEMORY"


class CudaDeviceLostError(CudaError, DeviceLostError):
    """The error is one that stays: every later call in this process will fail."""

    reason = "CUDA_DEVICE_LOST"


class Stream(Protocol):
    """A queue of work on the device, never the default one."""

    @property
    def handle(self) -> int:
        """The CUstream as an integer; not 0."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued, without holding the GIL."""
        ...

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        ...


class Event(Protocol):
    """A mark in a stream, without timing."""

    def record(self, stream: Stream) -> None:
        """Set the mark after everything queued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has come to the mark, without holding the GIL."""
        ...

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        ...


class DeviceMemory(Protocol):
    """Memory of the device; its address is a multiple of 256."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...

    @property
    def num_bytes(self) -> int:
        """How much it is."""
        ...

    def close(self) -> None:
        """Free it. Closing twice is allowed."""
        ...


class PinnedArray(Protocol):
    """Host memory that the device can copy to and from while the host goes on."""

    @property
    def array(self) -> NDArray[Any]:
        """The memory as an array; not to be used after `close`."""
        ...

    def close(self) -> None:
        """Free it. Closing twice is allowed."""
        ...


class Graph(Protocol):
    """A recorded run of launches and copies."""

    def launch(self, stream: Stream) -> None:
        """Queue all of it."""
        ...

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        ...


class Device(Protocol):
    """A GPU with its primary context, the one that TensorRT uses, too."""

    @property
    def name(self) -> str:
        """Such as "NVIDIA L4"."""
        ...

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor, such as (8, 9)."""
        ...

    @property
    def driver_version(self) -> int:
        """CUDA's version that the driver supports, such as 13000."""
        ...

    def activate(self) -> AbstractContextManager[None]:
        """Make the context current on this thread, and afterwards what was current before."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        ...

    def stream(self) -> Stream:
        """Make a stream that does not wait for the default one."""
        ...

    def event(self) -> Event:
        """Make an event."""
        ...

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Take memory of the device.

        Raises:
            CudaOutOfMemoryError: there is not as much.

        """
        ...

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> PinnedArray:
        """Take pinned host memory, zeroed.

        Raises:
            CudaOutOfMemoryError: there is not as much.

        """
        ...

    def copy_in(self, address: int, source: NDArray[Any], stream: Stream) -> None:
        """Queue a copy of a C-contiguous pinned array to the device."""
        ...

    def copy_out(self, target: NDArray[Any], address: int, stream: Stream) -> None:
        """Queue a copy from the device into a C-contiguous pinned array."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Queue a copy on the device; the ranges do not overlap."""
        ...

    def fill(self, address: int, byte: int, num_bytes: int, stream: Stream) -> None:
        """Queue setting each byte."""
        ...

    def begin_capture(self, stream: Stream) -> None:
        """Record what is queued from now on, instead of running it.

        Raises:
            EngineNotInstalledError: the package cuda-bindings is missing.

        """
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """Stop recording, and make it launchable."""
        ...

    def close(self) -> None:
        """Release the primary context, after everything made here is closed. Closing twice is allowed.

        Raises:
            CudaError: the device is still active on some thread.

        """
        ...


class Cuda(Protocol):
    """CUDA as a whole."""

    def open_device(self, index: int) -> Device:
        """Take a GPU's primary context.

        Raises:
            CudaError: there is no driver, or no such GPU; the message says which there are.

        """
        ...
