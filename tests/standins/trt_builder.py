# ruff: noqa: ARG002
"""TensorRT's building half on ONNX files: networks, parser, profiles, and plans that hold the graph."""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from tests.standins.trt_names import (
    BuilderFlag,
    ComputeCapability,
    DataType,
    Dims,
    ErrorCode,
    HardwareCompatibilityLevel,
    IHostMemory,
    ILogger,
    IProgressMonitor,
    LayerType,
    MemoryPoolType,
    ProfilingVerbosity,
    Severity,
    check_made,
)

MAGIC = b"stand-in plan 1\n"
DIGEST_BYTES = 32

_TYPES: dict[int, DataType] = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.INT64: DataType.INT64,
    TensorProto.INT32: DataType.INT32,
    TensorProto.BOOL: DataType.BOOL,
}
_DOMAINS = ("", "ai.onnx", "trt.plugins")

Shape = tuple[int, ...]
Bounds = dict[str, tuple[Shape, Shape, Shape]]
"""Least, optimum and greatest shape of each dynamic input."""


@dataclass(frozen=True, slots=True)
class ITensor:
    name: str
    dtype: DataType
    shape: Dims
    dims: tuple[int | str, ...]
    """As ONNX has them, with the names of what is dynamic."""
    is_network_input: bool

    @property
    def is_network_output(self) -> bool:
        return not self.is_network_input

    @property
    def is_shape_tensor(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ILayer:
    name: str
    type: LayerType


@dataclass(eq=False)
class INetworkDefinition:
    """A network, filled by the parser."""

    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    layers: list[ILayer] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Output by output, the input that it is updated in place of."""
    model: bytes = b""
    """The graph as ONNX Runtime takes it."""
    folder: str = ""
    """Where its weights are."""
    name: str = "network"

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> ITensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def get_output(self, index: int) -> ITensor | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def get_layer(self, index: int) -> ILayer | None:
        return self.layers[index] if index < len(self.layers) else None


@dataclass(frozen=True, slots=True)
class ParserError:
    _desc: str
    _node: int = -1
    _code: ErrorCode = ErrorCode.UNSUPPORTED_NODE

    def desc(self) -> str:
        return self._desc

    def node(self) -> int:
        return self._node

    def code(self) -> ErrorCode:
        return self._code

    def node_name(self) -> str:
        return ""

    def node_operator(self) -> str:
        return ""

    def file(self) -> str:
        return ""

    def func(self) -> str:
        return "parse"

    def line(self) -> int:
        return 0


class OnnxParser:
    """Reads a graph and refuses what TensorRT's own parser refuses of a cache update."""

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self._logger = check_made(logger, ILogger)
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def clear_errors(self) -> None:
        self._errors.clear()

    def parse_from_file(self, model: str) -> bool:
        path = Path(_text(model))
        if not path.is_file():
            return self._refuse(f"Input file cannot be found, or is not a regular file: {path}")
        return self.parse(path.read_bytes(), str(path))

    def parse(self, model: Any, path: str | None = None) -> bool:
        try:
            proto = onnx.load_model_from_string(bytes(model))
        except Exception:  # whatever protobuf raises
            return self._refuse("Failed to parse ONNX model from the given buffer")
        network, graph = self._network, proto.graph
        constants = {tensor.name for tensor in graph.initializer}
        network.inputs += [_tensor(v, True) for v in graph.input if v.name not in constants]
        network.outputs += [_tensor(v, False) for v in graph.output]
        outputs = {tensor.name for tensor in network.outputs}
        inputs = {tensor.name: tensor for tensor in network.inputs}
        for index, node in enumerate(graph.node):
            if node.domain not in _DOMAINS or node.op_type.startswith("TRT_"):
                return self._refuse(f"no importer registered for op: {node.op_type}", index)
            if node.op_type == "TensorScatter":
                cache = inputs.get(node.input[0])
                if cache is None or node.output[0] not in outputs:
                    return self._refuse("a cache update needs a network input and a network output", index)
                if cache.shape[2] < 0:
                    return self._refuse(f"{cache.name}: the length of a cache must be static", index)
                network.aliases[node.output[0]] = cache.name
            is_update = node.op_type == "TensorScatter"
            kind = LayerType.KV_CACHE_UPDATE if is_update else LayerType.CAST
            network.layers.append(ILayer(node.name, kind))
            for attribute in [a for a in node.attribute if a.name.startswith("TRT_")]:
                node.attribute.remove(attribute)
        used = {name for node in graph.node for name in node.input}
        for tensor in network.inputs:
            if tensor.name not in used:
                self._logger.log(Severity.WARNING, f"Unused Input: {tensor.name}")
        network.model = proto.SerializeToString()
        network.folder = str(Path(path).resolve().parent) if path else ""
        return True

    def _refuse(self, words: str, node: int = -1) -> bool:
        self._errors.append(ParserError(f"Assertion failed: {words}", node))
        self._logger.log(Severity.ERROR, f"In node {node} (parse): {words}")
        return False


class IOptimizationProfile:
    """The shapes that a plan is made for."""

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.bounds: Bounds = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002
        least, best, most = (tuple(int(n) for n in shape) for shape in (min, opt, max))
        self.bounds[_text(input)] = least, best, most

    def get_shape(self, input: str) -> list[Dims]:  # noqa: A002
        return [Dims(shape) for shape in self.bounds.get(input, ())]

    def __bool__(self) -> bool:
        for name, (least, best, most) in self.bounds.items():
            ordered = all(a <= b <= c for a, b, c in zip(least, best, most, strict=False))
            if not ordered or not len(least) == len(best) == len(most):
                self._logger.log(
                    Severity.ERROR,
                    f"Invalid optimization profiles for input tensors {name}, please ensure that the "
                    "optimization profiles satisfy MIN<=OPT<=MAX",
                )
                return False
        return True


class ITimingCache:
    """Keeps how often it was used, so that its way from build to build can be followed."""

    def __init__(self, blob: bytes) -> None:
        self.num_builds = int(blob.removeprefix(b"timing ")) if blob.startswith(b"timing ") else 0

    def serialize(self) -> IHostMemory:
        return IHostMemory(b"timing %d" % self.num_builds)

    def combine(self, input_cache: "ITimingCache", ignore_mismatch: bool) -> bool:
        self.num_builds += input_cache.num_builds
        return True

    def reset(self) -> bool:
        self.num_builds = 0
        return True


class IBuilderConfig:
    """Settings of a build."""

    def __init__(self, logger: ILogger, *, rtx: bool) -> None:
        self._logger = logger
        self._rtx = rtx
        self._timing_cache: ITimingCache | None = None
        self._flags: set[BuilderFlag] = set()
        self._pools: dict[MemoryPoolType, int] = {}
        self._targets = [ComputeCapability.CURRENT]
        self._monitor: IProgressMonitor | None = None
        self.profiles: list[IOptimizationProfile] = []
        self.max_aux_streams = -1
        self.builder_optimization_level = 3
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def progress_monitor(self) -> IProgressMonitor | None:
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, monitor: IProgressMonitor | None) -> None:
        self._monitor = None if monitor is None else check_made(monitor, IProgressMonitor)

    @property
    def num_compute_capabilities(self) -> int:
        return len(self._targets)

    @num_compute_capabilities.setter
    def num_compute_capabilities(self, count: int) -> None:
        self._targets = [ComputeCapability.CURRENT] * count

    def set_compute_capability(self, compute_capability: ComputeCapability, index: int) -> bool:
        if not self._rtx:
            raise AttributeError("set_compute_capability")
        self._targets[index] = ComputeCapability(compute_capability)
        return True

    def get_compute_capability(self, index: int) -> ComputeCapability:
        return self._targets[index]

    def set_flag(self, flag: BuilderFlag) -> None:
        self._flags.add(BuilderFlag(flag))

    def clear_flag(self, flag: BuilderFlag) -> None:
        self._flags.discard(flag)

    def get_flag(self, flag: BuilderFlag) -> bool:
        return flag in self._flags

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self._pools[MemoryPoolType(pool)] = int(pool_size)

    def get_memory_pool_limit(self, pool: MemoryPoolType) -> int:
        return self._pools.get(pool, 1 << 30)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        if not profile:
            self._logger.log(Severity.ERROR, "Parameter check failed, condition: profile->isValid()")
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache:
        self._warn_of_timing()
        return ITimingCache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._warn_of_timing()
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        self._warn_of_timing()
        return self._timing_cache

    def _warn_of_timing(self) -> None:
        if self._rtx:
            warnings.warn(
                "Use Deprecated in TensorRT-RTX 1.2. Timing cache operations are no-ops in TensorRT-RTX. "
                "instead.",
                DeprecationWarning,
                stacklevel=3,
            )


