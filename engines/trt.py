"""The TensorRT engines: a plan on a GPU, shared by the contexts of all workers.

`tensorrt` and `tensorrt_rtx` are one implementation over the library's module. Without a GPU everything here
runs in the tests over stand-ins for the module and for CUDA.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.api import EngineError, OutOfMemoryError
from engines.cuda_api import Cuda, Device
from engines.linear_memory import row_length
from engines.memory import GIB
from engines.options import EngineOptions
from engines.plans import Plan, Plans
from engines.prepared import PreparedModel, PreparedModels
from engines.registry import inspect_model
from engines.spec import ModelInfo
from engines.trt_context import TrtContext
from engines.trt_executor import LoadedPlan
from engines.trt_interface import Interface
from engines.trt_library import TrtLibrary, TrtLog, load_library
from engines.trt_plan import PlanRequest, open_plan, request_plan, target_of

_LOG = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""How long closing an engine waits for contexts that are being closed."""

Progress = Callable[[str, float], None]


def open_trt(
    library_name: str,
    path: Path,
    options: EngineOptions,
    progress: Progress,
    *,
    cuda: Cuda | None = None,
    library: TrtLibrary | None = None,
) -> "TrtEngine":
    """Prepare a model, take its plan off the disk or build it, and load it.

    Args:
        library_name: one of `engines.trt_library.LIBRARY_NAMES`.
        path: a GGUF file or a Hugging Face folder.
        options: the settings.
        progress: called with a phase's name and the fraction done.
        cuda: CUDA; None is PyCUDA.
        library: the library; None imports it.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineNotInstalledError: a package is missing.
        OutOfMemoryError: the weights do not fit on the GPU.
        EngineError: there is no GPU, the settings exclude each other, or no plan could be built or loaded.

    """
    library = library or load_library(library_name)
    with ExitStack() as owner:
        device = (cuda or _load_cuda()).open_device(options.device)
        owner.callback(device.close)
        model = inspect_model(path)
        if options.cuda_graphs and not library.is_ahead_of_time:
            _require_graphs(device)
        request = request_plan(model.spec, options, target_of(library, device))
        models = PreparedModels(options.cache_folder, options.cache_folder_gib)
        prepared = models.open(path, request.form, progress)
        owner.callback(prepared.close)
        plans = Plans(prepared.folder.parent, options.cache_folder_gib)
        log = TrtLog(library)
        with device.activate():
            loaded = _load(library, log, device, plans, prepared, request, progress)
        owner.pop_all()
    return TrtEngine(loaded, device, prepared, options)


class TrtEngine:
    """A plan in the runtime: one ICudaEngine, its weights loaded once, shared by all contexts."""

    def __init__(
        self, loaded: LoadedPlan, device: Device, prepared: PreparedModel, options: EngineOptions
    ) -> None:
        """Own a loaded plan, the device that it is on, and the prepared model that it was made of."""
        self._loaded: LoadedPlan | None = loaded
        self._device = device
        self._prepared = prepared
        self._options = options
        self._name = loaded.library.name
        self._contexts: set[TrtContext] = set()
        self._lock = threading.Condition()  # contexts are made and closed on threads of their own
        spec = prepared.model.spec
        self._model = replace(prepared.model, spec=replace(spec, context_length=row_length(spec, options)))

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._name

    @property
    def model(self) -> ModelInfo:
        """What the engine was made from; its context is as long as a row of the cache allows."""
        return self._model

    def create_context(self) -> TrtContext:
        """Make a context on the calling thread.

        Raises:
            OutOfMemoryError: the cache does not fit in the memory left.
            EngineError: CUDA or TensorRT refused it, or the engine is closed.

        """
        with self._lock:  # one at a time: each looks at what is free, and takes its share
            if self._loaded is None:
                raise EngineError("the engine is closed")
            num_left = max(1, self._options.num_contexts - len(self._contexts))
            context = TrtContext(self._loaded, self._device, self._options, num_left, self._on_closed)
            self._contexts.add(context)
        _LOG.info(
            "a context with %d rows of %d tokens, %.2f GiB of cache",
            context.cache.num_blocks,
            context.cache.block_size,
            context.cache.num_blocks * context.cache.bytes_per_block / GIB,
        )
        return context

    def close(self) -> None:
        """Free the weights, after every context is closed. Closing twice is allowed."""
        with self._lock:
            if self._loaded is None:
                return
            # A worker that is stopped may still be closing its own.
            if not self._lock.wait_for(lambda: not self._contexts, _CLOSE_S):
                # Of a thread that hangs in the driver: freeing beneath it would be worse.
                _LOG.warning("%d contexts are still open; the GPU's memory stays taken", len(self._contexts))
                return
            with self._device.activate():
                self._loaded.close()
            self._loaded = None
            self._device.close()
            self._prepared.close()

    def _on_closed(self, context: TrtContext) -> None:
        with self._lock:
            self._contexts.discard(context)
            self._lock.notify_all()


