"""The ONNX graph and its weights' file, without an engine."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engines.api import EngineError, FloatArray
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import Precision, WeightFormat
from engines.spec import Family, ModelSpec
from engines.tensors import tensor_shapes
from engines.weightfile import ALIGNMENT, CHUNK_BYTES, WeightFile
from tests import tiny
from tests.conftest import TinyPaths

PAGED_FORMS = tuple(
    GraphForm(Dialect.PAGED, weights)
    for weights in (WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FLOAT32)
)
LINEAR_FORMS = tuple(
    GraphForm(Dialect.LINEAR, weights, activations, num_candidates=7)
    for weights in WeightFormat
    if weights is not WeightFormat.AUTO
    for activations in (Precision.F32, Precision.BF16)
)
GROUPED_FORMS = tuple(
    GraphForm(Dialect.GROUPED, weights)
    for weights in (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FLOAT32)
)
every_form = pytest.mark.parametrize(
    "form", PAGED_FORMS + LINEAR_FORMS + GROUPED_FORMS, ids=lambda form: form.label
)


def write(path: Path, folder: Path, form: GraphForm | WeightFormat) -> onnx.ModelProto:
    """Write a checkpoint's graph, a paged one by its weights alone, and load it without the weights."""
    if isinstance(form, WeightFormat):
        form = GraphForm(Dialect.PAGED, form)
    with open_checkpoint(path) as checkpoint:
        write_model(checkpoint.spec, checkpoint, folder / "model.onnx", form)
    return onnx.load(folder / "model.onnx", load_external_data=False)


