"""What a device of the CUDA stand-in makes: streams, events, memory, pinned arrays and graphs."""

import itertools
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines import cuda_api
from engines.cuda_api import CudaDeviceLostError, CudaError
from tests.standins.cuda_gpu import Call, Failure, Gpu
from tests.standins.cuda_queue import Queue, Task

_handles = itertools.count(0x5000_0000, 0x10)


class HostStream:
    """A stream: a queue with a handle, or what is captured of it."""

    def __init__(self, gpu: Gpu, *, lazy: bool) -> None:
        self.gpu = gpu
        self._handle = next(_handles)
        self.number = gpu.open(self, f"stream {self._handle:#x}")
        self.queue = Queue(gpu.run, lazy=lazy)
        self.recorded: list[Task] | None = None
        """The work captured so far, while it is captured."""
        self.owner = 0
        """The thread that captures it."""

    @property
    def handle(self) -> int:
        return self._handle

    def put(self, task: Task, failure: Failure | None = None) -> int | None:
        """Queue or capture a task, failing when it runs if so wanted; which one it is if it was queued."""
        if failure is not None:
            task = _failing(failure)
        if self.recorded is None:
            return self.queue.put(task)
        if self.owner != threading.get_ident():
            raise CudaError("operation not permitted when stream is capturing: another thread captures it")
        self.recorded.append(task)
        return None

    def synchronize(self) -> None:
        try:
            self.gpu.enter(Call.STREAM_SYNCHRONIZE)
        except CudaDeviceLostError:
            self.queue.wait()  # Nothing more is begun, but what runs uses memory that is freed next.
            raise
        _require_live(self.gpu, self.number, Call.STREAM_SYNCHRONIZE)
        refuse_in_capture(self.gpu, Call.STREAM_SYNCHRONIZE)
        self.queue.wait()
        self.gpu.raise_lost(Call.STREAM_SYNCHRONIZE)

    def close(self) -> None:
        if self.number in self.gpu.live:
            self.gpu.enter_close(Call.STREAM_DESTROY)
            self.gpu.closed(self.number)
            self.queue.close()


class HostEvent:
    """A mark in a stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._number = gpu.open(self, "event")
        self._mark: tuple[HostStream, int | None] | None = None

    def record(self, stream: cuda_api.Stream) -> None:
        failure = self._gpu.enter(Call.RECORD, queues=True)
        _require_live(self._gpu, self._number, Call.RECORD)
        own = own_stream(self._gpu, stream, Call.RECORD)
        self._mark = own, own.put(_nothing, failure)

    def synchronize(self) -> None:
        self._gpu.enter(Call.EVENT_SYNCHRONIZE)
        _require_live(self._gpu, self._number, Call.EVENT_SYNCHRONIZE)
        refuse_in_capture(self._gpu, Call.EVENT_SYNCHRONIZE)
        if self._mark is not None:  # One that was never recorded counts as reached.
            stream, number = self._mark
            if number is None:
                raise CudaError(
                    "cuEventSynchronize failed: operation not permitted on an event last recorded in a "
                    "capturing stream"
                )
            stream.queue.wait(number)
        self._gpu.raise_lost(Call.EVENT_SYNCHRONIZE)

    def close(self) -> None:
        if self._number in self._gpu.live:
            self._gpu.enter_close(Call.EVENT_DESTROY)
            self._gpu.closed(self._number)


class HostDeviceMemory:
    """Memory of the device: garbage at first."""

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self._gpu = gpu
        self._address = gpu.take(num_bytes)
        self._num_bytes = num_bytes
        self._number = gpu.open(self, f"{num_bytes} bytes of device memory")

    @property
    def address(self) -> int:
        return self._address

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def close(self) -> None:
        if self._number in self._gpu.live:
            self._gpu.enter_close(Call.FREE)
            self._gpu.closed(self._number)
            self._gpu.give_back(self._address)


class HostPinnedArray:
    """Host memory that copies take."""

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._gpu = gpu
        self._array = np.zeros(shape, dtype)
        gpu.pin(self._array.reshape(-1).view(np.uint8))
        self._number = gpu.open(self, f"pinned array {shape} of {self._array.dtype}")

    @property
    def array(self) -> NDArray[Any]:
        if self._number not in self._gpu.live:
            raise AssertionError("a pinned array was used after it was closed")
        return self._array

    def close(self) -> None:
        if self._number in self._gpu.live:
            self._gpu.enter_close(Call.PINNED_FREE)
            self._gpu.closed(self._number)
            self._gpu.unpin(self._array.ctypes.data)


class HostGraph:
    """What was captured, run at each launch."""

    def __init__(self, gpu: Gpu, tasks: list[Task]) -> None:
        self._gpu = gpu
        self._tasks = tuple(tasks)
        self._number = gpu.open(self, f"graph of {len(tasks)} nodes")

    def launch(self, stream: cuda_api.Stream) -> None:
        failure = self._gpu.enter(Call.LAUNCH, queues=True)
        _require_live(self._gpu, self._number, Call.LAUNCH)
        own = own_stream(self._gpu, stream, Call.LAUNCH)
        own.put(self._run, failure)

    def _run(self) -> None:
        for task in self._tasks:
            task()

    def close(self) -> None:
        if self._number in self._gpu.live:
            self._gpu.enter_close(Call.GRAPH_DESTROY)
            self._gpu.closed(self._number)


def _nothing() -> None:
    """Mark a place in a queue."""


def _failing(failure: Failure) -> Task:
    def fail() -> None:
        raise CudaError(failure.value)

    return fail


def own_stream(gpu: Gpu, stream: cuda_api.Stream, call: Call) -> HostStream:
    """Check that a stream is a live one of this GPU."""
    if isinstance(stream, HostStream) and stream.gpu is gpu and stream.number in gpu.live:
        return stream
    raise CudaError(f"{call.value} failed: invalid resource handle: no live stream of this device")


def _require_live(gpu: Gpu, number: int, call: Call) -> None:
    if number not in gpu.live:
        raise CudaError(f"{call.value} failed: invalid resource handle: it is closed")


def refuse_in_capture(gpu: Gpu, call: Call) -> None:
    """Refuse what a capturing thread may not do; as with CUDA, the capture is worth nothing afterwards."""
    if gpu.capturing.pop(threading.get_ident(), None) is not None:
        raise CudaError(f"{call.value} failed: operation not permitted when stream is capturing")
