"""The CUDA stand-in has CUDA's rules, or what runs over it proves nothing."""

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest

from engines import cuda_api
from engines.api import DeviceLostError, OutOfMemoryError
from engines.cuda_api import CudaDeviceLostError, CudaError, CudaOutOfMemoryError
from tests.standins.cuda import Call, Failure, StandInCuda, StandInDevice


class Closable(Protocol):
    def close(self) -> None: ...


@pytest.fixture
def cuda() -> StandInCuda:
    return StandInCuda(total_bytes=1 << 16)


@pytest.fixture
def device(cuda: StandInCuda) -> Iterator[StandInDevice]:
    device = cuda.open_device(0)
    with device.activate():
        yield device


@pytest.fixture
def lazy() -> Iterator[StandInDevice]:
    """A device whose streams run when something waits for them."""
    device = StandInCuda(total_bytes=1 << 16, lazy=True).open_device(0)
    with device.activate():
        yield device


def _as_protocol(cuda: StandInCuda) -> cuda_api.Cuda:
    return cuda  # For the type checker: the stand-in has every method, argument and type of the seam.


def _read(device: StandInDevice, address: int, num_bytes: int) -> bytes:
    stream, target = device.stream(), device.pinned((num_bytes,), np.uint8)
    device.copy_out(target.array, address, stream)
    stream.synchronize()
    return target.array.tobytes()


def _ignore(_: object) -> None:
    """Make a statement of an expression."""


def test_what_is_copied_in_comes_out(device: StandInDevice) -> None:
    stream, memory, other = device.stream(), device.allocate(64), device.allocate(64)
    source, target = device.pinned((2, 4), np.float32), device.pinned((2, 4), np.float32)
    source.array[:] = np.arange(8).reshape(2, 4)
    device.fill(other.address, 0, 64, stream)
    device.copy_in(memory.address, source.array, stream)
    device.copy(other.address + 16, memory.address, 16, stream)
    device.copy_out(target.array, other.address, stream)
    stream.synchronize()
    assert target.array.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]


def test_device_memory_is_aligned_and_begins_as_garbage(device: StandInDevice) -> None:
    memories = [device.allocate(num_bytes) for num_bytes in (1, 3, 300)]
    assert all(memory.address % 256 == 0 for memory in memories)
    assert _read(device, memories[2].address, 300) == b"\xcd" * 300


def test_a_call_without_the_context_names_itself(cuda: StandInCuda) -> None:
    device = cuda.open_device(0)
    with device.activate():
        stream, memory = device.stream(), device.allocate(16)
    with pytest.raises(CudaError, match=r"^cuMemAlloc failed: invalid device context$"):
        device.allocate(16)
    with pytest.raises(CudaError, match="cuStreamSynchronize failed: invalid device context"):
        stream.synchronize()
    with pytest.raises(CudaError, match="cuMemFree failed: invalid device context"):
        memory.close()


def test_a_context_is_current_on_one_thread(device: StandInDevice) -> None:
    errors: list[str] = []

    def allocate() -> None:
        try:
            device.allocate(16)
        except CudaError as error:
            errors.append(str(error))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert errors == ["cuMemAlloc failed: invalid device context"]


def test_only_the_innermost_device_is_current() -> None:
    cuda = StandInCuda(num_devices=2)
    outer, inner = cuda.open_device(0), cuda.open_device(1)
    with outer.activate():
        with inner.activate(), pytest.raises(CudaError, match="invalid device context"):
            outer.stream()
        outer.stream().close()


def test_a_device_that_is_not_there_is_refused(cuda: StandInCuda) -> None:
    with pytest.raises(CudaError, match="there is no GPU 1; there are 1"):
        cuda.open_device(1)


def test_memory_has_an_end(device: StandInDevice) -> None:
    memory = device.allocate(40_000)
    assert device.memory_info() == ((1 << 16) - 40_192, 1 << 16)
    with pytest.raises(CudaOutOfMemoryError, match="cuMemAlloc failed: out of memory") as caught:
        device.allocate(40_000)
    assert isinstance(caught.value, OutOfMemoryError)
    memory.close()
    memory.close()
    device.allocate(40_000)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 8), (0, 65), (60, 8), (64, 1)])
def test_a_copy_beyond_an_allocation_is_refused(device: StandInDevice, offset: int, num_bytes: int) -> None:
    stream, memory = device.stream(), device.allocate(64)
    host = device.pinned((num_bytes,), np.uint8)
    with pytest.raises(CudaError, match=r"no device memory holds the \d+ bytes at 0x"):
        device.copy_in(memory.address + offset, host.array, stream)
    with pytest.raises(CudaError, match="no device memory"):
        device.fill(memory.address + offset, 0, num_bytes, stream)


