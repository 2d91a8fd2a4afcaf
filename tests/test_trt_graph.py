"""The rewrites of a prepared graph for TensorRT."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import Precision, WeightFormat
from engines.trt_graph import AttentionForm, TensorInfo, TrtGraph, read_graph
from tests import tiny
from tests.conftest import TinyPaths

MAX_LEN = 64
MODEL = tiny.QWEN3


@pytest.fixture
def prepared(tiny_models: dict[str, TinyPaths], tmp_path: Path) -> Path:
    """A linear float32 graph."""
    return write(tiny_models, tmp_path, WeightFormat.FLOAT32, Precision.F32)


def write(
    models: dict[str, TinyPaths],
    folder: Path,
    weights: WeightFormat,
    precision: Precision,
    model: tiny.TinyModel = MODEL,
) -> Path:
    form = GraphForm(Dialect.LINEAR, weights, precision, num_candidates=8)
    with open_checkpoint(models[model.name].folder) as checkpoint:
        write_model(checkpoint.spec, checkpoint, folder / "model.onnx", form)
    return folder / "model.onnx"


def loaded(graph: TrtGraph) -> onnx.ModelProto:
    return onnx.load_model_from_string(graph.model)


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if "Attention" in node.op_type]


def names(infos: tuple[TensorInfo, ...]) -> set[str]:
    return {info.name for info in infos}


def test_the_cells_of_a_row_become_a_number_and_only_the_sizes_of_a_run_vary(prepared: Path) -> None:
    graph = read_graph(prepared, MAX_LEN)
    shapes = {info.name: info.shape for info in (*graph.inputs, *graph.outputs)}
    cache = ("B", MODEL.num_kv_heads, MAX_LEN, MODEL.head_dim)
    assert shapes["cache_positions"] == (MAX_LEN,)
    for layer in range(MODEL.num_layers):
        for name in (f"key_cache.{layer}", f"value_cache.{layer}"):
            assert shapes[name] == shapes[f"new_{name}"] == cache
    letters = {size for shape in shapes.values() for size in shape if isinstance(size, str)}
    assert letters == {"B", "S", "R"}
    assert graph.num_caches == 2 * MODEL.num_layers


@pytest.mark.parametrize(
    ("precision", "weights", "kind"),
    [
        (Precision.F32, WeightFormat.FLOAT32, "FLOAT"),
        (Precision.F16, WeightFormat.F16, "HALF"),
        (Precision.BF16, WeightFormat.INT8, "BF16"),
    ],
)
def test_types_go_by_their_names_in_tensorrt(
    tiny_models: dict[str, TinyPaths],
    tmp_path: Path,
    precision: Precision,
    weights: WeightFormat,
    kind: str,
) -> None:
    graph = read_graph(write(tiny_models, tmp_path, weights, precision), MAX_LEN)
    kinds = {info.name: info.kind for info in (*graph.inputs, *graph.outputs)}
    assert kinds["key_cache.0"] == kinds["new_value_cache.1"] == kind
    assert kinds["input_ids"] == kinds["candidate_ids"] == "INT64"
    assert kinds["logits"] == kinds["logsumexp"] == "FLOAT"


def test_the_prepared_graph_is_left_as_it_was(prepared: Path) -> None:
    before = {file.name: file.read_bytes() for file in prepared.parent.iterdir()}
    for attention in AttentionForm:
        read_graph(prepared, MAX_LEN, attention)
    assert {file.name: file.read_bytes() for file in prepared.parent.iterdir()} == before


def test_the_weights_are_not_in_the_graph(prepared: Path) -> None:
    graph = read_graph(prepared, MAX_LEN)
    external = [t for t in loaded(graph).graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {t.name for t in external} >= {"embed", "layers.0.qkv", "rope.cos"}
    assert len(graph.model) < prepared.with_suffix(".weights").stat().st_size / 10


@pytest.mark.parametrize("attention", AttentionForm)
def test_only_float32_attention_is_decomposable(
    tiny_models: dict[str, TinyPaths], tmp_path: Path, attention: AttentionForm
) -> None:
    for precision, weights in ((Precision.F32, WeightFormat.FLOAT32), (Precision.F16, WeightFormat.F16)):
        folder = tmp_path / precision.value
        folder.mkdir()
        graph = read_graph(write(tiny_models, folder, weights, precision), MAX_LEN, attention)
        marks = [
            [attribute.i for attribute in node.attribute if attribute.name == "TRT_decomposable"]
            for node in attentions(loaded(graph))
        ]
        assert marks == [[1] if precision is Precision.F32 else []] * MODEL.num_layers


def test_by_lengths_no_mask_is_left_and_no_input_without_use(prepared: Path) -> None:
    masked, by_lengths = (read_graph(prepared, MAX_LEN, attention) for attention in AttentionForm)
    assert names(masked.inputs) - names(by_lengths.inputs) == {"cache_positions"}
    assert masked.outputs == by_lengths.outputs
    graph = loaded(by_lengths).graph
    used = {name for node in graph.node for name in node.input}
    assert names(by_lengths.inputs) <= used
    assert {tensor.name for tensor in graph.initializer} <= used
    assert not [node for node in graph.node if node.op_type == "LessOrEqual"]


def test_by_lengths_each_attention_gets_the_lengths_and_keeps_its_place(prepared: Path) -> None:
    masked, by_lengths = (
        attentions(loaded(read_graph(prepared, MAX_LEN, attention))) for attention in AttentionForm
    )
    assert [node.op_type for node in by_lengths] == ["TRT_Attention"] * MODEL.num_layers
    for before, after in zip(masked, by_lengths, strict=True):
        assert list(after.input) == [*before.input[:3], "", "", "lengths"]
        assert list(after.output) == list(before.output)
        (kind,) = [attribute.s for attribute in after.attribute if attribute.name == "causal_kind"]
        assert kind == b"lower_right"


def test_the_standards_own_lengths_are_never_used(prepared: Path) -> None:
    """TensorRT's parser takes the seventh input, nonpad_kv_seqlen, and ignores it."""
    for attention in AttentionForm:
        nodes = attentions(loaded(read_graph(prepared, MAX_LEN, attention)))
        assert max(len(node.input) for node in nodes) <= 6


