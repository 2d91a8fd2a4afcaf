# ruff: noqa: ARG002
"""TensorRT's building half: profiles, settings, and plans that hold the graph."""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from tests.standins.trt_names import (
    BuilderFlag,
    ComputeCapability,
    Dims,
    HardwareCompatibilityLevel,
    IHostMemory,
    ILogger,
    IProgressMonitor,
    MemoryPoolType,
    ProfilingVerbosity,
    Severity,
    check_made,
)
from tests.standins.trt_network import INetworkDefinition, text_of

MAGIC = b"stand-in plan 1\n"
DIGEST_BYTES = 32

Shape = tuple[int, ...]
Bounds = dict[str, tuple[Shape, Shape, Shape]]
"""Least, optimum and greatest shape of each dynamic input."""


class IOptimizationProfile:
    """The shapes that a plan is made for."""

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.bounds: Bounds = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002
        least, best, most = (tuple(int(n) for n in shape) for shape in (min, opt, max))
        self.bounds[text_of(input)] = least, best, most

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