def test_a_copy_from_freed_memory_is_refused(device: StandInDevice) -> None:
    stream, memory, host = device.stream(), device.allocate(64), device.pinned((8,), np.uint8)
    memory.close()
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync failed: no device memory"):
        device.copy_out(host.array, memory.address, stream)


def test_memory_freed_before_its_copy_ran_loses_the_device(lazy: StandInDevice) -> None:
    stream, memory, host = lazy.stream(), lazy.allocate(64), lazy.pinned((8,), np.uint8)
    lazy.copy_out(host.array, memory.address, stream)
    memory.close()
    with pytest.raises(CudaDeviceLostError, match="no device memory"):
        stream.synchronize()


def test_overlapping_copies_are_refused(device: StandInDevice) -> None:
    stream, memory = device.stream(), device.allocate(64)
    with pytest.raises(CudaError, match="overlap"):
        device.copy(memory.address, memory.address + 8, 16, stream)


def test_arrays_that_are_not_pinned_or_not_contiguous_are_refused(device: StandInDevice) -> None:
    stream, memory, pinned = device.stream(), device.allocate(64), device.pinned((4, 4), np.uint8)
    with pytest.raises(CudaError, match="no pinned memory"):
        device.copy_in(memory.address, np.zeros(8, np.uint8), stream)
    with pytest.raises(CudaError, match="not contiguous"):
        device.copy_in(memory.address, pinned.array[:, :2], stream)
    device.copy_in(memory.address, pinned.array[1:3], stream)


def test_a_host_buffer_rewritten_before_its_copy_ran_shows(lazy: StandInDevice) -> None:
    stream, memory, host = lazy.stream(), lazy.allocate(8), lazy.pinned((8,), np.uint8)
    host.array[:] = 1
    lazy.copy_in(memory.address, host.array, stream)
    host.array[:] = 2  # Too early: nothing has waited for the copy.
    stream.synchronize()
    assert _read(lazy, memory.address, 8) == b"\x02" * 8


def test_an_event_waits_for_what_is_before_it_alone(lazy: StandInDevice) -> None:
    stream, event = lazy.stream(), lazy.event()
    first, second = lazy.pinned((1,), np.uint8), lazy.pinned((1,), np.uint8)
    memory = lazy.allocate(1)
    event.synchronize()  # Never recorded: reached.
    lazy.copy_out(first.array, memory.address, stream)
    event.record(stream)
    lazy.copy_out(second.array, memory.address, stream)
    event.synchronize()
    assert (first.array[0], second.array[0]) == (0xCD, 0)


def test_streams_do_not_wait_for_each_other(cuda: StandInCuda, device: StandInDevice) -> None:
    blocked, free, gate = device.stream(), device.stream(), threading.Event()
    cuda.enqueue(blocked.handle, lambda: _ignore(gate.wait()), "a kernel")
    ran: list[int] = []
    cuda.enqueue(free.handle, lambda: ran.append(1), "a kernel")
    free.synchronize()
    assert ran == [1]
    gate.set()
    blocked.synchronize()


def test_an_out_of_memory_is_over_when_it_is_over(device: StandInDevice) -> None:
    device.fail(Call.ALLOCATE, Failure.OUT_OF_MEMORY, nth=2)
    device.allocate(16)
    with pytest.raises(CudaOutOfMemoryError):
        device.allocate(16)
    device.allocate(16)


def test_a_failed_launch_shows_at_the_next_call_and_stays(cuda: StandInCuda, device: StandInDevice) -> None:
    stream, event = device.stream(), device.event()
    device.fail(Call.ENQUEUE, Failure.LAUNCH_FAILED)
    cuda.enqueue(stream.handle, lambda: None, "a kernel")
    event_after: list[int] = []
    with pytest.raises(CudaDeviceLostError, match="cuStreamSynchronize failed: unspecified launch failure"):
        stream.synchronize()
    for call in (device.stream, device.memory_info, lambda: device.allocate(8), event.synchronize):
        with pytest.raises(CudaDeviceLostError, match="unspecified launch failure"):
            call()
    with pytest.raises(DeviceLostError):
        cuda.enqueue(stream.handle, lambda: event_after.append(1), "a kernel")
    stream.close()
    event.close()
    assert event_after == []


def test_a_kernel_that_raises_loses_the_device_and_its_error_is_the_cause(
    cuda: StandInCuda, device: StandInDevice
) -> None:
    stream = device.stream()
    cuda.enqueue(stream.handle, lambda: _ignore(cuda.view(64, 1)), "a kernel")
    with pytest.raises(CudaDeviceLostError, match="illegal memory access") as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, CudaError)


