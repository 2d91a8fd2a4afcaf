"""TensorRT engines over the stand-ins, for tests: a GPU, a library and an engine that belong together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.trt import TrtEngine, open_trt
from engines.trt_library import TENSORRT
from tests.standins.cuda_rig import CudaRig, RigDevice, make_cuda_rig
from tests.standins.tensorrt import StandInTensorrt

EXACT = EngineOptions(WeightFormat.FLOAT32, Precision.F32, CacheType.F32, max_batch=8, max_step_tokens=64)
"""What a CPU computes exactly; small sizes."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A GPU, a library on it, and perhaps an engine."""

    cuda: CudaRig
    trt: StandInTensorrt

    def open(
        self, path: Path, options: EngineOptions = EXACT, progress: Callable[[str, float], None] | None = None
    ) -> TrtEngine:
        """Open an engine."""
        report = progress or (lambda _phase, _done: None)
        name = self.trt.library.name
        return open_trt(name, path, options, report, cuda=self.cuda, library=self.trt.library)

    @contextmanager
    def device(self) -> Iterator[RigDevice]:
        """Look at the GPU: at its counts of calls, or to make one fail."""
        device = self.cuda.open_device(0)
        try:
            yield device
        finally:
            device.close()

    def assert_all_released(self) -> None:
        """Check that nothing of a closed engine is left."""
        assert self.cuda.leaks() == []
        assert self.trt.behaviour.num_contexts == 0
        assert self.trt.behaviour.num_engines == 0


def make_rig(name: str = TENSORRT, *, lazy: bool = False, total_bytes: int = 1 << 30, **settings: Any) -> Rig:
    """Make a GPU and a library; `settings` are the library's."""
    cuda = make_cuda_rig(total_bytes, lazy=lazy)
    return Rig(cuda, StandInTensorrt(cuda, name, **settings))


def in_cache(cache: Path, **changes: Any) -> EngineOptions:
    """Give the exact options on a folder of prepared models and plans."""
    return replace(EXACT, cache_folder=cache, **changes)
