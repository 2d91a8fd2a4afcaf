"""The plan of a prepared model: what is asked of the builder, and where the result is kept.

`streamsrv build` and the engines come here with the same settings and so find the same plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engines.api import EngineError
from engines.form import Dialect, GraphForm
from engines.options import EngineOptions, Precision, WeightFormat
from engines.plan_key import PlanKey, PlanShape, PlanTarget
from engines.plans import Plan, Plans
from engines.preparation import GRAPH_FILE
from engines.prepared import PreparedModel
from engines.spec import ModelSpec
from engines.trt_build import build_plan
from engines.trt_graph import AttentionForm
from engines.trt_library import TrtLibrary, TrtLog

NUM_CANDIDATES = 256
"""Best tokens that the graph gives beside the logits. TensorRT's limit is 3,840."""
_MAX_LEN = 4096
"""Tokens of a sequence where the settings say nothing: a row of the cache is reserved for as many."""
_DECODE_BORDERS = (1, 8, 32)
"""Batches that decode profiles are tuned for, below the greatest."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What decides about a plan, without the model's content."""

    form: GraphForm
    shape: PlanShape
    target: PlanTarget
    attention: AttentionForm = AttentionForm.MASK


def request_plan(spec: ModelSpec, options: EngineOptions, target: PlanTarget) -> PlanRequest:
    """Turn the settings into what is asked of the builder.

    Raises:
        EngineError: the settings ask for something that no plan has.

    """
    return PlanRequest(graph_form(spec, options), plan_shape(spec, options), target)


def graph_form(spec: ModelSpec, options: EngineOptions) -> GraphForm:
    """Choose the graph's form: activations in half precision unless asked otherwise.

    Raises:
        EngineError: the settings exclude each other.

    """
    activations = Precision.F16 if options.precision is Precision.AUTO else options.precision
    if activations is Precision.F32 and options.weights is not WeightFormat.FLOAT32:
        raise EngineError(
            f"precision f32 goes with weights float32, not {options.weights.value}, on TensorRT; "
            "leave one of them out"
        )
    return GraphForm(Dialect.LINEAR, options.weights, activations, min(NUM_CANDIDATES, spec.vocab_size))


def plan_shape(spec: ModelSpec, options: EngineOptions) -> PlanShape:
    """Choose the sizes: the settings', within what the model knows."""
    max_len = min(options.max_context or min(spec.context_length, _MAX_LEN), spec.context_length)
    borders = [border for border in _DECODE_BORDERS if border < options.max_batch]
    max_piece = min(options.max_step_tokens, max_len)
    return PlanShape(
        max_batch=options.max_batch,
        max_piece=max_piece,
        max_len=max_len,
        # The buffers of a decode run's logits then hold a prefill run's, too.
        max_logit_rows=min(options.max_batch, max_piece),
        decode_batches=(*borders, options.max_batch),
    )


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
        flags=(f"attention={request.attention.value}",),
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

    return plans.open(key, build)