def _load(
    library: TrtLibrary,
    log: TrtLog,
    device: Device,
    plans: Plans,
    prepared: PreparedModel,
    request: PlanRequest,
    progress: Progress,
) -> LoadedPlan:
    """Open the plan and load it; one that was kept and is refused is built again, once.

    Raises:
        OutOfMemoryError: the weights do not fit on the GPU.
        EngineError: no plan could be built, or the runtime refuses even a new one.

    """
    interface = Interface(prepared.model.spec, request.form, request.shape)
    while True:
        plan = open_plan(library, log, plans, prepared, request, _saying_so(library, progress))
        try:
            engine = _deserialize(library, log, device, plan)
            faults = (
                [log.quote() or " (it says nothing)"] if engine is None else interface.faults(library, engine)
            )
            if not faults:
                return LoadedPlan(library, log, engine, interface)
            engine = None
            reason = "; ".join(faults).strip()
            plan.reject(reason)
            if plan.build_s is not None:
                raise EngineError(
                    f"{library.name} {library.version} built a plan of {prepared.model.name} for "
                    f"{request.target.label} and does not take it on {device.name}: {reason}"
                )
        finally:
            plan.close()


def _deserialize(library: TrtLibrary, log: TrtLog, device: Device, plan: Plan) -> Any:
    """Load a plan; None if the runtime refuses it.

    Raises:
        OutOfMemoryError: the weights do not fit.
        CudaDeviceLostError: the device is lost.

    """
    free_bytes, total_bytes = device.memory_info()
    runtime = library.module.Runtime(log.logger)
    log.clear()
    engine = runtime.deserialize_cuda_engine(plan.data)
    if engine is None:
        device.memory_info()  # raises if the device is lost
        if plan.data.nbytes > free_bytes or "out of memory" in log.quote().lower():
            raise OutOfMemoryError(
                f"the plan takes {plan.data.nbytes / GIB:.2f} GiB, and of the {total_bytes / GIB:.2f} GiB of "
                f"{device.name} {free_bytes / GIB:.2f} are free; free some, or take a smaller model or "
                f"weights of fewer bits{log.quote()}"
            )
    return engine


def _saying_so(library: TrtLibrary, progress: Progress) -> Progress:
    """Say once, when a plan is built, what to expect."""
    said = False

    def report(phase: str, done: float) -> None:
        nonlocal said
        if not said:
            said = True
            _LOG.info(
                "%s builds a plan, once for this model, these settings and this kind of GPU; that takes from "
                "seconds to many minutes, and the next start takes it off the disk",
                library.name,
            )
        progress(phase, done)

    return report


def _require_graphs(device: Device) -> None:
    """Find out now, not in the first step, whether recording is possible."""
    with device.activate():
        stream = device.stream()
        try:
            device.begin_capture(stream)
            device.end_capture(stream).close()
        finally:
            stream.close()


def _load_cuda() -> Cuda:
    from engines.cuda import PyCuda

    return PyCuda()
