"""One cache on the GPU, and steps on it."""

import contextlib
import threading
from collections.abc import Callable
from contextlib import ExitStack

from engines.api import CacheSpec, EngineError, StepBatch, StepResult
from engines.cuda_api import CudaError, Device, Stream
from engines.linear import Move, Plan, Rows, Run
from engines.options import EngineOptions
from engines.trt_executor import Executor, LoadedPlan, RunShape
from engines.trt_inputs import Inputs
from engines.trt_memory import SCRATCH_ALIGNMENT, plan_memory
from engines.trt_outputs import Outputs
from engines.trt_replay import Replays, batch_sizes


class TrtContext:
    """An execution context on its own stream, with its cache and buffers.

    Everything is queued without waiting, and one wait at the step's end lets other threads run. Belongs to
    the thread that made it, and is held to that.
    """

    def __init__(
        self,
        plan: LoadedPlan,
        device: Device,
        options: EngineOptions,
        num_left: int,
        on_closed: Callable[["TrtContext"], None],
    ) -> None:
        """Take the memory.

        Args:
            plan: what it executes.
            device: where.
            options: the settings.
            num_left: contexts that are still to be made on the device's free memory, this one included.
            on_closed: hears when everything is free again.

        Raises:
            OutOfMemoryError: the cache does not fit, or something else has taken the memory meanwhile.
            EngineError: CUDA or TensorRT refused something else.

        """
        self._thread = threading.get_ident()
        self._plan = plan
        self._device = device
        self._on_closed = on_closed
        self._has_failed = False
        with device.activate(), ExitStack() as owner:
            stream = device.stream()
            owner.callback(stream.close)
            done = device.event()
            owner.callback(done.close)
            self._stream, self._done = stream, done
            # Made first: what TensorRT takes for itself is then no longer free when the rest is planned.
            self._decode = self._prefill = Executor(plan, stream, specializes=True)
            owner.callback(self._decode.close)
            if plan.library.is_ahead_of_time:
                # Prompts have any length. Decode runs have few sizes, and so are worth kernels of their own.
                self._prefill = Executor(plan, stream)
                owner.callback(self._prefill.close)
            try:
                self._allocate(options, num_left, stream, owner)
            except BaseException:
                _settle(stream)
                raise
            owner.callback(_settle, stream)
            self._owner: ExitStack | None = owner.pop_all()

    def _allocate(self, options: EngineOptions, num_left: int, stream: Stream, owner: ExitStack) -> None:
        device, interface = self._device, self._plan.interface
        by_library = self._plan.library.is_ahead_of_time
        has_few_sizes = options.cuda_graphs or by_library
        free_bytes, _ = device.memory_info()
        memory = plan_memory(
            interface,
            options,
            scratch_bytes=self._plan.engine.device_memory_size_v2,
            free_bytes=free_bytes,
            num_left=num_left,
            is_padded=has_few_sizes,
        )
        self._cache = memory.cache
        self._row_bytes = interface.row_bytes
        num_rows = memory.cache.num_blocks + 1
        self._distance = num_rows * self._row_bytes

        scratch = device.allocate(memory.scratch_bytes)
        owner.callback(scratch.close)
        begin = -(-scratch.address // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        caches = device.allocate(len(interface.cache_names) * self._distance)
        owner.callback(caches.close)
        self._caches = caches.address
        # Cells that no token has written count for nothing, but times nothing a NaN is still a NaN.
        device.fill(caches.address, 0, caches.num_bytes, stream)
        self._inputs = Inputs(device, stream, memory.inputs, owner)
        self._outputs = Outputs(device, stream, memory, owner)

        def bind(executor: Executor) -> Executor:
            scratch_memory = begin, scratch.address + scratch.num_bytes - begin
            executor.bind(scratch_memory, caches.address, self._distance, self._inputs.addresses)
            return executor

        for executor in {self._decode, self._prefill}:
            bind(executor)
        self._replays: Replays | None = None
        if options.cuda_graphs:
            self._replays = Replays(
                device,
                stream,
                lambda: bind(Executor(self._plan, stream, specializes=True, replays=by_library)),
                by_library=by_library,
            )
            owner.callback(self._replays.close)
        shape = interface.shape
        self._rows = Rows(
            memory.cache.num_blocks,
            shape.max_len,
            vocab_size=interface.spec.vocab_size,
            max_piece=shape.max_piece,
            max_logit_rows=shape.max_logit_rows,
            max_batch=shape.max_batch,
            batch_sizes=batch_sizes(min(shape.max_batch, num_rows)) if has_few_sizes else None,
        )

    @property
    def cache(self) -> CacheSpec:
        """The cache's size: a block is a row, as long as the longest sequence."""
        return self._cache

    @property
    def num_candidates(self) -> int:
        """How many of the best tokens each step gives for each row of logits."""
        return self._plan.interface.form.num_candidates

    def step(self, batch: StepBatch) -> StepResult:
        """Compute a batch.

        Raises:
            CudaDeviceLostError: the device is lost, with everything on it.
            EngineError: the batch makes no sense, or the step failed and the context must be closed.

        """
        self._require_own_thread("stepped")
        if self._owner is None:
            raise EngineError("the context is closed")
        if self._has_failed:
            raise EngineError("the context is of no use after a step that failed; close it and make another")
        plan = self._rows.plan(batch)
        try:
            with self._device.activate():
                self._queue(plan, batch)
                self._done.record(self._stream)
                self._done.synchronize()
        except BaseException:
            self._has_failed = True
            raise
        return self._outputs.result()

    def close(self) -> None:
        """Free everything, after what is still queued. Closing twice is allowed.

        Raises:
            EngineError: another thread made the context.

        """
        if self._owner is None:
            return
        self._require_own_thread("closed")
        owner, self._owner = self._owner, None
        try:
            with self._device.activate(), owner:
                pass
        finally:
            self._on_closed(self)

    def _queue(self, plan: Plan, batch: StepBatch) -> None:
        """Queue a whole step."""
        for move in plan.moves:
            self._move(move)
        self._outputs.begin(len(batch.logit_rows), plan.runs)
        for index, run in enumerate(plan.runs):
            self._inputs.put(run, index, len(plan.runs))
            self._execute(run, index)
            self._outputs.collect()
        self._outputs.finish(batch.full_rows)

    def _move(self, move: Move) -> None:
        """Copy a row, whole: fewer copies than those of each head's cells in use, which lie apart."""
        size = self._row_bytes
        for cache in range(len(self._plan.interface.cache_names)):
            begin = self._caches + cache * self._distance
            self._device.copy(begin + move.target * size, begin + move.source * size, size, self._stream)

    def _execute(self, run: Run, index: int) -> None:
        num_rows, num_tokens = run.token_ids.shape
        shape = RunShape(num_rows, num_tokens, len(run.logit_rows), run.first_row, self._outputs.place(run))
        profile = self._plan.interface.shape.profile_of(num_rows, num_tokens)
        # Recordings fix the outputs' addresses, too: those of a step's first run are always the same.
        if self._replays is not None and index == 0 and run.is_decode and self._replays.run(profile, shape):
            return
        executor = self._decode if run.is_decode else self._prefill
        executor.prepare(profile, shape)
        executor.execute()

    def _require_own_thread(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            raise EngineError(f"a context is {what} on the thread that made it, and on no other")


def _settle(stream: Stream) -> None:
    """Wait until nothing uses what is about to be freed."""
    with contextlib.suppress(CudaError):  # then nothing runs any more
        stream.synchronize()