def read(model: onnx.ModelProto, folder: Path, name: str) -> NDArray[Any]:
    """Read one weight out of the external file."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return onnx.numpy_helper.to_array(tensor, str(folder))


@pytest.fixture(params=tiny.EVERY_MODEL, ids=lambda model: model.name)
def tiny_paths(request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths]) -> TinyPaths:
    return tiny_models[request.param.name]


@every_form
def test_every_value_is_defined_once_before_its_use(
    form: GraphForm, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, form).graph
    known = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        assert {name for name in node.input if name} <= set(known), node.name
        known += node.output
    assert len(known) == len(set(known))
    outputs = {value.name for value in graph.output}
    assert "logits" in outputs
    assert outputs <= set(known)


def test_a_layer_takes_four_products_and_the_head_one(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    num_layers = tiny_paths.model.num_layers
    ops = Counter(node.op_type for node in graph.node)
    assert ops["Linear"] == 4 * num_layers + 1
    assert ops["PagedAttention"] == num_layers


def test_norms_of_query_and_key_and_behind_blocks_appear_where_the_model_has_them(
    tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    per_layer = {"qwen3": 4, "gemma3_text": 6}.get(tiny_paths.model.model_type, 2)
    ops = Counter(node.op_type for node in graph.node)
    assert ops["RMSNormalization"] == per_layer * tiny_paths.model.num_layers + 1


def test_layers_have_the_window_and_the_rotary_tables_that_the_model_gives_them(
    tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> None:
    def layers(name: str, op: str, form: GraphForm) -> list[onnx.NodeProto]:
        graph = write(tiny_models[name].gguf, tmp_path, form).graph
        return [node for node in graph.node if node.op_type == op]

    paged, linear = (GraphForm(dialect, WeightFormat.FLOAT32) for dialect in (Dialect.PAGED, Dialect.LINEAR))
    for name, windows in (
        (tiny.GEMMA3.name, [9, 0, 9, 0]),
        (tiny.PHI3.name, [12, 12]),
        ("tiny-qwen3", [0, 0]),
    ):
        attributes = [
            {attribute.name: attribute.i for attribute in node.attribute}
            for node in layers(name, "PagedAttention", paged)
        ]
        assert [attribute.get("window", 0) for attribute in attributes] == windows
        masks = [node.input[3] for node in layers(name, "Attention", linear)]
        assert masks == ["window_mask" if window else "mask" for window in windows]
        tables = [node.input[1] for node in layers(name, "RotaryEmbedding", linear)][::2]
        own = name == tiny.GEMMA3.name
        assert tables == ["rope.window_cos" if own and window else "rope.cos" for window in windows]


def test_a_tied_table_is_stored_once(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    users = [node.op_type for node in graph.node if "embed" in node.input]
    assert users == (["Gather", "Linear"] if tiny_paths.model.tied else ["Gather"])
    assert any(t.name == "lm_head" for t in graph.initializer) is not tiny_paths.model.tied


@pytest.mark.parametrize("weights", [WeightFormat.F16, WeightFormat.FLOAT32])
def test_a_tied_table_of_plain_numbers_is_stored_once_in_standard_nodes_too(
    weights: WeightFormat, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    precision = Precision.F16 if weights is WeightFormat.F16 else Precision.F32
    graph = write(tiny_paths.gguf, tmp_path, GraphForm(Dialect.LINEAR, weights, precision)).graph
    users = [node.op_type for node in graph.node if "embed" in node.input]
    assert users == (["Gather", "Gemm"] if tiny_paths.model.tied else ["Gather"])


@every_form
def test_tensors_in_the_file_are_aligned_and_do_not_overlap(
    form: GraphForm, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, form).graph
    end = 0
    for tensor in graph.initializer:
        # Seen before: the same bytes in another shape.
        if tensor.data_location != onnx.TensorProto.EXTERNAL or tensor.name == "embed_rows":
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "model.weights"
        assert offset % ALIGNMENT == 0
        assert offset >= end
        size = 0.5 if tensor.data_type == onnx.TensorProto.INT4 else itemsize(tensor)
        assert length == np.prod(tensor.dims) * size
        end = offset + length
    assert (tmp_path / "model.weights").stat().st_size == end


def itemsize(tensor: onnx.TensorProto) -> int:
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def test_float32_weights_are_the_checkpoints_own(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    model = write(tiny_paths.gguf, tmp_path, WeightFormat.FLOAT32)
    with open_checkpoint(tiny_paths.gguf) as checkpoint:
        for part, name in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
            expected = np.concatenate([checkpoint.tensor(f"layers.1.{piece}") for piece in name])
            np.testing.assert_array_equal(read(model, tmp_path, f"layers.1.{part}"), expected)


def test_int8_weights_are_off_by_half_a_scale_at_most(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    model = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8)
    levels, scales = (read(model, tmp_path, name) for name in ("layers.0.down", "layers.0.down_scale"))
    assert levels.dtype == np.int8
    with open_checkpoint(tiny_paths.gguf) as checkpoint:
        error = np.abs(levels.astype(np.float32) * scales - checkpoint.tensor("layers.0.down"))
    assert (error <= scales * 0.5001).all()


def test_bf16_weights_are_rounded_to_nearest(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    model = write(tiny_paths.gguf, tmp_path, WeightFormat.BF16)
    with open_checkpoint(tiny_paths.gguf) as checkpoint:
        expected = checkpoint.tensor("layers.0.o").astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read(model, tmp_path, "layers.0.o"), expected)


@pytest.mark.parametrize(
    "weights", [WeightFormat.FLOAT32, WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8]
)
def test_standard_products_have_the_checkpoints_weights_as_columns(
    weights: WeightFormat, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    model = write(tiny_paths.gguf, tmp_path, GraphForm(Dialect.LINEAR, weights))
    matrix = read(model, tmp_path, "layers.1.gate_up").astype(np.float32)
    if weights is not WeightFormat.FLOAT32:
        scales = read(model, tmp_path, "layers.1.gate_up_scale")
        assert scales.ndim == (2 if weights is WeightFormat.INT4 else 1)
        matrix *= np.repeat(scales, len(matrix) // len(scales), axis=0) if scales.ndim == 2 else scales
    with open_checkpoint(tiny_paths.gguf) as checkpoint:
        expected = np.concatenate([checkpoint.tensor(f"layers.1.{part}") for part in ("gate", "up")]).T
    error = np.sqrt(np.mean((matrix - expected) ** 2)) / expected.std()
    assert error <= {"float32": 0, "int8": 0.01, "int4": 0.1, "fp8": 0.03}[weights.value]


@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8])
@pytest.mark.parametrize(
    ("activations", "kind"),
    [(Precision.F32, "FLOAT16"), (Precision.F16, "FLOAT16"), (Precision.BF16, "BFLOAT16")],
)
def test_beside_a_head_of_few_bits_the_embeddings_take_two_bytes(
    weights: WeightFormat, activations: Precision, kind: str, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, GraphForm(Dialect.LINEAR, weights, activations)).graph
    tensors = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
    assert tensors["embed"] == kind
    assert tensors["head"] == ("FLOAT8E4M3FN" if weights is WeightFormat.FP8 else "INT8")
    assert "lm_head" not in tensors


def test_int4_is_refused_where_blocks_do_not_divide_the_sizes(tmp_path: Path) -> None:
    model = replace(tiny.LLAMA_TIED, hidden_size=48, num_heads=3, num_kv_heads=1)
    path = tiny.write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(EngineError, match=r"blocks of 32 inputs, and its hidden size, 48, .* choose int8"):
        write(path, tmp_path, GraphForm(Dialect.LINEAR, WeightFormat.INT4))
    write(path, tmp_path, GraphForm(Dialect.LINEAR, WeightFormat.INT8))


@pytest.mark.parametrize(
    "form",
    [
        GraphForm(Dialect.PAGED, WeightFormat.INT4),
        GraphForm(Dialect.PAGED, WeightFormat.INT8, Precision.F16),
        GraphForm(Dialect.PAGED, WeightFormat.INT8, num_candidates=1),
    ],
    ids=lambda form: form.label,
)
def test_a_form_that_the_paged_dialect_does_not_have_is_refused(
    form: GraphForm, tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=f"no graph {form.label}: .* as int8, bf16, float32"):
        write(tiny_models[tiny.QWEN2.name].gguf, tmp_path, form)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": WeightFormat.AUTO}, "weights are auto"),
        ({"activations": Precision.AUTO}, "activations are auto"),
        ({"num_candidates": -1}, r"num_candidates is -1; it must be in 0 \.\. 3839"),
        ({"num_candidates": 3840}, "num_candidates is 3840"),
    ],
)
def test_a_form_leaves_nothing_open(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphForm(**{"dialect": Dialect.LINEAR, "weights": WeightFormat.INT8, **arguments})


def test_a_forms_label_has_all_of_it() -> None:
    assert GraphForm(Dialect.LINEAR, WeightFormat.INT8, Precision.F16, 256).label == "linear-int8-f16-k256"
    assert GraphForm(Dialect.PAGED, WeightFormat.BF16).label == "paged-bf16-f32"


class _Generated:
    """Weights made on demand, so that none of the test's memory is theirs."""

    def __init__(self, spec: ModelSpec) -> None:
        self.shapes = dict(tensor_shapes(spec))
        self.largest_read = 0

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        shape = self.shapes[name]
        if rows is not None:
            shape = (len(range(*rows.indices(shape[0]))), *shape[1:])
        self.largest_read = max(self.largest_read, 4 * int(np.prod(shape)))
        return np.ones(shape, np.float32)


