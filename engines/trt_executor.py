"""One IExecutionContext: what it was last told, so that a run says only what has changed."""

from dataclasses import dataclass
from typing import Any, NoReturn

from engines.api import EngineError, OutOfMemoryError
from engines.cuda_api import Stream
from engines.trt_interface import Interface
from engines.trt_library import TrtLibrary, TrtLog


class LoadedPlan:
    """A plan in the runtime, with what is needed to execute it."""

    def __init__(self, library: TrtLibrary, log: TrtLog, engine: Any, interface: Interface) -> None:
        """Own an ICudaEngine."""
        self.library = library
        self.log = log
        self.engine = engine
        """The ICudaEngine; None once it is closed."""
        self.interface = interface
        self._dims: dict[int, Any] = {}

    def cache_dims(self, num_rows: int) -> Any:
        """Give a cache's shape as TensorRT's own object: a tuple takes 2 us more, for each cache anew."""
        if num_rows not in self._dims:
            self._dims[num_rows] = self.library.module.Dims(self.interface.cache_shape(num_rows))
        return self._dims[num_rows]

    def close(self) -> None:
        """Free the weights, with the device active and every execution context gone."""
        self.engine = None

    def refuse(self, call: str, stream: Stream | None = None) -> NoReturn:
        """Raise what a call that TensorRT refused stands for.

        Raises:
            CudaDeviceLostError: the device is lost: the stream, asked about it, says so.
            OutOfMemoryError: TensorRT says that there was not enough memory.
            EngineError: everything else; the message has the call and what TensorRT said.

        """
        if stream is not None:
            stream.synchronize()
        said = self.log.quote()
        kind = OutOfMemoryError if "out of memory" in said.lower() else EngineError
        raise kind(f"{self.library.name} refused {call}{said}")


@dataclass(frozen=True, slots=True)
class RunShape:
    """The sizes of a run, and where its tensors are."""

    num_rows: int
    """B."""
    num_tokens: int
    """S."""
    num_logit_rows: int
    """R."""
    first_row: int
    """Of the caches."""
    outputs: tuple[int, int, int, int]
    """Addresses of logits, candidate_logits, candidate_ids and logsumexp."""


_OUTPUT_NAMES = ("logits", "candidate_logits", "candidate_ids", "logsumexp")


class Executor:
    """An IExecutionContext on one stream. Belongs to the thread that made it."""

    def __init__(
        self, plan: LoadedPlan, stream: Stream, *, specializes: bool = False, replays: bool = False
    ) -> None:
        """Make the IExecutionContext, without scratch memory.

        Args:
            plan: what it executes.
            stream: where.
            specializes: whether tensorrt_rtx is to compile kernels for each shape that it meets, in the
                background; only for runs of few shapes.
            replays: whether tensorrt_rtx is to record and replay its launches.

        Raises:
            OutOfMemoryError: there is not enough memory for it.
            EngineError: TensorRT refused it for another reason.

        """
        trt = plan.library.module
        settings: Any = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if plan.library.is_ahead_of_time:
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            config = plan.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(settings)
            config.dynamic_shapes_kernel_specialization_strategy = (
                strategies.LAZY if specializes else strategies.NONE
            )
            if replays:
                config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            settings = config
        self._plan = plan
        self._stream = stream
        self._context: Any = plan.engine.create_execution_context(settings)
        if self._context is None:
            plan.refuse("to make an execution context", stream)
        self._profile = -1
        self._run: RunShape | None = None
        self._base = 0
        self._row_bytes = plan.interface.row_bytes
        self._caches = [(name, f"new_{name}") for name in plan.interface.cache_names]

    def bind(self, scratch: tuple[int, int], caches: int, cache_bytes: int, inputs: dict[str, int]) -> None:
        """Give it its memory.

        Args:
            scratch: address and size of the memory for what it computes on the way.
            caches: where the first cache begins.
            cache_bytes: distance from each cache to the next.
            inputs: the addresses of all other inputs.

        Raises:
            EngineError: TensorRT refused an address.

        """
        before = self._plan.log.quote()
        self._context.set_device_memory(*scratch)
        if self._plan.log.quote() != before:  # it returns nothing
            self._plan.refuse(f"{scratch[1]} bytes at {scratch[0]:#x} as set_device_memory")
        self._base, self._distance = caches, cache_bytes
        for name, address in inputs.items():
            self._set_address(name, address)

    def prepare(self, profile: int, run: RunShape) -> bool:
        """Say what differs from the last run; whether anything did.

        Raises:
            EngineError: TensorRT refused a profile, a shape or an address.

        """
        last = self._run
        if profile == self._profile and run == last:
            return False
        self._run = None  # until all is said
        if profile != self._profile:
            if not self._context.set_optimization_profile_async(profile, self._stream.handle):
                self._plan.refuse(f"set_optimization_profile_async({profile})", self._stream)
            self._profile, old = profile, None  # which makes it forget the shapes
        else:
            old = last
        if old is None or (run.num_rows, run.num_tokens) != (old.num_rows, old.num_tokens):
            for name in ("input_ids", "position_ids"):
                self._set_shape(name, (run.num_rows, run.num_tokens))
        if old is None or run.num_rows != old.num_rows:
            self._set_shape("write_indices", (run.num_rows,))
            shape = self._plan.cache_dims(run.num_rows)
            for name, _ in self._caches:
                self._set_shape(name, shape)
        if old is None or run.num_logit_rows != old.num_logit_rows:
            self._set_shape("logit_rows", (run.num_logit_rows,))
        if last is None or run.first_row != last.first_row:
            address = self._base + run.first_row * self._row_bytes
            for name, new_name in self._caches:
                self._set_address(name, address)
                self._set_address(new_name, address)
                address += self._distance
        if last is None or run.outputs != last.outputs:
            for name, address in zip(_OUTPUT_NAMES, run.outputs, strict=True):
                self._set_address(name, address)
        self._run = run
        return True

    def execute(self) -> None:
        """Queue the run.

        Raises:
            EngineError: TensorRT refused it.

        """
        if not self.try_execute():
            self._plan.refuse(f"execute_async_v3 of {self._run}", self._stream)

    def try_execute(self) -> bool:
        """Queue the run, or say that TensorRT refused it."""
        return bool(self._context.execute_async_v3(self._stream.handle))

    def close(self) -> None:
        """Destroy the IExecutionContext. Closing twice is allowed."""
        self._context = None

    def _set_shape(self, name: str, shape: Any) -> None:
        if not self._context.set_input_shape(name, shape):
            self._plan.refuse(f"set_input_shape({name}, {shape}) in profile {self._profile}", self._stream)

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            self._plan.refuse(f"set_tensor_address({name}, {address:#x})", self._stream)
