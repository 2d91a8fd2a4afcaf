"""Decode runs recorded once and replayed: CUDA graphs.

A recorded run fixes its sizes and addresses. TensorRT's documentation advises one execution context for each
recording, with the scratch memory shared, so each has an `Executor` of its own.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engines.api import OutOfMemoryError
from engines.cuda_api import CudaDeviceLostError, CudaError, Device, Graph, Stream
from engines.trt_executor import Executor, RunShape

_LOG = logging.getLogger(__name__)

_MAX_RECORDINGS = 32
"""Runs of other sizes or other first rows are queued call by call."""


def batch_sizes(max_batch: int) -> list[int]:
    """Choose the batch sizes that are recorded: powers of two, and the greatest."""
    return sorted({2**power for power in range(max_batch.bit_length())} | {max_batch})


@dataclass(slots=True)
class _Recording:
    executor: Executor
    graph: Graph | None = None
    """None until it is recorded."""


class Replays:
    """The recordings of one context."""

    def __init__(
        self, device: Device, stream: Stream, make_executor: Callable[[], Executor], *, by_library: bool
    ) -> None:
        """Begin with none.

        Args:
            device: records.
            stream: what is recorded.
            make_executor: makes an executor with its memory bound.
            by_library: whether the library records what an executor does, so that nothing is to do here.

        """
        self._device = device
        self._stream = stream
        self._make_executor = make_executor
        self._by_library = by_library
        self._recordings: dict[RunShape, _Recording] = {}
        self._goes_on = True

    def run(self, profile: int, shape: RunShape) -> bool:
        """Queue a run by its recording; False if there is none and can be none.

        The first time a run is queued call by call, as TensorRT wants before it is recorded.

        Raises:
            EngineError: TensorRT or CUDA refused the run.

        """
        recording = self._recordings.get(shape)
        if recording is None:
            if not self._goes_on or len(self._recordings) == _MAX_RECORDINGS:
                return False
            try:
                recording = self._recordings[shape] = _Recording(self._make_executor())
            except OutOfMemoryError as error:
                self._stop(str(error))
                return False
            recording.executor.prepare(profile, shape)
            recording.executor.execute()
            return True
        if self._by_library:
            recording.executor.execute()
            return True
        if recording.graph is None and (not self._goes_on or not self._record(recording)):
            recording.executor.execute()
            return True
        assert recording.graph is not None
        recording.graph.launch(self._stream)
        return True

    def close(self) -> None:
        """Destroy all of it. Closing twice is allowed."""
        while self._recordings:
            _, recording = self._recordings.popitem()
            if recording.graph is not None:
                recording.graph.close()
            recording.executor.close()

    def _record(self, recording: _Recording) -> bool:
        """Record a run; if that fails, say so and record nothing more."""
        try:
            self._device.begin_capture(self._stream)
            try:
                accepted = recording.executor.try_execute()
            finally:
                graph = self._device.end_capture(self._stream)
        except CudaDeviceLostError:
            raise
        except CudaError as error:
            why = str(error)
        else:
            if accepted:
                recording.graph = graph
                return True
            graph.close()
            why = "TensorRT refused to be recorded"
        self._stop(why)
        return False

    def _stop(self, why: str) -> None:
        _LOG.warning("no more decode runs are recorded as CUDA graphs: %s", why)
        self._goes_on = False
