"""One GPU of the stand-in: its memory, live objects, errors that stay, and failures to come."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cuda_api import CudaDeviceLostError, CudaError, CudaOutOfMemoryError

ALIGNMENT = 256
FRESH_BYTE, FREED_BYTE = 0xCD, 0xDD


class Call(Enum):
    """Every call that needs a context, by CUDA's name for it."""

    MEMORY_INFO = "cuMemGetInfo"
    STREAM = "cuStreamCreate"
    STREAM_SYNCHRONIZE = "cuStreamSynchronize"
    STREAM_DESTROY = "cuStreamDestroy"
    EVENT = "cuEventCreate"
    RECORD = "cuEventRecord"
    EVENT_SYNCHRONIZE = "cuEventSynchronize"
    EVENT_DESTROY = "cuEventDestroy"
    ALLOCATE = "cuMemAlloc"
    FREE = "cuMemFree"
    PINNED = "cuMemHostAlloc"
    PINNED_FREE = "cuMemFreeHost"
    COPY_IN = "cuMemcpyHtoDAsync"
    COPY_OUT = "cuMemcpyDtoHAsync"
    COPY = "cuMemcpyDtoDAsync"
    FILL = "cuMemsetD8Async"
    ENQUEUE = "cuLaunchKernel"
    BEGIN_CAPTURE = "cuStreamBeginCapture"
    END_CAPTURE = "cuStreamEndCapture"
    LAUNCH = "cuGraphLaunch"
    GRAPH_DESTROY = "cuGraphExecDestroy"


class Failure(Enum):
    """What a call can be told to fail with, by CUDA's words for it."""

    OUT_OF_MEMORY = "out of memory"
    """The call raises; nothing else is affected."""
    INVALID_VALUE = "invalid argument"
    """The call raises; nothing else is affected."""
    LAUNCH_FAILED = "unspecified launch failure"
    """Queued work fails when it runs; from then on every call raises. Other calls raise at once."""
    DEVICE_LOST = "uncorrectable ECC error encountered"
    """The call and every later one raise."""


STAYING = frozenset({Failure.LAUNCH_FAILED, Failure.DEVICE_LOST})


class _Contexts(threading.local):
    """The contexts pushed on each thread, the current one last."""

    def __init__(self) -> None:
        self.stack: list[Gpu] = []


_contexts = _Contexts()


