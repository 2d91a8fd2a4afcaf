"""Enumerations and small values of the TensorRT stand-in, named and numbered as in TensorRT's module."""

from enum import IntEnum
from typing import Any, ClassVar

import numpy as np


class RuleBrokenError(AssertionError):
    """Something was done that TensorRT forbids without noticing it: on a GPU it would corrupt results."""


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class MemoryPoolType(IntEnum):
    WORKSPACE = 0
    DLA_MANAGED_SRAM = 1
    DLA_LOCAL_DRAM = 2
    DLA_GLOBAL_DRAM = 3
    TACTIC_DRAM = 4
    TACTIC_SHARED_MEMORY = 5


class BuilderFlag(IntEnum):
    DEBUG = 2
    REFIT = 4
    DISABLE_TIMING_CACHE = 5
    TF32 = 6
    VERSION_COMPATIBLE = 12
    STRIP_PLAN = 18
    WEIGHT_STREAMING = 20
    MONITOR_MEMORY = 24
    REQUIRE_USER_ALLOCATION = 28


class ComputeCapability(IntEnum):
    NONE = 0
    CURRENT = 1
    SM75 = 75
    SM80 = 80
    SM86 = 86
    SM89 = 89
    SM120 = 120
    SM121 = 121


class HardwareCompatibilityLevel(IntEnum):
    NONE = 0
    AMPERE_PLUS = 1
    SAME_COMPUTE_CAPABILITY = 2


class ProfilingVerbosity(IntEnum):
    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 0


class CudaGraphStrategy(IntEnum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(IntEnum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class EngineStat(IntEnum):
    TOTAL_WEIGHTS_SIZE = 0
    STRIPPED_WEIGHTS_SIZE = 1


class ErrorCode(IntEnum):
    SUCCESS = 0
    INTERNAL_ERROR = 1
    INVALID_VALUE = 4
    UNSUPPORTED_NODE = 8


class LayerType(IntEnum):
    """Of a layer; the stand-in tells cache updates from everything else."""

    CAST = 1
    KV_CACHE_UPDATE = 54


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class Dims(tuple[int, ...]):
    """A shape."""


class IHostMemory(bytes):
    """Bytes that belong to the library."""

    @property
    def nbytes(self) -> int:
        return len(self)

    @property
    def dtype(self) -> DataType:
        return DataType.INT8


class ILogger:
    """What a user's logger inherits from; `__init__` must be called as pybind11 wants it."""

    Severity: ClassVar = Severity
    INTERNAL_ERROR = Severity.INTERNAL_ERROR
    ERROR = Severity.ERROR
    WARNING = Severity.WARNING
    INFO = Severity.INFO
    VERBOSE = Severity.VERBOSE

    def __init__(self) -> None:
        self._is_made = True

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class Logger(ILogger):
    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        super().__init__()
        self.min_severity = min_severity

    def log(self, severity: Any, msg: str) -> None:
        if severity <= self.min_severity:
            print(severity.name, msg)


class IProgressMonitor:
    """What a user's progress monitor inherits from."""

    def __init__(self) -> None:
        self._is_made = True

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        raise NotImplementedError

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None:
        raise NotImplementedError


def nptype(data_type: DataType) -> Any:
    """Give NumPy's type for one of TensorRT's."""
    known = {
        DataType.FLOAT: np.float32,
        DataType.HALF: np.float16,
        DataType.INT8: np.int8,
        DataType.INT32: np.int32,
        DataType.BOOL: np.bool_,
        DataType.UINT8: np.uint8,
        DataType.INT64: np.int64,
    }
    if data_type not in known:
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return known[data_type]


def check_made(thing: Any, kind: type) -> Any:
    """Refuse what pybind11 refuses: another type, or one whose base was not initialised."""
    if not isinstance(thing, kind):
        raise TypeError(f"incompatible function arguments: {thing!r} is no {kind.__name__}")
    if not getattr(thing, "_is_made", False):
        raise TypeError(f"{type(thing).__name__}.__init__() must be called when overriding __init__")
    return thing
