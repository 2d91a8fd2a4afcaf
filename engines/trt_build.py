"""Building a plan: from a prepared graph, through TensorRT's parser and builder, to bytes."""

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from engines.api import EngineError
from engines.plan_key import Bounds, PlanShape, Profile
from engines.trt_graph import AttentionForm, TensorInfo, TrtGraph, read_graph
from engines.trt_library import TENSORRT, TrtLibrary, TrtLog

_LOG = logging.getLogger(__name__)

PHASE = "build"
"""What progress is reported under."""
_STEP = 0.005
"""Progress is reported in steps of this size: the builder tells of tens of thousands."""
_LONG_PHASE = "Computing profile costs"
"""Where the builder spends its time (all but 0.5 s of 14 for a model of 135 M parameters); what comes before
is over at once, though it is most of the steps."""
_BEFORE = 0.05
"""The share of the bar that what comes before it gets."""


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """What the builder gives."""

    serialized: memoryview
    timing_cache: bytes = b""
    """For the next build; empty where the library keeps none."""


def build_plan(
    library: TrtLibrary,
    log: TrtLog,
    graph_path: Path,
    shape: PlanShape,
    *,
    compute_capabilities: Sequence[int] = (),
    attention: AttentionForm = AttentionForm.MASK,
    timing_cache: bytes = b"",
    workspace_bytes: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> BuiltPlan:
    """Build a plan of a prepared linear graph, on the calling thread and, with `tensorrt`, its GPU.

    Ctrl-C stops it at the builder's next step.

    Args:
        library: which TensorRT.
        log: takes its lines; what it holds of older ones is dropped.
        graph_path: the prepared graph, with its weights beside it.
        shape: the sizes to build for.
        compute_capabilities: what to build for ahead of time, such as 89 for 8.9; none is this machine's GPU.
        attention: how attention knows which cells hold tokens.
        timing_cache: what an earlier build gave.
        workspace_bytes: device memory that a kernel may take for itself; None leaves it to the library.
        progress: called with a phase's name and the fraction done.

    Raises:
        EngineError: the graph was not understood, or not as it is meant, or no plan could be built of it.

    """
    try:
        return _build_plan(
            library,
            log,
            graph_path,
            shape,
            compute_capabilities=compute_capabilities,
            attention=attention,
            timing_cache=timing_cache,
            workspace_bytes=workspace_bytes,
            monitor=_Monitor(progress),
        )
    except BaseException as error:
        # The traceback would keep TensorRT's objects, and the error is in a cycle with what stopped the
        # builder: they would be freed by a garbage collection that may come in a later builder's calls to us.
        traceback.clear_frames(error.__traceback__)
        raise


def _build_plan(
    library: TrtLibrary,
    log: TrtLog,
    graph_path: Path,
    shape: PlanShape,
    *,
    compute_capabilities: Sequence[int],
    attention: AttentionForm,
    timing_cache: bytes,
    workspace_bytes: int | None,
    monitor: "_Monitor",
) -> BuiltPlan:
    trt = library.module
    log.clear()
    graph = read_graph(graph_path, shape.max_len, attention)
    builder = trt.Builder(log.logger)
    parsed = parse(library, log, graph, builder)
    config = builder.create_builder_config()
    # Everything on the context's own stream: events and CUDA graphs then cover all of a step.
    config.max_aux_streams = 0
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    if compute_capabilities:
        _set_targets(library, config, compute_capabilities)
    # The contexts of all workers use the same profiles: since TensorRT 10 that is always allowed, by its
    # documentation (it was the preview feature PROFILE_SHARING_0806, which is gone in 11).
    for profile in shape.profiles:
        if config.add_optimization_profile(make_profile(builder, graph.inputs, profile)) < 0:
            raise EngineError(f"{library.name} refused the {profile}{log.quote()}")
    cache = None
    if library.name == TENSORRT:  # the other one measures nothing when it builds
        cache = config.create_timing_cache(timing_cache)
        config.set_timing_cache(cache, False)
    config.progress_monitor = make_monitor(trt, monitor)
    with _deferring_interrupts(monitor):
        plan = builder.build_serialized_network(parsed.network, config)
    if monitor.stop is not None:
        raise monitor.stop
    if plan is None:
        raise EngineError(f"{library.name} could not build a plan of {graph_path}{log.quote()}")
    _refuse_warnings(library, log, graph)
    serialized = memoryview(plan).cast("B")
    return BuiltPlan(serialized, b"" if cache is None else bytes(memoryview(cache.serialize())))


@dataclass(frozen=True, slots=True)
class ParsedNetwork:
    """A network, and its parser: that has the weights, so it must live until the plan is built."""

    network: Any
    """The INetworkDefinition."""
    parser: Any
    """The OnnxParser."""


def parse(library: TrtLibrary, log: TrtLog, graph: TrtGraph, builder: Any) -> ParsedNetwork:
    """Make the network of a graph, and check that it is what the graph says.

    Raises:
        EngineError: the parser refused a node, left an input unused, or understood another interface.

    """
    trt = library.module
    network = builder.create_network(0)  # strongly typed: the graph says in what is computed
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse(graph.model, str(graph.path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        said = "; ".join(f"{error.desc()} [{error.node_operator()} {error.node_name()}]" for error in errors)
        raise EngineError(f"{library.name} does not understand {graph.path}: {said or log.quote()}")
    _refuse_warnings(library, log, graph)
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    _check_tensors(library, graph.inputs, inputs)
    _check_tensors(library, graph.outputs, outputs)
    # Each of these shares its output's memory with its input: a cache that became anything else is a copy.
    kinds = [network.get_layer(index).type for index in range(network.num_layers)]
    num_updates = kinds.count(trt.LayerType.KV_CACHE_UPDATE)
    if num_updates != graph.num_caches:
        raise EngineError(
            f"{library.name} made {num_updates} cache updates of {graph.num_caches} in {graph.path}; the "
            "others would not be in place"
        )
    return ParsedNetwork(network, parser)


def make_profile(builder: Any, inputs: Sequence[TensorInfo], profile: Profile) -> Any:
    """Make the IOptimizationProfile that gives each varying input its bounds."""
    bounds: dict[str, Bounds] = {"B": profile.batch, "S": profile.tokens, "R": profile.logit_rows}
    trt_profile = builder.create_optimization_profile()
    for info in inputs:
        if all(isinstance(size, int) for size in info.shape):
            continue
        shapes = [
            tuple(size if isinstance(size, int) else bounds[size][which] for size in info.shape)
            for which in range(3)
        ]
        trt_profile.set_shape(info.name, *shapes)
    return trt_profile


def _check_tensors(library: TrtLibrary, infos: Sequence[TensorInfo], tensors: list[Any]) -> None:
    """Refuse a network whose inputs or outputs are not those of the graph."""
    found = sorted(tensor.name for tensor in tensors)
    if found != sorted(info.name for info in infos):
        raise EngineError(f"{library.name} made other inputs or outputs of the graph: {', '.join(found)}")
    expected = {info.name: info for info in infos}
    for tensor in tensors:
        info = expected[tensor.name]
        kind = getattr(library.module.DataType, info.kind)
        shape = tuple(tensor.shape)
        is_alike = len(shape) == len(info.shape) and all(
            size in (found, -1) for size, found in zip(shape, info.shape, strict=True)
        )
        if tensor.dtype != kind or not is_alike:
            raise EngineError(
                f"{library.name} made {info.name} {tensor.dtype} {shape}; the graph has {info.kind} "
                f"{info.shape}"
            )


def _refuse_warnings(library: TrtLibrary, log: TrtLog, graph: TrtGraph) -> None:
    if log.refusals:
        raise EngineError(
            f"{library.name} would not compute what {graph.path} says: {'; '.join(log.refusals)}"
        )


def _set_targets(library: TrtLibrary, config: Any, capabilities: Sequence[int]) -> None:
    unknown = [capability for capability in capabilities if capability not in library.targets]
    if unknown:
        raise EngineError(
            f"{library.name} {library.version} builds no plans for compute capability "
            f"{', '.join(map(str, unknown))}; it builds them for {', '.join(map(str, library.targets))}"
        )
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        config.set_compute_capability(getattr(library.module.ComputeCapability, f"SM{capability}"), index)


@contextmanager
def _deferring_interrupts(monitor: "_Monitor") -> Iterator[None]:
    """Have Ctrl-C stop the builder instead of being raised.

    It would be raised in one of the builder's calls to us, whichever is next, and most of them swallow what
    is raised. Signals go to the main thread: on any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        _LOG.warning("interrupted: the builder stops at its next step")
        monitor.stop = KeyboardInterrupt()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Monitor:
    """Follows the builder's nested phases as one fraction, and stops it on demand.

    The builder calls from the thread that builds and, by its documentation, from others.
    """

    def __init__(self, progress: Callable[[str, float], None] | None) -> None:
        self.stop: BaseException | None = None
        """Why the builder is to stop: what is raised when it has. It must not pass through its frames."""
        self._progress = progress or (lambda _phase, _done: None)
        self._phases: dict[str, tuple[str | None, int, int]] = {}
        """Parent, number of steps and steps done, by name."""
        self._reported = 0.0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        with self._lock:
            self._phases[name] = (parent, max(num_steps, 1), 0)

    def step(self, name: str) -> bool:
        """Count a step; False stops the builder."""
        try:
            with self._lock:
                if name in self._phases:
                    parent, num_steps, done = self._phases[name]
                    self._phases[name] = (parent, num_steps, done + 1)
                self._report()
        except BaseException as error:
            self.stop = self.stop or error
        return self.stop is None

    def finish(self, name: str) -> None:
        with self._lock:
            self._phases.pop(name, None)

    def _report(self) -> None:
        long_phase = self._phases.get(_LONG_PHASE)
        if long_phase is not None:
            parent = long_phase[0]
            within = self._fraction(parent if parent in self._phases else _LONG_PHASE)
            done = _BEFORE + (1 - _BEFORE) * within
        else:
            tops = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
            done = _BEFORE * max((self._fraction(name) for name in tops), default=0.0)
        if done >= self._reported + _STEP:
            self._reported = done
            self._progress(PHASE, min(done, 1.0))

    def _fraction(self, name: str) -> float:
        _, num_steps, done = self._phases[name]
        within = [self._fraction(child) for child, phase in self._phases.items() if phase[0] == name]
        return min((done + max(within, default=0.0)) / num_steps, 1.0)


def make_monitor(trt: Any, monitor: _Monitor) -> Any:
    """Wrap a monitor as the module's IProgressMonitor."""

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known only now
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            monitor.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002 - it counts itself
            return monitor.step(phase_name)

        def phase_finish(self, phase_name: str) -> None:
            monitor.finish(phase_name)

    return ProgressMonitor()