@every_form
def test_writing_takes_little_memory_however_large_the_model(form: GraphForm, tmp_path: Path) -> None:
    spec = ModelSpec(
        family=Family.LLAMA,
        name="large",
        vocab_size=50_000,
        hidden_size=1024,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=6016,
        context_length=2048,
        rms_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
    )
    source = _Generated(spec)
    tracemalloc.start()
    write_model(spec, source, tmp_path / "model.onnx", form)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * spec.num_parameters > 15 * CHUNK_BYTES
    assert source.largest_read <= CHUNK_BYTES
    is_plain = form.weights in (WeightFormat.FLOAT32, WeightFormat.F16, WeightFormat.BF16)
    num_columns = 2 * spec.intermediate_size if is_plain else spec.vocab_size
    largest_matrix = spec.hidden_size * num_columns * (4 if form.weights is WeightFormat.FLOAT32 else 2)
    assert peak < 7 * CHUNK_BYTES + (2 * largest_matrix if form.dialect is Dialect.LINEAR else 0)


def test_a_part_of_the_wrong_shape_is_refused_by_name(tmp_path: Path) -> None:
    class Wrong:
        def tensor(self, name: str, rows: slice | None = None) -> FloatArray:  # noqa: ARG002
            return np.zeros((3, 5), np.float32)

    with (
        WeightFile(tmp_path / "w") as file,
        pytest.raises(ValueError, match=r"layers.0.q are \(3, 5\), expected \(3, 4\)"),
    ):
        file.rows("m", Wrong(), {"layers.0.q": 3}, 4, WeightFormat.INT8)