class Gpu:
    """One GPU and its primary context, shared by everything that retains it. Safe from any thread."""

    def __init__(self, index: int, total_bytes: int) -> None:
        self.index = index
        self.lock = threading.RLock()
        self.num_calls: Counter[Call] = Counter()
        self.num_retained = 0
        self.live: dict[int, tuple[object, str]] = {}
        """By id: objects that wait to be closed, and what they are."""
        self.capturing: dict[int, Any] = {}
        """By thread: the stream that it captures."""
        self._lost: tuple[str, BaseException | None] | None = None
        self._faults: list[tuple[Call, int, Failure]] = []
        self._total_bytes = total_bytes
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._pinned: dict[int, NDArray[np.uint8]] = {}
        self._ids = itertools.count(1)

    # Contexts, errors and faults.

    def push(self) -> None:
        _contexts.stack.append(self)

    def pop(self) -> None:
        popped = _contexts.stack.pop()
        assert popped is self, "contexts were not popped in the order of their pushes"

    def _require_current(self, call: Call) -> None:
        if not _contexts.stack or _contexts.stack[-1] is not self:
            raise CudaError(f"{call.value} failed: invalid device context")

    @property
    def is_current(self) -> bool:
        """Whether the calling thread has its context."""
        return bool(_contexts.stack) and _contexts.stack[-1] is self

    def enter(self, call: Call, *, queues: bool = False) -> Failure | None:
        """Count a call, refuse it if CUDA would, and return the failure that its queued work is to have."""
        with self.lock:
            self.num_calls[call] += 1
            self._require_current(call)
            self.raise_lost(call)
            failure = self._take_fault(call)
        if failure is None or (failure is Failure.LAUNCH_FAILED and queues):
            return failure
        if failure in STAYING:
            self.lose(failure.value)
            self.raise_lost(call)
        kind = CudaOutOfMemoryError if failure is Failure.OUT_OF_MEMORY else CudaError
        raise kind(f"{call.value} failed: {failure.value}")

    def enter_close(self, call: Call) -> None:
        """Count a call that frees: it needs the context, and never fails for an earlier error."""
        with self.lock:
            self.num_calls[call] += 1
            self._require_current(call)

    def raise_lost(self, call: Call) -> None:
        with self.lock:
            if self._lost is not None:
                words, cause = self._lost
                raise CudaDeviceLostError(f"{call.value} failed: {words}") from cause

    def lose(self, words: str, cause: BaseException | None = None) -> None:
        """Make an error the one that every later call raises, if it is the first."""
        with self.lock:
            self._lost = self._lost or (words, cause)

    def fail(self, call: Call, failure: Failure, nth: int) -> None:
        with self.lock:
            self._faults.append((call, self.num_calls[call] + nth, failure))

    def _take_fault(self, call: Call) -> Failure | None:
        for fault in self._faults:
            if fault[:2] == (call, self.num_calls[call]):
                self._faults.remove(fault)
                return fault[2]
        return None

    def run(self, task: Callable[[], None]) -> None:
        """Run a stream's task on the stream's thread: an error is one that stays."""
        if self._lost is None:
            try:
                task()
            except BaseException as error:
                self.lose(str(error) or Failure.LAUNCH_FAILED.value, error)

    # Live objects.

    def open(self, thing: object, what: str) -> int:
        with self.lock:
            number = next(self._ids)
            self.live[number] = (thing, what)
            return number

    def closed(self, number: int) -> bool:
        """Forget a live object; False says that it was closed before."""
        with self.lock:
            return self.live.pop(number, None) is not None

    # Memory.

    def free_bytes(self) -> tuple[int, int]:
        with self.lock:
            used = sum(len(memory) + -len(memory) % ALIGNMENT for memory in self._memory.values())
            return self._total_bytes - used, self._total_bytes

    def take(self, num_bytes: int) -> int:
        """Allocate device memory full of garbage; its address."""
        with self.lock:
            if num_bytes > self.free_bytes()[0]:
                raise CudaOutOfMemoryError(f"{Call.ALLOCATE.value} failed: out of memory")
            raw = np.full(num_bytes + ALIGNMENT, FRESH_BYTE, np.uint8)
            begin = -raw.ctypes.data % ALIGNMENT
            memory = raw[begin : begin + num_bytes]
            self._memory[memory.ctypes.data] = memory
            return int(memory.ctypes.data)

    def give_back(self, address: int) -> None:
        with self.lock:
            self._memory.pop(address)[:] = FREED_BYTE

    def pin(self, memory: NDArray[np.uint8]) -> None:
        with self.lock:
            self._pinned[memory.ctypes.data] = memory

    def unpin(self, address: int) -> None:
        with self.lock:
            self._pinned.pop(address)[:] = FREED_BYTE

    def device_view(self, address: int, num_bytes: int, call: Call) -> NDArray[np.uint8]:
        return self._view(self._memory, address, num_bytes, f"{call.value} failed: no device memory")

    def pinned_view(self, address: int, num_bytes: int, call: Call) -> NDArray[np.uint8]:
        return self._view(self._pinned, address, num_bytes, f"{call.value} failed: no pinned memory")

    def _view(
        self, memories: dict[int, NDArray[np.uint8]], address: int, num_bytes: int, what: str
    ) -> NDArray[np.uint8]:
        with self.lock:
            for begin, memory in memories.items():
                if begin <= address and address + num_bytes <= begin + len(memory):
                    return memory[address - begin : address - begin + num_bytes]
        raise CudaError(f"{what} holds the {num_bytes} bytes at {address:#x}")
