# ruff: noqa: ARG002
"""TensorRT's running half: runtimes, engines and execution contexts, with ONNX Runtime for the arithmetic."""

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnxruntime

from engines.cuda_api import CudaError
from tests.standins.trt_builder import DIGEST_BYTES, MAGIC, Bounds, Shape
from tests.standins.trt_names import (
    CudaGraphStrategy,
    DataType,
    Dims,
    ExecutionContextAllocationStrategy,
    ILogger,
    RuleBrokenError,
    Severity,
    TensorIOMode,
    TensorLocation,
    check_made,
    nptype,
)
from tests.standins.trt_names import DynamicShapesKernelSpecializationStrategy as _Specialization

_ADDRESS_ALIGNMENT = 256
_MEMORY_ALIGNMENT = 512
"""What a runtime has been seen to ask for, although its documentation says 256."""


class CudaSide(Protocol):
    """What the CUDA stand-in gives: `tests.standins.cuda.StandInCuda`."""

    def enqueue(self, handle: int, task: Callable[[], None], name: str) -> None: ...
    def view(self, address: int, num_bytes: int) -> Any: ...
    def is_captured(self, handle: int) -> bool: ...
    def take(self, num_bytes: int, what: str) -> Callable[[], None]: ...


@dataclass(slots=True)
class Behaviour:
    """How the library's runtime half behaves; shared by everything made from one module."""

    version: str
    target: str
    is_computing: bool = True
    """Whether executions compute; otherwise they leave the outputs as they are."""
    has_aliases: bool = True
    """Whether engines tell which outputs are in place of inputs."""
    execution_s: float = 0.0
    """How much longer executions take than they do."""
    num_executions: int = 0
    refuse_execution: int = 0
    """Number of the execution to refuse, counted from 1; 0 is none."""
    crash_execution: int = 0
    """Number of the execution that fails when it runs on the stream; 0 is none."""
    allocates: bool = False
    """Whether executions allocate memory on the way, so that they cannot be captured."""
    refuse_plans: int = 0
    """How many of the next plans to refuse, good as they may be."""
    num_calls: int = 0
    """Calls of execution contexts."""
    specialized_shapes: set[tuple[tuple[str, int], ...]] = field(default_factory=set)
    """Sizes that were executed where kernels are compiled for each; of tensorrt_rtx alone."""
    num_contexts: int = 0
    """Execution contexts alive."""
    num_engines: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of an engine."""

    name: str
    dtype: DataType
    dims: tuple[int | str, ...]
    is_input: bool

    @property
    def shape(self) -> Dims:
        return Dims(-1 if isinstance(dim, str) else dim for dim in self.dims)


class Runtime:
    """Makes engines out of plans."""

    def __init__(self, logger: ILogger, *, cuda: CudaSide, behaviour: Behaviour) -> None:
        self.logger = check_made(logger, ILogger)
        self.cuda = cuda
        self.behaviour = behaviour
        self.max_threads = 1

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "ICudaEngine | None":
        blob = memoryview(serialized_engine).cast("B")
        try:
            head, model = _open(blob, self.behaviour)
            release = self.cuda.take(head["weights_bytes"], "weights")
        except (ValueError, CudaError) as error:
            self.logger.log(Severity.ERROR, f"IRuntime::deserializeCudaEngine: {error}")
            return None
        return ICudaEngine(self, head, model, release)


def _open(blob: memoryview, behaviour: Behaviour) -> tuple[dict[str, Any], bytes]:
    if not len(blob):
        raise ValueError("Error Code 3: API Usage Error (Cannot deserialize with an empty memory buffer.)")
    if bytes(blob[: len(MAGIC)]) != MAGIC:
        raise ValueError(
            "Error Code 1: Serialization (Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG "
            "failed. Trying to load an engine created with incompatible serialization version)"
        )
    begin = len(MAGIC) + DIGEST_BYTES
    if hashlib.sha256(blob[begin:]).digest() != bytes(blob[len(MAGIC) : begin]):
        raise ValueError(
            "Error Code 1: Serialization (Serialization assertion plan.header.size == blobSize failed.)"
        )
    if behaviour.refuse_plans:
        behaviour.refuse_plans -= 1
        raise ValueError("Error Code 6: API Usage Error (The engine plan file is not compatible)")
    size = int.from_bytes(blob[begin : begin + 8], "little")
    head = json.loads(bytes(blob[begin + 8 : begin + 8 + size]))
    targets = [head["target"]] if isinstance(head["target"], str) else head["target"]
    if head["version"] != behaviour.version:
        raise ValueError(
            "Error Code 6: API Usage Error (The engine plan file is not compatible with this version of "
            f"TensorRT, expecting library version {behaviour.version} got {head['version']})"
        )
    if behaviour.target not in targets and "CURRENT" not in targets:
        raise ValueError(
            "Error Code 6: API Usage Error (The engine plan file is generated on an incompatible device, "
            f"expecting {behaviour.target} got {', '.join(targets)})"
        )
    return head, bytes(blob[begin + 8 + size :])


class IRuntimeConfig:
    """Settings of an execution context of TensorRT-RTX."""

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = _Specialization.LAZY

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> None:
        self._strategy = ExecutionContextAllocationStrategy(strategy)

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        return self._strategy


class ICudaEngine:
    """A plan made ready; it keeps its runtime alive, as pybind11's keep_alive does. Safe from any thread."""

    def __init__(
        self, runtime: Runtime, head: dict[str, Any], model: bytes, release: Callable[[], None]
    ) -> None:
        self.runtime = runtime
        self.behaviour = runtime.behaviour
        self.profiles: list[Bounds] = [
            {name: (tuple(least), tuple(best), tuple(most)) for name, (least, best, most) in profile.items()}
            for profile in head["profiles"]
        ]
        named = [(head[key], key == "inputs") for key in ("inputs", "outputs")]
        self.tensors: dict[str, Tensor] = {
            name: Tensor(name, DataType(kind), tuple(dims), is_input)
            for tensors, is_input in named
            for name, kind, dims in tensors
        }
        self.aliases: dict[str, str] = head["aliases"]
        self.is_capturable: bool = head["is_capturable"]
        self.weights_bytes: int = head["weights_bytes"]
        self.session = _session(model, head["folder"]) if self.behaviour.is_computing else None
        self.behaviour.num_engines += 1
        weakref.finalize(self, _engine_is_gone, self.behaviour, release)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def num_aux_streams(self) -> int:
        return 0

    @property
    def device_memory_size_v2(self) -> int:
        return max(self.get_device_memory_size_for_profile_v2(i) for i in range(len(self.profiles)))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        """As much as the largest of the inputs without the caches, many times over."""
        small = (
            bounds[2]
            for name, bounds in self.profiles[profile_index].items()
            if name not in self.aliases.values()
        )
        return 512 * 64 * max((int(np.prod(shape)) for shape in small), default=1)

    def get_engine_stat(self, _stat: Any = 0) -> int:
        return self.weights_bytes

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        if name not in self.tensors:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if self.tensors[name].is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name].dtype

    def get_tensor_shape(self, name: str) -> Dims:
        return self.tensors[name].shape

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        bounds = self.profiles[profile_index].get(name, (self.tensors[name].shape,) * 3)
        return [Dims(shape) for shape in bounds]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name) if self.behaviour.has_aliases else None

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(
        self, strategy: Any = ExecutionContextAllocationStrategy.STATIC
    ) -> "IExecutionContext | None":
        config = strategy if isinstance(strategy, IRuntimeConfig) else IRuntimeConfig()
        if config is strategy:
            strategy = config.get_execution_context_allocation_strategy()
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise RuleBrokenError("the memory of each context is to be planned: USER_MANAGED")
        try:
            release = self.runtime.cuda.take(256, "execution context")
        except CudaError as error:
            self.runtime.logger.log(
                Severity.ERROR, f"IExecutionContext::IExecutionContext: Error Code 1: {error}"
            )
            return None
        return IExecutionContext(self, config, release)


