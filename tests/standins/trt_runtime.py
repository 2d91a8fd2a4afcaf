# ruff: noqa: ARG002
"""TensorRT's running half: runtimes and the engines that they make of plans."""

import hashlib
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnxruntime

from engines.cuda_api import CudaError
from tests.standins.trt_builder import DIGEST_BYTES, MAGIC, Bounds
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
)
from tests.standins.trt_names import DynamicShapesKernelSpecializationStrategy as _Specialization


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

    def create_execution_context(self, strategy: Any = ExecutionContextAllocationStrategy.STATIC) -> Any:
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
        from tests.standins.trt_execution import IExecutionContext  # it is made of this module's classes

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