class Builder:
    """Makes plans. One thread at a time."""

    def __init__(
        self,
        logger: ILogger,
        *,
        rtx: bool,
        version: str,
        target: Callable[[], str],
        begin: Callable[[], bool],
    ) -> None:
        """`target` names the GPU, `begin` counts a build and says whether it may succeed."""
        self.logger = check_made(logger, ILogger)
        self.max_threads = 1
        self._rtx = rtx
        self._version = version
        self._target = target
        self._begin = begin

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self.logger, rtx=self._rtx)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile(self.logger)

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        if not self._begin():
            return self._no_plan("Error Code 10: Could not find any implementation for node")
        if not network.outputs:
            return self._no_plan("Network must have at least one output")
        for index, profile in enumerate(config.profiles or [IOptimizationProfile(self.logger)]):
            for tensor in network.inputs:
                if -1 in tensor.shape and not _fits(tensor.shape, profile.bounds.get(tensor.name)):
                    return self._no_plan(f"{tensor.name}: no valid shapes in optimization profile {index}")
        if not self._report(config.progress_monitor):
            return self._no_plan("The build was cancelled by the progress monitor")
        timing_cache = config.__dict__["_timing_cache"]
        if timing_cache is not None:
            timing_cache.num_builds += 1
        targets = [config.get_compute_capability(i).name for i in range(config.num_compute_capabilities)]
        return IHostMemory(
            _plan(network, config, self._version, self._target() if not self._rtx else targets)
        )

    def _report(self, monitor: IProgressMonitor | None) -> bool:
        """Go through phases as the real builder's are nested, and stop where the monitor says so."""
        if monitor is None:
            return True
        phases = (
            ("Building engine", None, 2),
            ("Building engine from subgraph", "Building engine", 3),
            ("Timing graph nodes", "Building engine from subgraph", 4),
        )
        for name, parent, num_steps in phases:
            monitor.phase_start(name, parent, num_steps)
        goes_on = all(
            monitor.step_complete(name, step)
            for name, _, num_steps in reversed(phases)
            for step in range(num_steps)
        )
        for name, _, _ in reversed(phases):
            monitor.phase_finish(name)
        return goes_on

    def _no_plan(self, words: str) -> IHostMemory | None:
        self.logger.log(Severity.ERROR, f"IBuilder::buildSerializedNetwork: {words}")
        return None


