"""Building plans ahead of time, so that no server has to when it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.api import EngineError
from engines.cuda_api import Cuda, Device
from engines.linear_memory import context_length
from engines.options import EngineOptions
from engines.plan_key import PlanTarget
from engines.plans import PLAN_FILE, Plans
from engines.prepared import PreparedModels
from engines.registry import inspect_model
from engines.trt_build import PHASE
from engines.trt_library import TrtLibrary, TrtLog, load_library
from engines.trt_plan import PlanRequest, open_plan, request_plan, target_of


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan that is on the disk now."""

    path: Path
    library: str
    size_bytes: int
    build_s: float | None
    """None if it was there already."""
    request: PlanRequest
    """What it was built for."""
    options: EngineOptions
    """With these in full an engine finds the plan."""


def build_ahead(
    library_name: str,
    path: Path,
    options: EngineOptions,
    capabilities: Sequence[tuple[int, int]] = (),
    progress: Callable[[str, float], None] | None = None,
    *,
    cuda: Cuda | None = None,
    library: TrtLibrary | None = None,
) -> list[MadePlan]:
    """Build the plans that an engine with the same settings will look for.

    Args:
        library_name: one of `engines.trt_library.LIBRARY_NAMES`.
        path: a GGUF file or a Hugging Face folder.
        options: the engine's settings.
        capabilities: compute capabilities to build for, such as (8, 9); none is this machine's GPU.
        progress: called with a phase's name and the fraction done.
        cuda: CUDA; None is PyCUDA.
        library: the library; None imports it.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineNotInstalledError: a package is missing.
        EngineError: there is no such target, or no plan could be built or kept.

    """
    library = library or load_library(library_name)
    targets = [_checked(library, capability) for capability in dict.fromkeys(capabilities)]
    spec = inspect_model(path).spec
    if targets:
        requests = [request_plan(spec, options, target) for target in targets]
        return [_build(library, path, options, request, progress) for request in requests]
    device = _open_device(library, options, cuda)
    try:
        with device.activate():
            request = request_plan(spec, options, target_of(library, device))
            return [_build(library, path, options, request, progress)]
    finally:
        device.close()


def parse_capability(text: str) -> tuple[int, int]:
    """Read a compute capability: "8.9", "89", "sm89" and "sm_89" are the same.

    Raises:
        ValueError: it is none of these.

    """
    digits = text.strip().lower().removeprefix("sm").removeprefix("_")
    major, dot, minor = digits.partition(".")
    if not dot:
        major, minor = digits[:-1], digits[-1:]
    if not (major.isdecimal() and minor.isdecimal() and len(minor) == 1 and len(major) <= 2):
        raise ValueError(f"{text!r} is no compute capability; it is written as 8.9, 89 or sm89")
    return int(major), int(minor)


def _checked(library: TrtLibrary, capability: tuple[int, int]) -> PlanTarget:
    target = PlanTarget(capability)
    if not library.is_ahead_of_time:
        raise EngineError(
            f"{library.name} builds a plan for the GPU of the machine that it runs on, and for no other; "
            "leave the target out, or take the engine tensorrt_rtx"
        )
    if target.sm not in library.targets:
        raise EngineError(
            f"{library.name} {library.version} builds no plans for compute capability "
            f"{target.capability_text}; it builds them for {_list(library)}"
        )
    return target


def _list(library: TrtLibrary) -> str:
    return ", ".join(f"{sm // 10}.{sm % 10}" for sm in library.targets)


def _open_device(library: TrtLibrary, options: EngineOptions, cuda: Cuda | None) -> Device:
    try:
        if cuda is None:
            from engines.cuda import PyCuda

            cuda = PyCuda()
        return cuda.open_device(options.device)
    except EngineError as error:
        if library.is_ahead_of_time:
            raise EngineError(
                f"{library.name} needs to be told which GPUs to build for: name a compute capability. "
                f"{library.name} {library.version} builds for {_list(library)}, such as --target 8.9. "
                f"Without one it asks this machine's GPU, which cannot be used: {error}"
            ) from error
        raise EngineError(
            f"{library.name} builds a plan on the GPU that will run it, and none can be used here ({error}). "
            "Build it there, or take the engine tensorrt_rtx, which builds for RTX cards without one"
        ) from error


def _build(
    library: TrtLibrary,
    path: Path,
    options: EngineOptions,
    request: PlanRequest,
    progress: Callable[[str, float], None] | None,
) -> MadePlan:
    def report(phase: str, done: float) -> None:
        if progress is not None:
            progress(f"build for {request.target.capability_text}" if phase == PHASE else phase, done)

    models = PreparedModels(options.cache_folder, options.cache_folder_gib)
    prepared = models.open(path, request.form, report)
    try:
        if prepared.folder.parent != models.folder:
            raise EngineError(
                f"the cache folder {models.folder} cannot be written, so that a plan could not be kept; "
                "choose another one"
            )
        plans = Plans(prepared.folder.parent, options.cache_folder_gib)
        plan = open_plan(library, TrtLog(library), plans, prepared, request, report)
        try:
            full = replace(
                options,
                weights=request.form.weights,
                precision=request.form.activations,
                max_context=context_length(prepared.model.spec, options),
            )
            return MadePlan(
                plan.folder / PLAN_FILE, library.name, plan.data.nbytes, plan.build_s, request, full
            )
        finally:
            plan.close()
    finally:
        prepared.close()
