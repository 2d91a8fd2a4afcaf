"""TensorRT's Python module on ONNX Runtime and the CUDA stand-in, with TensorRT's rules enforced.

An instance takes the place of the module `tensorrt` or `tensorrt_rtx`: the names, arguments and answers are
those of the real bindings as far as `engines` uses them. What the real library refuses, it refuses in the
same way: False or None, and a line in the log. What the real library forbids without noticing raises
`RuleBrokenError`. A plan holds the graph and where its weights are; the weights' size is taken from the
device's memory when a plan is loaded, so that what is not released shows in its `leaks`.
"""

from engines.trt_library import TENSORRT, TENSORRT_RTX, TrtLibrary
from tests.standins import trt_names
from tests.standins.trt_builder import Builder
from tests.standins.trt_names import RuleBrokenError
from tests.standins.trt_network import OnnxParser
from tests.standins.trt_runtime import Behaviour, CudaSide, Runtime

__all__ = ["RuleBrokenError", "StandInTensorrt"]

_VERSIONS = {TENSORRT: "11.4.0.106", TENSORRT_RTX: "1.7.1.116"}


class StandInTensorrt:
    """The module, and what tests need besides."""

    ILogger = trt_names.ILogger
    Logger = trt_names.Logger
    IProgressMonitor = trt_names.IProgressMonitor
    OnnxParser = OnnxParser
    DataType = trt_names.DataType
    TensorIOMode = trt_names.TensorIOMode
    TensorLocation = trt_names.TensorLocation
    ExecutionContextAllocationStrategy = trt_names.ExecutionContextAllocationStrategy
    MemoryPoolType = trt_names.MemoryPoolType
    BuilderFlag = trt_names.BuilderFlag
    HardwareCompatibilityLevel = trt_names.HardwareCompatibilityLevel
    ProfilingVerbosity = trt_names.ProfilingVerbosity
    NetworkDefinitionCreationFlag = trt_names.NetworkDefinitionCreationFlag
    EngineStat = trt_names.EngineStat
    LayerType = trt_names.LayerType
    ErrorCode = trt_names.ErrorCode
    Dims = trt_names.Dims
    nptype = staticmethod(trt_names.nptype)

    def __init__(
        self,
        cuda: CudaSide,
        name: str = TENSORRT,
        *,
        is_computing: bool = True,
        version: str | None = None,
        target: str | None = None,
    ) -> None:
        """Make the module called `name`.

        Args:
            cuda: where it allocates and executes.
            name: of the two libraries' names.
            is_computing: False leaves every output as it is, to measure what everything else takes.
            version: the library's version, which a plan must have, too.
            target: what it runs on: a compute capability for tensorrt_rtx, a GPU's name for tensorrt.

        """
        self.__name__ = name
        self.__version__ = version or _VERSIONS[name]
        self._cuda = cuda
        self._rtx = name == TENSORRT_RTX
        self.behaviour = Behaviour(
            self.__version__, target or ("SM89" if self._rtx else "GPU"), is_computing=is_computing
        )
        """What happens to executions and plans; for tests to change."""
        self.num_builds = 0
        """Plans that were asked for."""
        self.refuse_builds = 0
        """How many of the next builds fail."""
        if self._rtx:
            self.ComputeCapability = trt_names.ComputeCapability
            self.CudaGraphStrategy = trt_names.CudaGraphStrategy
            self.DynamicShapesKernelSpecializationStrategy = (
                trt_names.DynamicShapesKernelSpecializationStrategy
            )

    @property
    def library(self) -> TrtLibrary:
        """The module as `engines` takes it."""
        return TrtLibrary(self.__name__, self, self.__version__)

    def Builder(self, logger: trt_names.ILogger) -> Builder:
        return Builder(
            logger,
            rtx=self._rtx,
            version=self.__version__,
            target=lambda: self.behaviour.target,
            begin=self._begin_build,
        )

    def Runtime(self, logger: trt_names.ILogger) -> Runtime:
        return Runtime(logger, cuda=self._cuda, behaviour=self.behaviour)

    def _begin_build(self) -> bool:
        self.num_builds += 1
        if self.refuse_builds:
            self.refuse_builds -= 1
            return False
        return True
