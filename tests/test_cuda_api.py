"""What the CUDA seam promises, of whichever implementation the rig has."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import ml_dtypes
import numpy as np
import psutil
import pytest

from engines import cuda_api
from engines.cuda_api import CudaDeviceLostError, CudaError, CudaOutOfMemoryError
from tests.standins.cuda_gpu import Call, Failure
from tests.standins.cuda_rig import CudaRig, RigDevice, make_cuda_rig

_TOTAL_BYTES = 1 << 20


@pytest.fixture
def rig() -> CudaRig:
    return make_cuda_rig(_TOTAL_BYTES)


@pytest.fixture
def device(rig: CudaRig) -> Iterator[RigDevice]:
    """A device that is active on the test's thread, and closed after it."""
    device = rig.open_device(0)
    with device.activate():
        yield device
    device.close()


class Desk:
    """A stream with an event, some device memory and a pinned array, closed in order."""

    def __init__(self, device: RigDevice, num_bytes: int = 1024) -> None:
        self.device = device
        self.stream = device.stream()
        self.event = device.event()
        self.memory = device.allocate(num_bytes)
        self.host = device.pinned((num_bytes,), np.uint8)

    def read(self, address: int, num_bytes: int) -> bytes:
        self.device.copy_out(self.host.array[:num_bytes], address, self.stream)
        self.event.record(self.stream)
        self.event.synchronize()
        return self.host.array[:num_bytes].tobytes()

    def close(self) -> None:
        with suppress(CudaDeviceLostError):
            self.stream.synchronize()  # Nothing may use what is freed.
        for thing in (self.host, self.memory, self.event, self.stream):
            thing.close()
            thing.close()


@pytest.fixture
def desk(rig: CudaRig, device: RigDevice) -> Iterator[Desk]:
    desk = Desk(device)
    yield desk
    desk.close()
    assert [leak for leak in rig.leaks() if "device" not in leak] == []