def test_a_lost_device_fails_every_call_of_every_thread(cuda: StandInCuda, device: StandInDevice) -> None:
    device.fail(Call.COPY, Failure.DEVICE_LOST)
    stream, memory = device.stream(), device.allocate(64)
    with pytest.raises(CudaDeviceLostError, match="cuMemcpyDtoDAsync failed: uncorrectable ECC"):
        device.copy(memory.address, memory.address + 32, 8, stream)
    again = cuda.open_device(0)
    with again.activate(), pytest.raises(CudaDeviceLostError, match="cuMemGetInfo"):
        again.memory_info()


def test_the_default_stream_and_unknown_ones_are_refused(cuda: StandInCuda, device: StandInDevice) -> None:
    stream = device.stream()
    stream.close()
    with pytest.raises(CudaError, match="default stream"):
        cuda.enqueue(0, lambda: None, "a kernel")
    for handle in (1, stream.handle):
        with pytest.raises(CudaError, match="no live stream"):
            cuda.enqueue(handle, lambda: None, "a kernel")
    with pytest.raises(CudaError, match="invalid resource handle"):
        device.event().record(stream)


def test_a_kernel_sees_the_memory_that_copies_see(cuda: StandInCuda, device: StandInDevice) -> None:
    stream, memory = device.stream(), device.allocate(64)
    device.fill(memory.address, 3, 64, stream)

    def double() -> None:
        cuda.view(memory.address + 32, 32)[:] *= 2

    cuda.enqueue(stream.handle, double, "a kernel")
    stream.synchronize()
    assert _read(device, memory.address, 64) == b"\x03" * 32 + b"\x06" * 32


def test_a_captured_graph_runs_at_each_launch_and_not_before(
    cuda: StandInCuda, device: StandInDevice
) -> None:
    stream, memory, host = device.stream(), device.allocate(1), device.pinned((1,), np.uint8)
    device.fill(memory.address, 1, 1, stream)
    device.begin_capture(stream)

    def increment() -> None:
        cuda.view(memory.address, 1)[:] += 1

    cuda.enqueue(stream.handle, increment, "a kernel")
    device.copy_out(host.array, memory.address, stream)
    graph = device.end_capture(stream)
    stream.synchronize()
    assert host.array[0] == 0
    for expected in (2, 3):
        graph.launch(stream)
        stream.synchronize()
        assert host.array[0] == expected
    graph.close()
    graph.close()
    with pytest.raises(CudaError, match="cuGraphLaunch failed: invalid resource handle"):
        graph.launch(stream)


def test_a_thread_that_captures_may_not_wait_or_allocate(device: StandInDevice) -> None:
    stream, event = device.stream(), device.event()
    event.record(stream)
    for call in (
        stream.synchronize,
        event.synchronize,
        lambda: device.allocate(8),
        lambda: device.pinned((1,), np.uint8),
    ):
        device.begin_capture(stream)
        with pytest.raises(CudaError, match="not permitted when stream is capturing"):
            call()
        with pytest.raises(CudaError, match="previous error during capture"):
            device.end_capture(stream)


def test_an_event_recorded_in_a_capture_cannot_be_waited_for(device: StandInDevice) -> None:
    stream, event = device.stream(), device.event()
    device.begin_capture(stream)
    event.record(stream)
    device.end_capture(stream).close()
    with pytest.raises(CudaError, match="last recorded in a capturing stream"):
        event.synchronize()


def test_what_is_not_closed_is_named(cuda: StandInCuda) -> None:
    device = cuda.open_device(0)
    with device.activate():
        first = device.stream()
        things: list[Closable] = [
            first,
            device.event(),
            device.allocate(16),
            device.pinned((2, 3), np.float16),
        ]
        device.begin_capture(stream := device.stream())
        things += [stream, device.end_capture(stream)]
    assert cuda.leaks() == [
        f"stream {first.handle:#x}",
        "event",
        "16 bytes of device memory",
        "pinned array (2, 3) of float16",
        f"stream {stream.handle:#x}",
        "graph of 0 nodes",
        "device 0",
    ]
    with device.activate():
        for thing in things:
            thing.close()
            thing.close()
    device.close()
    device.close()
    assert cuda.leaks() == []


def test_a_closed_device_cannot_be_activated(cuda: StandInCuda) -> None:
    first, second = cuda.open_device(0), cuda.open_device(0)
    first.close()
    with pytest.raises(CudaError, match="context is destroyed"), first.activate():
        pass
    with second.activate():
        second.memory_info()


def test_a_device_is_not_closed_while_it_is_active(cuda: StandInCuda) -> None:
    device = cuda.open_device(0)
    with device.activate(), pytest.raises(CudaError, match="active 1 times"):
        device.close()
    device.close()
    assert cuda.leaks() == []


def test_calls_are_counted(device: StandInDevice) -> None:
    stream, memory = device.stream(), device.allocate(8)
    device.fill(memory.address, 0, 8, stream)
    device.fill(memory.address, 1, 8, stream)
    assert (device.num_calls[Call.FILL], device.num_calls[Call.COPY]) == (2, 0)