def _plan(network: INetworkDefinition, config: IBuilderConfig, version: str, target: Any) -> bytes:
    weights = sum(
        file.stat().st_size
        for file in {
            Path(network.folder) / entry.value
            for tensor in onnx.load_model_from_string(network.model).graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )
    head = {
        "version": version,
        "target": target,
        "folder": network.folder,
        "weights_bytes": weights + len(network.model),
        "profiles": [profile.bounds for profile in config.profiles] or [{}],
        "aliases": network.aliases,
        "inputs": [[t.name, int(t.dtype), list(t.dims)] for t in network.inputs],
        "outputs": [[t.name, int(t.dtype), list(t.dims)] for t in network.outputs],
        "is_capturable": config.get_flag(BuilderFlag.REQUIRE_USER_ALLOCATION),
    }
    packed = json.dumps(head).encode()
    body = len(packed).to_bytes(8, "little") + packed + network.model
    return MAGIC + hashlib.sha256(body).digest() + body


def _fits(shape: Dims, bounds: tuple[Shape, Shape, Shape] | None) -> bool:
    """Whether bounds have the rank of a shape, and its static sizes."""
    if bounds is None:
        return False
    return all(
        len(bound) == len(shape) and all(n in (-1, b) for n, b in zip(shape, bound, strict=True))
        for bound in bounds
    )


def _tensor(value: onnx.ValueInfoProto, is_input: bool) -> ITensor:
    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or int(dim.dim_value) for dim in kind.shape.dim)
    shape = Dims(-1 if isinstance(dim, str) else dim for dim in dims)
    return ITensor(value.name, _TYPES[kind.elem_type], shape, dims, is_input)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"incompatible function arguments: {value!r} is no str")
    return value