def _session(model: bytes, folder: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _engine_is_gone(behaviour: Behaviour, release: Callable[[], None]) -> None:
    behaviour.num_engines -= 1
    release()


def _context_is_gone(behaviour: Behaviour, release: Callable[[], None]) -> None:
    behaviour.num_contexts -= 1
    release()


class IExecutionContext:
    """The state of an engine's executions: belongs to one thread and one stream, and is held to that."""

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig, release: Callable[[], None]) -> None:
        self.engine = engine
        self.name = ""
        self._config = config
        self._behaviour = engine.behaviour
        self._cuda = engine.runtime.cuda
        self._logger = engine.runtime.logger
        self._thread = threading.get_ident()
        self._stream: int | None = None
        self._profile = 0
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)
        self._num_dynamic = sum(t.is_input and -1 in t.shape for t in engine.tensors.values())
        self._changes = 0
        """Counts what a graph captured earlier does not know of."""
        self._settled = -1
        """The count at the last execution: only then can one be captured."""
        self._behaviour.num_contexts += 1
        weakref.finalize(self, _context_is_gone, self._behaviour, release)

    def get_runtime_config(self) -> IRuntimeConfig:
        return self._config

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    @property
    def all_binding_shapes_specified(self) -> bool:
        return len(self._shapes) == self._num_dynamic

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._own("set_optimization_profile_async", stream_handle)
        if self._cuda.is_captured(stream_handle):
            raise RuleBrokenError("a profile was chosen in a capture")
        if not 0 <= profile_index < len(self.engine.profiles):
            return self._refuse(f"setOptimizationProfileAsync: profile index {profile_index} is out of range")
        if profile_index != self._profile:
            self._profile = int(profile_index)
            self._shapes.clear()
            self._changes += 1
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        self._own("set_input_shape")
        if not isinstance(shape, tuple | list):
            raise TypeError(f"set_input_shape(): incompatible function arguments: {shape!r}")
        tensor = self.engine.tensors.get(name)
        if tensor is None or not tensor.is_input:
            return self._refuse(f"setInputShape: Given invalid tensor name: {name}")
        new = tuple(shape)
        if -1 not in tensor.dims and not any(isinstance(dim, str) for dim in tensor.dims):
            return new == tensor.dims or self._refuse(f"setInputShape: Static dimension mismatch of {name}")
        least, _, most = self.engine.profiles[self._profile][name]
        inside = len(new) == len(least)
        for low, size, high in zip(least, new, most, strict=False):
            inside = inside and low <= size <= high
        if not inside:
            return self._refuse(
                f"setInputShape: Error Code 3: API Usage Error (Set dimension {list(new)} for tensor {name} "
                f"does not satisfy any optimization profiles. Valid range for profile {self._profile}: "
                f"{list(least)}..{list(most)})"
            )
        if self._shapes.get(name) != new:
            self._shapes[name] = new
            self._changes += 1
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._own("set_tensor_address")
        if name not in self.engine.tensors:
            return self._refuse(f"setTensorAddress: Given invalid tensor name: {name}")
        memory = int(memory)
        if memory % _ADDRESS_ALIGNMENT:
            return self._refuse(
                f"setTensorAddress: Parameter check failed: {name} is not aligned to {_ADDRESS_ALIGNMENT}"
            )
        if self._addresses.get(name) != memory:
            self._addresses[name] = memory
            self._changes += 1
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def get_tensor_shape(self, name: str) -> Dims:
        tensor = self.engine.tensors[name]
        if tensor.is_input:
            return Dims(self._shapes.get(name, tensor.shape))
        sizes = self._sizes()
        return Dims(sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in tensor.dims)

    def set_device_memory(self, memory: int, size: int) -> None:
        self._own("set_device_memory")
        if memory % _MEMORY_ALIGNMENT:
            self._refuse(
                "setDeviceMemory: Error Code 3: API Usage Error (Parameter check failed: memory must be "
                f"aligned on {_MEMORY_ALIGNMENT} byte boundary)"
            )
        elif size < self.engine.device_memory_size_v2:
            self._refuse(f"setDeviceMemory: {size} bytes are less than {self.engine.device_memory_size_v2}")
        else:
            self._memory = int(memory), int(size)
            self._changes += 1

    def infer_shapes(self) -> list[str]:
        self._own("infer_shapes")
        missing = [t.name for t in self.engine.tensors.values() if t.is_input and self._lacks_shape(t)]
        if not missing:
            try:
                self._sizes()
            except ValueError as error:
                raise RuntimeError(f"shape inference failed: {error}") from error
        return missing

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.is_capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._own("execute_async_v3", stream_handle)
        behaviour = self._behaviour
        behaviour.num_executions += 1
        number = behaviour.num_executions
        if number == behaviour.refuse_execution:
            return self._refuse(
                "enqueueV3: Error Code 1: Cuda Runtime (In executeInternal: cudaError 2: out of memory)"
            )
        if (fault := self._fault()) is not None:
            return self._refuse(f"enqueueV3: Error Code 3: API Usage Error ({fault})")
        config = self._config
        if config.dynamic_shapes_kernel_specialization_strategy is not _Specialization.NONE:
            behaviour.specialized_shapes.add(tuple(sorted(self._sizes().items())))
        is_captured = self._cuda.is_captured(stream_handle)
        if is_captured and self._settled != self._changes:
            raise RuleBrokenError("captured before shapes and addresses had been used once")
        self._settled = self._changes
        try:
            if behaviour.allocates:
                self._cuda.take(256, "an execution")()
            self._cuda.enqueue(stream_handle, self._work(number, is_captured=is_captured), "enqueueV3")
        except CudaError as error:
            return self._refuse(f"enqueueV3: Error Code 1: Cuda Runtime ({error})")
        return True

    def _fault(self) -> str | None:
        """What is missing or contradictory, as TensorRT looks at it when it enqueues."""
        if len(self._shapes) < self._num_dynamic:
            missing = [t.name for t in self.engine.tensors.values() if t.is_input and self._lacks_shape(t)]
            return f"Not all shapes are specified. Missing: {', '.join(missing)}"
        if len(self._addresses) < len(self.engine.tensors):
            missing = [name for name in self.engine.tensors if name not in self._addresses]
            return f"Address is not set for: {', '.join(missing)}"
        if self._memory[0] == 0:
            return "no device memory was set"
        if self._settled == self._changes:
            return None
        for output, source in self.engine.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return f"{output} must have the address of {source}"
        try:
            self._sizes()
        except ValueError as error:
            return str(error)
        return None

    def _lacks_shape(self, tensor: Tensor) -> bool:
        return -1 in tensor.shape and tensor.name not in self._shapes

    def _sizes(self) -> dict[str, int]:
        """Sizes of the dynamic dimensions by name.

        Raises:
            ValueError: two inputs give one dimension two sizes.

        """
        sizes: dict[str, int] = {}
        for name, shape in self._shapes.items():
            for dim, size in zip(self.engine.tensors[name].dims, shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    raise ValueError(f"{dim} is {sizes[dim]} and, in {name}, {size}")
        return sizes

    def _work(self, number: int, *, is_captured: bool) -> Callable[[], None]:
        """What the stream runs: everything it needs is fixed now, as kernels' arguments are."""
        if self._behaviour.num_executions == self._behaviour.crash_execution:
            return _crash
        if (session := self.engine.session) is None:
            return _nothing
        sizes = self._sizes()
        bound = [
            (
                tensor,
                tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.dims),
                self._addresses[tensor.name],
            )
            for tensor in self.engine.tensors.values()
        ]
        itself, changes, cuda, memory = weakref.ref(self), self._changes, self._cuda, self._memory
        delay_s = self._behaviour.execution_s

        def work() -> None:
            context = itself()
            if context is None:
                raise RuleBrokenError("executed after the context was gone")
            if is_captured and context._changes != changes:
                raise RuleBrokenError("a captured graph was launched after its context had changed")
            time.sleep(delay_s)
            cuda.view(*memory)[:64] = number % 251  # scratch is written to
            binding = session.io_binding()
            for tensor, shape, address in bound:
                kind = nptype(tensor.dtype)
                cuda.view(address, int(np.prod(shape)) * np.dtype(kind).itemsize)
                bind = binding.bind_input if tensor.is_input else binding.bind_output
                bind(tensor.name, "cpu", 0, kind, shape, address)
            session.run_with_iobinding(binding)

        return work

    def _own(self, call: str, stream: int | None = None) -> None:
        """Count a call, and hold the context to its thread and its stream."""
        self._behaviour.num_calls += 1
        if threading.get_ident() != self._thread:
            raise RuleBrokenError(f"{call} on a thread that did not make the context")
        if stream is None:
            return
        if stream == 0:
            raise RuleBrokenError(f"{call} on the default stream")
        if self._stream not in (None, stream):
            raise RuleBrokenError(f"{call} on a second stream")
        self._stream = int(stream)

    def _refuse(self, words: str) -> bool:
        self._logger.log(Severity.ERROR, f"IExecutionContext::{words}")
        return False


def _nothing() -> None:
    """Compute nothing."""


def _crash() -> None:
    raise CudaError("unspecified launch failure")
