"""What is asked of TensorRT's builder for some settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines import trt_plan
from engines.api import EngineError
from engines.checkpoint import open_checkpoint
from engines.linear_memory import context_length
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.plan_key import PlanTarget
from engines.plans import Plans
from engines.prepared import PreparedModels
from engines.spec import Family, ModelSpec
from engines.trt_library import TENSORRT, TENSORRT_RTX, TrtLog
from engines.trt_plan import graph_form, open_plan, plan_shape, request_plan, target_of
from tests import tiny
from tests.conftest import TinyPaths
from tests.standins.cuda import StandInCuda
from tests.standins.tensorrt import StandInTensorrt

ADA = PlanTarget((8, 9))


@pytest.fixture
def spec(tiny_models: dict[str, TinyPaths]) -> ModelSpec:
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        return checkpoint.spec


@pytest.mark.parametrize(
    ("weights", "precision", "label"),
    [
        (WeightFormat.AUTO, Precision.AUTO, "f16-f16"),
        (WeightFormat.AUTO, Precision.BF16, "bf16-bf16"),
        (WeightFormat.AUTO, Precision.F32, "float32-f32"),
        (WeightFormat.BF16, Precision.AUTO, "bf16-bf16"),
        (WeightFormat.FLOAT32, Precision.AUTO, "float32-f32"),
        (WeightFormat.INT8, Precision.AUTO, "int8-f16"),
        (WeightFormat.INT4, Precision.BF16, "int4-bf16"),
        (WeightFormat.FP8, Precision.F16, "fp8-f16"),
    ],
)
def test_what_is_left_open_is_16_bits_and_fits_what_is_given(
    spec: ModelSpec, weights: WeightFormat, precision: Precision, label: str
) -> None:
    form = graph_form(spec, EngineOptions(weights=weights, precision=precision))
    assert form.label == f"linear-{label}-k256"


def test_gemma_3_is_computed_in_bf16_because_it_exceeds_float16(spec: ModelSpec) -> None:
    gemma = replace(spec, family=Family.GEMMA3)
    for weights in (WeightFormat.AUTO, WeightFormat.F16, WeightFormat.INT8):
        assert graph_form(gemma, EngineOptions(weights=weights)).activations is Precision.BF16
    assert graph_form(gemma, EngineOptions(precision=Precision.F32)).activations is Precision.F32
    with pytest.raises(EngineError, match=r"cannot be computed in f16: .* take precision bf16 or f32"):
        graph_form(gemma, EngineOptions(precision=Precision.F16))
    with pytest.raises(EngineError, match=r"bf16 needs .* take precision f32"):
        request_plan(gemma, EngineOptions(weights=WeightFormat.INT8), PlanTarget((7, 5)))


def test_a_small_vocabulary_has_no_more_candidates_than_tokens(spec: ModelSpec) -> None:
    assert graph_form(replace(spec, vocab_size=100), EngineOptions()).num_candidates == 100


@pytest.mark.parametrize("cache", [CacheType.U8, CacheType.BF16, CacheType.F32])
def test_a_cache_of_another_type_than_the_activations_is_refused(spec: ModelSpec, cache: CacheType) -> None:
    with pytest.raises(EngineError, match=f"a cache of {cache.value} does not go with activations of f16"):
        graph_form(spec, EngineOptions(cache_type=cache))
    same = EngineOptions(cache_type=CacheType.BF16, precision=Precision.BF16)
    assert graph_form(spec, same).activations is Precision.BF16


@pytest.mark.parametrize(
    ("options", "capability", "words"),
    [
        (EngineOptions(precision=Precision.BF16), (7, 5), "bf16 needs .* 8.0 or above"),
        (EngineOptions(weights=WeightFormat.INT4), (7, 5), "int4 needs .* 8.0 or above"),
        (EngineOptions(weights=WeightFormat.FP8), (8, 6), "fp8 needs .* 8.9 or above, and this .* 8.6"),
    ],
)
def test_a_type_that_the_gpu_does_not_know_is_refused(
    spec: ModelSpec, options: EngineOptions, capability: tuple[int, int], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        request_plan(spec, options, PlanTarget(capability))
    request_plan(spec, options, ADA)


@pytest.mark.parametrize(("batch", "batches"), [(1, (1,)), (8, (8,)), (9, (8, 9)), (64, (8, 64))])
def test_decode_has_a_profile_for_few_sequences_and_one_for_many(
    spec: ModelSpec, batch: int, batches: tuple[int, ...]
) -> None:
    assert plan_shape(spec, EngineOptions(max_batch=batch)).decode_batches == batches


def test_a_row_has_at_most_4096_cells_unless_more_are_asked_for(spec: ModelSpec) -> None:
    long = replace(spec, context_length=32768)
    assert plan_shape(long, EngineOptions()).max_len == context_length(long, EngineOptions()) == 4096
    more = EngineOptions(max_context=8192)
    assert plan_shape(long, more).max_len == context_length(long, more) == 8192
    assert plan_shape(spec, EngineOptions()).max_len == spec.context_length == 256


@pytest.mark.parametrize("context", [1, 5, 63, 64, 65, 100, 255, 256])
def test_a_row_holds_the_context_and_begins_at_an_aligned_address(spec: ModelSpec, context: int) -> None:
    shape = plan_shape(spec, EngineOptions(max_context=context))
    assert context <= shape.max_len <= spec.context_length
    assert shape.max_len * spec.num_kv_heads * spec.head_dim * 2 % 256 == 0
    assert shape.max_piece <= shape.max_len


def test_a_piece_is_no_longer_than_a_row(spec: ModelSpec) -> None:
    assert plan_shape(spec, EngineOptions(max_step_tokens=32)).max_piece == 32
    assert plan_shape(spec, EngineOptions(max_step_tokens=10_000)).max_piece == 256


def test_plans_of_tensorrt_are_for_the_gpu_and_its_driver_and_those_of_rtx_for_the_capability() -> None:
    cuda = StandInCuda()
    device = cuda.open_device(0)
    exact = target_of(StandInTensorrt(cuda, TENSORRT).library, device)
    assert exact == PlanTarget(device.compute_capability, device.name, device.driver_version)
    assert target_of(StandInTensorrt(cuda, TENSORRT_RTX).library, device) == PlanTarget((8, 9))
    device.close()


def test_what_a_build_measured_is_there_for_the_next(
    tiny_models: dict[str, TinyPaths], spec: ModelSpec, tmp_path: Path
) -> None:
    """The stand-in's timing cache counts the builds that it was in."""
    cuda = StandInCuda()
    library = StandInTensorrt(cuda, TENSORRT).library
    device = cuda.open_device(0)
    target = target_of(library, device)
    plans, log = Plans(tmp_path), TrtLog(library)
    with device.activate():
        for number, max_context in enumerate((64, 128), 1):
            request = request_plan(spec, EngineOptions(max_context=max_context), target)
            prepared = PreparedModels(tmp_path).open(tiny_models[tiny.LLAMA_TIED.name].gguf, request.form)
            open_plan(library, log, plans, prepared, request).close()
            prepared.close()
            assert plans.timing_cache(library.name, library.version, target) == b"timing %d" % number
    device.close()


def test_other_code_that_builds_makes_another_plan(
    tiny_models: dict[str, TinyPaths], spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = StandInTensorrt(StandInCuda(), TENSORRT_RTX)
    request = request_plan(spec, EngineOptions(max_context=64), ADA)
    prepared = PreparedModels(tmp_path).open(tiny_models[tiny.LLAMA_TIED.name].gguf, request.form)
    for digest, num_builds in (("a", 1), ("a", 1), ("b", 2)):
        monkeypatch.setattr(trt_plan, "_code_digest", lambda digest=digest: digest)
        open_plan(module.library, TrtLog(module.library), Plans(tmp_path), prepared, request).close()
        assert module.num_builds == num_builds
    prepared.close()