def lengths_of(graph: TrtGraph, write_indices: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
    """Run the nodes that make the lengths, in ONNX Runtime."""
    model = loaded(graph)
    outputs: dict[str, onnx.NodeProto] = {name: node for node in model.graph.node for name in node.output}
    wanted, nodes = ["lengths"], []
    while wanted:
        node = outputs.get(wanted.pop())
        if node is not None:
            nodes.append(node)
            wanted.extend(node.input)
    kept = [value for value in model.graph.input if value.name in ("input_ids", "write_indices")]
    result = onnx.helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, ["B"])
    part = onnx.helper.make_graph(nodes[::-1], "lengths", kept, [result])
    session = ort.InferenceSession(
        onnx.helper.make_model(part, opset_imports=model.opset_import, ir_version=11).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    ids = np.zeros((len(write_indices), num_tokens), np.int64)
    (lengths,) = session.run(["lengths"], {"input_ids": ids, "write_indices": write_indices})
    return np.asarray(lengths)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_rows_length_ends_with_its_new_tokens(prepared: Path, num_tokens: int) -> None:
    graph = read_graph(prepared, MAX_LEN, AttentionForm.LENGTHS)
    starts = np.array([0, 7, 30], np.int64)
    lengths = lengths_of(graph, starts, num_tokens)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == (starts + num_tokens).tolist()


def test_attention_to_a_window_keeps_its_mask(tiny_models: dict[str, TinyPaths], tmp_path: Path) -> None:
    path = write(tiny_models, tmp_path, WeightFormat.FLOAT32, Precision.F32, tiny.GEMMA3)
    graph = read_graph(path, MAX_LEN, AttentionForm.LENGTHS)
    nodes = attentions(loaded(graph))
    assert [node.op_type for node in nodes] == ["Attention", "TRT_Attention"] * 2
    assert [node.input[3] for node in nodes[::2]] == ["window_mask"] * 2
    assert "cache_positions" in names(graph.inputs)
