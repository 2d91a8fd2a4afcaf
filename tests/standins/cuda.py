"""CUDA on host memory, for tests on machines without a GPU: `engines.cuda_api` with CUDA's rules enforced.

- A call on a thread that has not activated the device raises "invalid device context".
- Streams are asynchronous: each runs its work on its own thread, when it comes to it; with `lazy`, only
  when something waits for it.
- Device memory begins as garbage and is garbage again when freed; copies are checked against what is
  allocated, when they are queued and when they run, and host arrays must be pinned and contiguous.
- An error of queued work stays: the next call and every later one raise `CudaDeviceLostError`.
- While a stream is captured, its thread may neither wait nor allocate.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines import cuda_api
from engines.cuda_api import CudaError
from tests.standins.cuda_gpu import Call, Failure, Gpu
from tests.standins.cuda_objects import (
    HostDeviceMemory,
    HostEvent,
    HostGraph,
    HostPinnedArray,
    HostStream,
    own_stream,
    refuse_in_capture,
)

__all__ = ["Call", "Failure", "StandInCuda", "StandInDevice"]


class StandInDevice:
    """One retaining of a GPU's primary context, as `engines.cuda_api.Device`."""

    name = "Stand-in GPU"
    compute_capability = (8, 9)
    driver_version = 13000

    def __init__(self, gpu: Gpu, *, lazy: bool) -> None:
        self._gpu = gpu
        self._lazy = lazy
        self._open = True
        self._num_active = 0
        with gpu.lock:
            gpu.num_retained += 1

    @contextmanager
    def activate(self) -> Iterator[None]:
        if not self._open:
            raise CudaError("cuCtxPushCurrent failed: context is destroyed")
        with self._gpu.lock:
            self._num_active += 1
        self._gpu.push()
        try:
            yield
        finally:
            self._gpu.pop()
            with self._gpu.lock:
                self._num_active -= 1

    def memory_info(self) -> tuple[int, int]:
        self._gpu.enter(Call.MEMORY_INFO)
        return self._gpu.free_bytes()

    def stream(self) -> cuda_api.Stream:
        self._gpu.enter(Call.STREAM)
        return HostStream(self._gpu, lazy=self._lazy)

    def event(self) -> cuda_api.Event:
        self._gpu.enter(Call.EVENT)
        return HostEvent(self._gpu)

    def allocate(self, num_bytes: int) -> cuda_api.DeviceMemory:
        self._gpu.enter(Call.ALLOCATE)
        refuse_in_capture(self._gpu, Call.ALLOCATE)
        if num_bytes < 1:
            raise CudaError("cuMemAlloc failed: invalid argument")
        return HostDeviceMemory(self._gpu, num_bytes)

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> cuda_api.PinnedArray:
        self._gpu.enter(Call.PINNED)
        refuse_in_capture(self._gpu, Call.PINNED)
        if 0 in shape:
            raise CudaError("cuMemHostAlloc failed: invalid argument")
        return HostPinnedArray(self._gpu, shape, dtype)

    def copy_in(self, address: int, source: NDArray[Any], stream: cuda_api.Stream) -> None:
        host = _host_range(source)
        self._transfer(Call.COPY_IN, address, host, stream)

    def copy_out(self, target: NDArray[Any], address: int, stream: cuda_api.Stream) -> None:
        if not target.flags.writeable:
            raise CudaError("cuMemcpyDtoHAsync failed: the array is read-only")
        self._transfer(Call.COPY_OUT, address, _host_range(target), stream)

    def _transfer(self, call: Call, address: int, host: tuple[int, int], stream: cuda_api.Stream) -> None:
        gpu = self._gpu
        failure = gpu.enter(call, queues=True)
        own = own_stream(gpu, stream, call)

        def run() -> None:
            device_side = gpu.device_view(address, host[1], call)
            host_side = gpu.pinned_view(*host, call)
            if call is Call.COPY_IN:
                device_side[:] = host_side
            else:
                host_side[:] = device_side

        gpu.device_view(address, host[1], call)
        gpu.pinned_view(*host, call)
        own.put(run, failure)

    def copy(self, target: int, source: int, num_bytes: int, stream: cuda_api.Stream) -> None:
        gpu = self._gpu
        failure = gpu.enter(Call.COPY, queues=True)
        own = own_stream(gpu, stream, Call.COPY)
        if abs(target - source) < num_bytes:
            raise CudaError("cuMemcpyDtoDAsync failed: the ranges overlap")

        def run() -> None:
            gpu.device_view(target, num_bytes, Call.COPY)[:] = gpu.device_view(source, num_bytes, Call.COPY)

        gpu.device_view(target, num_bytes, Call.COPY)
        gpu.device_view(source, num_bytes, Call.COPY)
        own.put(run, failure)

    def fill(self, address: int, byte: int, num_bytes: int, stream: cuda_api.Stream) -> None:
        gpu = self._gpu
        failure = gpu.enter(Call.FILL, queues=True)
        own = own_stream(gpu, stream, Call.FILL)

        def run() -> None:
            gpu.device_view(address, num_bytes, Call.FILL)[:] = byte

        gpu.device_view(address, num_bytes, Call.FILL)
        own.put(run, failure)

    def begin_capture(self, stream: cuda_api.Stream) -> None:
        self._gpu.enter(Call.BEGIN_CAPTURE)
        own = own_stream(self._gpu, stream, Call.BEGIN_CAPTURE)
        if own.recorded is not None:
            raise CudaError("cuStreamBeginCapture failed: the stream is captured already")
        own.recorded, own.owner = [], threading.get_ident()
        self._gpu.capturing[own.owner] = own

    def end_capture(self, stream: cuda_api.Stream) -> cuda_api.Graph:
        self._gpu.enter(Call.END_CAPTURE)
        own = own_stream(self._gpu, stream, Call.END_CAPTURE)
        if own.recorded is None or own.owner != threading.get_ident():
            raise CudaError("cuStreamEndCapture failed: this thread does not capture the stream")
        tasks, own.recorded = own.recorded, None
        valid = self._gpu.capturing.pop(own.owner, None) is own
        if not valid:
            raise CudaError(
                "cuStreamEndCapture failed: operation failed due to a previous error during capture"
            )
        return HostGraph(self._gpu, tasks)

    def close(self) -> None:
        with self._gpu.lock:
            if not self._open:
                return
            if self._num_active:
                raise CudaError(f"the device is closed while it is active {self._num_active} times")
            self._open = False
            self._gpu.num_retained -= 1

    # For tests alone.

    @property
    def num_calls(self) -> Counter[Call]:
        """How often each call was made on this GPU."""
        return self._gpu.num_calls

    def fail(self, call: Call, failure: Failure, nth: int = 1) -> None:
        """Let the nth call from now of a kind fail."""
        self._gpu.fail(call, failure, nth)

    def lose(self) -> None:
        """Lose the GPU now: every later call fails."""
        self._gpu.lose(Failure.DEVICE_LOST.value)


