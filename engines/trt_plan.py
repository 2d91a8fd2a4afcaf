"""The plan of a prepared model: what is asked of the builder, and where the result is kept.

`streamsrv build` and the engines come here with the same settings and so find the same plan.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engines.api import EngineError
from engines.cuda_api import Device
from engines.form import Dialect, GraphForm
from engines.linear_memory import context_length
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.plan_key import PlanKey, PlanShape, PlanTarget
from engines.plans import Plan, Plans
from engines.preparation import GRAPH_FILE
from engines.prepared import PreparedModel
from engines.spec import Family, ModelSpec
from engines.trt_build import build_plan
from engines.trt_graph import AttentionForm
from engines.trt_library import TrtLibrary, TrtLog

NUM_CANDIDATES = 256
"""Best tokens that the graph gives beside the logits. TensorRT's limit is 3,840."""
_PLAIN_WEIGHTS = {
    Precision.F16: WeightFormat.F16,
    Precision.BF16: WeightFormat.BF16,
    Precision.F32: WeightFormat.FLOAT32,
}
_LEAST_SM: dict[WeightFormat | Precision, int] = {
    WeightFormat.BF16: 80,
    WeightFormat.INT4: 80,
    WeightFormat.FP8: 89,
    Precision.BF16: 80,
}
"""Compute capabilities from which on a type is known, as TensorRT-RTX's builder says."""
_CELLS_ALIGNMENT = 64
_ADDRESS_ALIGNMENT = 256
_DECODE_BORDERS = (8,)
"""Batches that decode profiles are tuned for, below the greatest. In TensorRT-RTX's plans one more such
profile cost 3 % in size; one for a batch of 1 alone cost 50 %, for weights in another layout."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What decides about a plan, without the model's content."""

    form: GraphForm
    shape: PlanShape
    target: PlanTarget
    attention: AttentionForm = AttentionForm.MASK


def target_of(library: TrtLibrary, device: Device) -> PlanTarget:
    """Name the hardware: the capability alone where a plan is compiled further when it is loaded."""
    if library.is_ahead_of_time:
        return PlanTarget(device.compute_capability)
    return PlanTarget(device.compute_capability, device.name, device.driver_version)


def request_plan(spec: ModelSpec, options: EngineOptions, target: PlanTarget) -> PlanRequest:
    """Turn the settings into what is asked of the builder.

    Raises:
        EngineError: the settings ask for something that no plan has, or that the target has not.

    """
    form = graph_form(spec, options)
    for kind in (form.weights, form.activations):
        least = _LEAST_SM.get(kind, 0)
        if target.sm < least:
            precision = Precision.F32 if _overflows(spec) else Precision.F16
            other = "int8 weights" if isinstance(kind, WeightFormat) else f"precision {precision.value}"
            raise EngineError(
                f"{kind.value} needs a GPU of compute capability {least // 10}.{least % 10} or above, and "
                f"this is one of {target.capability_text}; take {other}"
            )
    return PlanRequest(form, plan_shape(spec, options), target)


def graph_form(spec: ModelSpec, options: EngineOptions) -> GraphForm:
    """Choose the graph's form: 16-bit floats where the settings leave it open.

    Raises:
        EngineError: the settings exclude each other.

    """
    weights, activations = options.weights, options.precision
    if activations is Precision.AUTO:
        activations = {WeightFormat.BF16: Precision.BF16, WeightFormat.FLOAT32: Precision.F32}.get(
            weights, Precision.BF16 if _overflows(spec) else Precision.F16
        )
    if activations is Precision.F16 and _overflows(spec):
        raise EngineError(
            f"{spec.name} cannot be computed in f16: the sums between its layers exceed what that holds; "
            "take precision bf16 or f32"
        )
    if weights is WeightFormat.AUTO:
        weights = _PLAIN_WEIGHTS[activations]
    if options.cache_type not in (CacheType.AUTO, CacheType(activations.value)):
        raise EngineError(
            f"a cache of {options.cache_type.value} does not go with activations of {activations.value}: "
            "TensorRT's attention reads keys and values in the activations' type; leave the cache's type out"
        )
    return GraphForm(Dialect.LINEAR, weights, activations, min(NUM_CANDIDATES, spec.vocab_size))


def _overflows(spec: ModelSpec) -> bool:
    """Whether activations exceed float16's 65,504: Gemma 3's reach 104,000 in the model of 270M weights."""
    return spec.family is Family.GEMMA3


def plan_shape(spec: ModelSpec, options: EngineOptions) -> PlanShape:
    """Choose the sizes: the settings', within what the model knows."""
    max_len = _num_cells(spec, context_length(spec, options))
    borders = [border for border in _DECODE_BORDERS if border < options.max_batch]
    return PlanShape(
        max_batch=options.max_batch,
        max_piece=min(options.max_step_tokens, max_len),
        max_len=max_len,
        # The buffers of a decode run's logits then hold a prefill run's, too.
        max_logit_rows=options.max_batch,
        decode_batches=(*borders, options.max_batch),
    )


def _num_cells(spec: ModelSpec, context: int) -> int:
    """Choose the cells of a row, for as many tokens: more where that is better for kernels and addresses.

    A run's rows begin at any row, and TensorRT wants every address to be a multiple of 256; two bytes a
    number are the least. Positions beyond the model's context have no angles, so they have no cells.
    """
    step = _ADDRESS_ALIGNMENT // math.gcd(_ADDRESS_ALIGNMENT, 2 * spec.num_kv_heads * spec.head_dim)
    if context > _CELLS_ALIGNMENT:
        step = max(step, _CELLS_ALIGNMENT)
    cells = -(-context // step) * step
    return cells if cells <= spec.context_length else max(spec.context_length // step * step, step)


def open_plan(
    library: TrtLibrary,
    log: TrtLog,
    plans: Plans,
    prepared: PreparedModel,
    request: PlanRequest,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """Take a model's plan off the disk, or build it.

    Raises:
        EngineError: it could not be built or kept.

    """
    target = request.target
    key = PlanKey(
        model=prepared.folder.name,
        form=request.form.label,
        library=library.name,
        version=library.version,
        target=target,
        shape=request.shape,
        flags=(f"attention={request.attention.value}", f"code={_code_digest()}"),
    )

    def build() -> memoryview:
        built = build_plan(
            library,
            log,
            prepared.folder / GRAPH_FILE,
            request.shape,
            compute_capabilities=(target.sm,) if library.is_ahead_of_time else (),
            attention=request.attention,
            timing_cache=plans.timing_cache(library.name, library.version, target),
            progress=progress,
        )
        if built.timing_cache:
            plans.keep_timing_cache(library.name, library.version, target, built.timing_cache)
        return built.serialized

    title = (
        f"{prepared.model.name} ({request.form.label}), {library.name} {library.version}, for "
        f"{target.label}, {request.shape.max_batch} sequences of up to {request.shape.max_len} tokens"
    )
    return plans.open(key, build, title)


@cache
def _code_digest() -> str:
    """Hash the modules that decide what is built of a graph."""
    folder = Path(__file__).parent
    modules = ("plan_key.py", "trt_build.py", "trt_graph.py")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in modules)).hexdigest()[:8]
