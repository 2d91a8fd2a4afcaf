"""CUDA graphs, which PyCUDA does not have: the one file that imports cuda-bindings."""

from importlib import import_module
from typing import Any

from engines.api import EngineNotInstalledError
from engines.cuda_api import Stream
from engines.cuda_errors import CudaErrors


class CudaGraphs:
    """Captures streams and launches what was captured.

    Raises:
        EngineNotInstalledError: the package cuda-bindings is missing.

    """

    def __init__(self, errors: CudaErrors) -> None:
        try:
            self._driver = import_module("cuda.bindings.driver")
        except ModuleNotFoundError as error:
            raise EngineNotInstalledError(
                "CUDA graphs need the package cuda-bindings: pip install 'streamsrv[cuda_graphs]', or leave "
                "them off."
            ) from error
        self._errors = errors

    def begin(self, stream: Stream) -> None:
        """Start to capture; other threads may allocate and wait meanwhile, this one may not."""
        # In the global mode an allocation on any thread would break the capture, and workers do not know
        # of each other's.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check("cuStreamBeginCapture", self._driver.cuStreamBeginCapture(stream.handle, mode))

    def end(self, stream: Stream) -> "CapturedGraph":
        """Stop capturing, and make it launchable."""
        (graph,) = self._check("cuStreamEndCapture", self._driver.cuStreamEndCapture(stream.handle))
        try:
            (launchable,) = self._check("cuGraphInstantiate", self._driver.cuGraphInstantiate(graph, 0))
        finally:
            self._check("cuGraphDestroy", self._driver.cuGraphDestroy(graph))
        return CapturedGraph(self, launchable)

    def launch(self, launchable: Any, stream: Stream) -> None:
        """Queue a graph."""
        self._check("cuGraphLaunch", self._driver.cuGraphLaunch(launchable, stream.handle))

    def destroy(self, launchable: Any) -> None:
        """Free a graph, once it has run. On a lost device it is gone anyway, so errors are passed over."""
        self._driver.cuGraphExecDestroy(launchable)

    def _check(self, call: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
        code, *values = result
        if int(code) != 0:
            raise self._errors.from_code(call, int(code))
        return tuple(values)


class CapturedGraph:
    """A graph that can be launched, as `cuda_api.Graph`."""

    def __init__(self, graphs: CudaGraphs, launchable: Any) -> None:
        self._graphs = graphs
        self._launchable = launchable

    def launch(self, stream: Stream) -> None:
        """Queue all of it."""
        self._graphs.launch(self._launchable, stream)

    def close(self) -> None:
        """Destroy it. Closing twice is allowed."""
        if self._launchable is not None:
            self._graphs.destroy(self._launchable)
            self._launchable = None