class StandInCuda:
    """GPUs on host memory, as `engines.cuda_api.Cuda`, with what tests need besides."""

    def __init__(self, *, total_bytes: int = 1 << 30, num_devices: int = 1, lazy: bool = False) -> None:
        self._gpus = [Gpu(index, total_bytes) for index in range(num_devices)]
        self._lazy = lazy

    def open_device(self, index: int) -> StandInDevice:
        if not 0 <= index < len(self._gpus):
            raise CudaError(f"there is no GPU {index}; there are {len(self._gpus)}")
        return StandInDevice(self._gpus[index], lazy=self._lazy)

    def leaks(self) -> list[str]:
        """What is not closed: objects, captures, and devices."""
        found: list[str] = []
        for gpu in self._gpus:
            found += [what for _, what in gpu.live.values()]
            found += [f"capture of stream {stream.handle:#x}" for stream in gpu.capturing.values()]
            found += [f"device {gpu.index}"] * gpu.num_retained
        return found

    # For the stand-in of a library that launches kernels.

    def enqueue(self, handle: int, task: Callable[[], None], name: str) -> None:
        """Queue a call on the stream with that handle, on the calling thread's device.

        What it raises stays as a launch failure. In a captured stream it is called at each launch of the
        graph.
        """
        if handle == 0:
            raise CudaError(f"{name} was queued on the default stream")
        stream = self._stream(handle, name)
        failure = stream.gpu.enter(Call.ENQUEUE, queues=True)
        stream.put(task, failure)

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Device memory as an array, for use while a task runs.

        Raises:
            CudaError: not all of it is in one live allocation.

        """
        for gpu in self._gpus:
            try:
                return gpu.device_view(address, num_bytes, Call.ENQUEUE)
            except CudaError:
                continue
        raise CudaError(f"an illegal memory access was encountered: {num_bytes} bytes at {address:#x}")

    def is_captured(self, handle: int) -> bool:
        """Whether the stream with that handle is captured now."""
        return self._stream(handle, "cuStreamIsCapturing").recorded is not None

    def take(self, num_bytes: int, what: str) -> Callable[[], None]:
        """Allocate memory of the calling thread's device for a library; returns what frees it.

        Raises:
            CudaError: there is no context or not as much memory, or the device is lost.

        """
        gpu = next((gpu for gpu in self._gpus if gpu.is_current), self._gpus[0])
        gpu.enter(Call.ALLOCATE)
        refuse_in_capture(gpu, Call.ALLOCATE)
        address = gpu.take(num_bytes)
        number = gpu.open(self, f"{num_bytes} bytes of device memory for {what}")

        def free() -> None:
            if gpu.closed(number):
                gpu.give_back(address)

        return free

    def _stream(self, handle: int, name: str) -> HostStream:
        for gpu in self._gpus:
            with gpu.lock:
                for thing, _ in gpu.live.values():
                    if isinstance(thing, HostStream) and thing.handle == handle:
                        return thing
        raise CudaError(f"{name} was queued on {handle:#x}, which is no live stream: invalid resource handle")


def _host_range(array: NDArray[Any]) -> tuple[int, int]:
    """Address and size of a host array that can be copied."""
    if not array.flags.c_contiguous:
        raise CudaError("the host array is not contiguous")
    return int(array.ctypes.data), array.nbytes
