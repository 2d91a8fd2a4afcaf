# ruff: noqa: ARG002
"""TensorRT's execution contexts: what they are told and refuse, and ONNX Runtime for the arithmetic."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from engines.cuda_api import CudaError
from tests.standins.trt_builder import Shape
from tests.standins.trt_names import (
    Dims,
    RuleBrokenError,
    Severity,
    nptype,
)
from tests.standins.trt_names import DynamicShapesKernelSpecializationStrategy as _Specialization
from tests.standins.trt_runtime import Behaviour, ICudaEngine, IRuntimeConfig, Tensor

_ADDRESS_ALIGNMENT = 256
_MEMORY_ALIGNMENT = 512
"""What a runtime has been seen to ask for, although its documentation says 256."""


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
        if 0 < behaviour.refuse_execution <= number:  # A test may have been slower than other threads.
            behaviour.refuse_execution = 0
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
        if 0 < self._behaviour.crash_execution <= number:
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


def _context_is_gone(behaviour: Behaviour, release: Callable[[], None]) -> None:
    behaviour.num_contexts -= 1
    release()