def on_thread(function: Callable[[], None]) -> BaseException | None:
    """Run a function on a thread of its own; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def _until(gate: threading.Event) -> Callable[[], None]:
    """A kernel that runs until the gate is open."""

    def wait() -> None:
        gate.wait()

    return wait


def _are_protocols(rig: CudaRig, device: RigDevice) -> tuple[cuda_api.Cuda, cuda_api.Device]:
    return rig, device  # For the type checker.


def test_a_device_says_what_it_is(device: RigDevice) -> None:
    assert device.name
    assert device.compute_capability == (8, 9)
    assert device.driver_version >= 12000
    assert device.memory_info() == (_TOTAL_BYTES, _TOTAL_BYTES)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(rig: CudaRig) -> None:
    with pytest.raises(CudaError, match="there is no GPU 7; there are"):
        rig.open_device(7)


def test_copies_come_back(desk: Desk) -> None:
    device, stream, address = desk.device, desk.stream, desk.memory.address
    desk.host.array[:8] = np.arange(8)
    device.fill(address, 7, 1024, stream)
    device.copy_in(address, desk.host.array[:8], stream)
    device.copy(address + 512, address + 4, 4, stream)
    assert desk.read(address, 10) == bytes(range(8)) + b"\x07\x07"
    assert desk.read(address + 512, 6) == bytes((4, 5, 6, 7, 7, 7))


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float16, ml_dtypes.bfloat16, np.bool_])
def test_arrays_of_every_type_are_copied(desk: Desk, dtype: type) -> None:
    source, target = desk.device.pinned((3, 5), dtype), desk.device.pinned((3, 5), dtype)
    assert not target.array.astype(np.float32).any()
    source.array[:] = np.arange(15).reshape(3, 5).astype(dtype)
    desk.device.copy_in(desk.memory.address, source.array, desk.stream)
    desk.device.copy_out(target.array, desk.memory.address, desk.stream)
    desk.stream.synchronize()
    assert target.array.tobytes() == source.array.tobytes()
    assert target.array.dtype == np.dtype(dtype)
    source.close()
    target.close()


def test_addresses_are_aligned_and_sizes_as_asked(device: RigDevice) -> None:
    memories = [device.allocate(num_bytes) for num_bytes in (1, 257, 4096)]
    assert [memory.num_bytes for memory in memories] == [1, 257, 4096]
    assert all(memory.address % 256 == 0 for memory in memories)
    for memory in memories:
        memory.close()


def test_arrays_that_are_not_contiguous_or_not_pinned_are_refused(desk: Desk) -> None:
    square = desk.host.array.reshape(32, 32)
    for array in (square[:, :4], square.T, np.zeros(8, np.uint8)):
        with pytest.raises(CudaError):
            desk.device.copy_in(desk.memory.address, array, desk.stream)
        with pytest.raises(CudaError):
            desk.device.copy_out(array, desk.memory.address, desk.stream)


def test_copies_out_of_bounds_or_over_themselves_are_refused(desk: Desk) -> None:
    device, stream, address = desk.device, desk.stream, desk.memory.address
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync failed"):
        device.copy_in(address + 1, desk.host.array, stream)
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync failed"):
        device.copy_out(desk.host.array, address - 1, stream)
    with pytest.raises(CudaError, match="cuMemsetD8Async failed"):
        device.fill(address, 0, 1025, stream)
    with pytest.raises(CudaError, match="cuMemcpyDtoDAsync failed"):
        device.copy(address, address + 4, 8, stream)


def test_a_call_without_the_context_is_refused_with_its_name(device: RigDevice) -> None:
    error = on_thread(lambda: device.allocate(8).close())
    assert isinstance(error, CudaError)
    assert str(error).startswith("cuMemAlloc failed: invalid device context")


def test_closing_without_the_context_is_refused_and_can_be_done_again(desk: Desk) -> None:
    for thing in (desk.host, desk.memory, desk.event, desk.stream):
        error = on_thread(thing.close)
        assert isinstance(error, CudaError)
        assert "invalid device context" in str(error)


def test_a_host_buffer_rewritten_before_its_copy_ran_shows() -> None:
    rig = make_cuda_rig(_TOTAL_BYTES, lazy=True)
    device = rig.open_device(0)
    with device.activate():
        desk = Desk(device)
        desk.host.array[:8] = 1
        device.copy_in(desk.memory.address, desk.host.array[:8], desk.stream)
        desk.event.record(desk.stream)
        device.copy_in(desk.memory.address + 8, desk.host.array[:8], desk.stream)
        desk.host.array[:8] = 2  # Too early: nothing has waited for the copies.
        desk.event.synchronize()
        desk.host.array[:8] = 3  # Too early for the second, of which the event says nothing.
        assert desk.read(desk.memory.address, 16) == b"\x02" * 8 + b"\x03" * 8
        desk.close()
    device.close()


def test_calls_are_counted(desk: Desk) -> None:
    before = desk.device.num_calls[Call.FILL]
    desk.device.fill(desk.memory.address, 0, 8, desk.stream)
    desk.device.fill(desk.memory.address, 1, 8, desk.stream)
    assert (desk.device.num_calls[Call.FILL] - before, desk.device.num_calls[Call.COPY]) == (2, 0)


def test_threads_work_at_once_each_in_the_context(rig: CudaRig, device: RigDevice) -> None:
    def work() -> None:
        with device.activate():
            desk = Desk(device)
            for value in range(50):
                desk.host.array[:] = value
                device.copy_in(desk.memory.address, desk.host.array, desk.stream)
                assert desk.read(desk.memory.address, 1024) == bytes([value]) * 1024
            desk.close()

    errors: list[BaseException | None] = []
    threads = [threading.Thread(target=lambda: errors.append(on_thread(work))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * 4
    assert len(rig.leaks()) == 1


def test_activating_nests_and_gives_back_what_was_current(rig: CudaRig, device: RigDevice) -> None:
    other = rig.open_device(1)
    with device.activate():
        with other.activate():
            other.stream().close()
        device.stream().close()
    device.stream().close()
    other.close()


def test_what_one_thread_made_another_may_use_and_close(device: RigDevice) -> None:
    desk = Desk(device)

    def use() -> None:
        with device.activate():
            device.fill(desk.memory.address, 9, 16, desk.stream)
            assert desk.read(desk.memory.address, 16) == b"\x09" * 16
            desk.close()

    assert on_thread(use) is None


def test_a_device_is_closed_by_any_thread_but_not_while_it_is_active(rig: CudaRig) -> None:
    device = rig.open_device(0)
    with device.activate(), pytest.raises(CudaError, match="active 1 times"):
        device.close()
    assert on_thread(device.close) is None
    device.close()
    assert rig.leaks() == []
    with pytest.raises(CudaError), device.activate():
        pass


def test_a_device_can_be_opened_again_and_again(rig: CudaRig) -> None:
    for _ in range(30):
        device = rig.open_device(0)
        with device.activate():
            Desk(device).close()
        device.close()
    assert rig.leaks() == []


def test_two_openings_share_a_gpu_and_the_second_outlives_the_first(rig: CudaRig) -> None:
    first, second = rig.open_device(0), rig.open_device(0)
    with first.activate():
        memory = first.allocate(_TOTAL_BYTES // 2)
        with second.activate(), pytest.raises(CudaOutOfMemoryError):
            second.allocate(_TOTAL_BYTES // 2 + 1)
        memory.close()
    first.close()
    with second.activate():
        second.allocate(_TOTAL_BYTES).close()
    second.close()
    assert rig.leaks() == []


def test_out_of_memory_passes(rig: CudaRig, desk: Desk) -> None:
    with pytest.raises(CudaOutOfMemoryError, match="cuMemAlloc failed: out of memory"):
        desk.device.allocate(_TOTAL_BYTES)
    desk.device.fail(Call.PINNED, Failure.OUT_OF_MEMORY)
    with pytest.raises(CudaOutOfMemoryError, match="cuMemHostAlloc failed: out of memory"):
        desk.device.pinned((8,), np.uint8)
    desk.device.fail(Call.ENQUEUE, Failure.OUT_OF_MEMORY)
    with pytest.raises(CudaOutOfMemoryError):
        rig.enqueue(desk.stream.handle, lambda: None, "a kernel")
    desk.device.pinned((8,), np.uint8).close()


def test_an_ordinary_error_passes(desk: Desk) -> None:
    desk.device.fail(Call.RECORD, Failure.INVALID_VALUE, nth=2)
    desk.event.record(desk.stream)
    with pytest.raises(CudaError, match="cuEventRecord failed: invalid argument"):
        desk.event.record(desk.stream)
    desk.event.record(desk.stream)
    desk.event.synchronize()


def test_an_error_that_is_kept_keeps_nothing_open(rig: CudaRig, device: RigDevice) -> None:
    desk, kept = Desk(device), []
    calls: dict[Call, Callable[[], None]] = {
        Call.EVENT_SYNCHRONIZE: desk.event.synchronize,
        Call.STREAM_SYNCHRONIZE: desk.stream.synchronize,
        Call.RECORD: lambda: desk.event.record(desk.stream),
        Call.FILL: lambda: device.fill(desk.memory.address, 0, 8, desk.stream),
    }
    for call, run in calls.items():
        device.fail(call, Failure.INVALID_VALUE)
        with pytest.raises(CudaError) as caught:
            run()
        kept.append(caught.value)
    desk.close()
    assert len(rig.leaks()) == 1


@pytest.mark.parametrize("call", [Call.ENQUEUE, Call.COPY_IN, Call.FILL, Call.RECORD])
def test_queued_work_that_fails_is_seen_when_waiting_and_stays(rig: CudaRig, call: Call) -> None:
    device = rig.open_device(0)
    with device.activate():
        desk = Desk(device)
        device.fail(call, Failure.LAUNCH_FAILED)
        try:
            rig.enqueue(desk.stream.handle, lambda: None, "a kernel")
            device.copy_in(desk.memory.address, desk.host.array, desk.stream)
            device.fill(desk.memory.address, 0, 8, desk.stream)
            desk.event.record(desk.stream)
        except CudaDeviceLostError:
            pass  # The stream was quicker.
        for wait in (desk.event.synchronize, desk.stream.synchronize):
            with pytest.raises(CudaDeviceLostError, match="unspecified launch failure"):
                wait()
        with pytest.raises(CudaDeviceLostError, match="cuStreamCreate failed: unspecified launch failure"):
            device.stream()
        desk.close()
    device.close()


def test_a_lost_device_fails_every_call_of_every_thread_and_can_be_closed(rig: CudaRig) -> None:
    device = rig.open_device(0)
    with device.activate():
        desk = Desk(device)
        device.fail(Call.MEMORY_INFO, Failure.DEVICE_LOST)
        with pytest.raises(CudaDeviceLostError, match="cuMemGetInfo failed: uncorrectable ECC"):
            device.memory_info()

        def allocate() -> None:
            with device.activate():
                device.allocate(8)

        assert isinstance(on_thread(allocate), CudaDeviceLostError)
        desk.close()
    device.close()
    assert rig.leaks() == []


def test_a_wait_lets_other_threads_run(rig: CudaRig, desk: Desk) -> None:
    gate = threading.Event()
    rig.enqueue(desk.stream.handle, _until(gate), "a kernel")
    desk.event.record(desk.stream)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    desk.event.synchronize()  # Would never come back if it held the GIL.
    opener.join()
    gate.clear()
    rig.enqueue(desk.stream.handle, _until(gate), "a kernel")
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    desk.stream.synchronize()
    opener.join()


def test_streams_do_not_wait_for_each_other(rig: CudaRig, desk: Desk) -> None:
    gate, blocked = threading.Event(), desk.device.stream()
    rig.enqueue(blocked.handle, _until(gate), "a kernel")
    desk.device.fill(desk.memory.address, 5, 4, desk.stream)
    assert desk.read(desk.memory.address, 4) == b"\x05" * 4
    gate.set()
    blocked.synchronize()
    blocked.close()


def test_an_event_that_was_never_recorded_is_reached(desk: Desk) -> None:
    desk.event.synchronize()


def test_a_closed_stream_and_event_are_refused(device: RigDevice) -> None:
    stream, event = device.stream(), device.event()
    event.close()
    with pytest.raises(CudaError, match="closed"):
        event.record(stream)
    stream.close()
    with pytest.raises(CudaError):
        stream.synchronize()
    memory, host = device.allocate(8), device.pinned((8,), np.uint8)
    with pytest.raises(CudaError):
        device.copy_in(memory.address, host.array, stream)
    host.close()
    memory.close()


def test_a_kernel_sees_the_memory_that_copies_see(rig: CudaRig, desk: Desk) -> None:
    address = desk.memory.address
    desk.device.fill(address, 3, 64, desk.stream)

    def double() -> None:
        rig.view(address + 32, 32)[:] *= 2

    rig.enqueue(desk.stream.handle, double, "a kernel")
    assert desk.read(address, 64) == b"\x03" * 32 + b"\x06" * 32
    with pytest.raises(CudaError, match="illegal memory access"):
        rig.view(address, 2000)


def test_a_graph_runs_at_each_launch_and_not_before(rig: CudaRig, desk: Desk) -> None:
    device, stream, address = desk.device, desk.stream, desk.memory.address
    device.fill(address, 1, 2, stream)
    stream.synchronize()
    device.begin_capture(stream)
    assert rig.is_captured(stream.handle)

    def increment() -> None:
        rig.view(address, 1)[:] += 1

    rig.enqueue(stream.handle, increment, "a kernel")
    device.copy(address + 1, address, 1, stream)
    graph = device.end_capture(stream)
    assert not rig.is_captured(stream.handle)
    assert desk.read(address, 2) == b"\x01\x01"
    for value in (2, 3):
        graph.launch(stream)
        assert desk.read(address, 2) == bytes((value, value))
    graph.launch(stream)
    graph.close()
    graph.close()
    assert desk.read(address, 1) == b"\x04"


def test_a_thread_that_captures_may_not_wait_or_allocate(desk: Desk) -> None:
    device, stream = desk.device, desk.stream
    for call in (stream.synchronize, lambda: device.allocate(8), lambda: device.pinned((1,), np.uint8)):
        device.begin_capture(stream)
        with pytest.raises(CudaError, match="not permitted when stream is capturing"):
            call()
        with pytest.raises(CudaError, match="previous error during capture"):
            device.end_capture(stream)
    stream.synchronize()


def test_another_thread_allocates_while_one_captures(desk: Desk) -> None:
    device = desk.device

    def allocate() -> None:
        with device.activate():
            device.allocate(8).close()

    device.begin_capture(desk.stream)
    assert on_thread(allocate) is None
    device.end_capture(desk.stream).close()


def test_an_event_recorded_in_a_capture_cannot_be_waited_for(desk: Desk) -> None:
    desk.device.begin_capture(desk.stream)
    desk.event.record(desk.stream)
    desk.device.end_capture(desk.stream).close()
    with pytest.raises(CudaError, match="last recorded in a capturing stream"):
        desk.event.synchronize()


def test_a_library_takes_memory_of_the_current_device(rig: CudaRig, device: RigDevice) -> None:
    free = rig.take(1000, "weights")
    assert device.memory_info()[0] < _TOTAL_BYTES
    free()
    assert device.memory_info()[0] == _TOTAL_BYTES


def test_10000_copies_and_100_lives_leave_nothing(rig: CudaRig, desk: Desk) -> None:
    device, address = desk.device, desk.memory.address

    def copy_often(times: int) -> None:
        for _ in range(times):
            device.copy_in(address, desk.host.array, desk.stream)
            device.copy_out(desk.host.array, address, desk.stream)
            desk.event.record(desk.stream)
            desk.event.synchronize()
        for _ in range(times // 100):
            Desk(device, 20_000).close()

    copy_often(500)
    process, before, growths = psutil.Process(), len(rig.leaks()), []
    for _ in range(
        3
    ):  # what leaks does so each time; a process of hundreds of megabytes grows by itself, too
        gc.collect()
        used = process.memory_info().rss
        copy_often(10_000)
        gc.collect()
        growths.append(process.memory_info().rss - used)
    assert len(rig.leaks()) == before
    assert min(growths) < 4_000_000
