"""The ONNX graph and its weights' file, without an engine."""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engines.api import FloatArray
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import WeightFormat
from engines.quantization import quantize_rows
from engines.spec import Family, ModelSpec
from engines.tensors import tensor_shapes
from engines.weightfile import ALIGNMENT, CHUNK_BYTES, WeightFile
from tests import tiny
from tests.conftest import TinyPaths


def write(path: Path, folder: Path, form: WeightFormat) -> onnx.ModelProto:
    """Write a checkpoint's graph and load it, without the weights."""
    with open_checkpoint(path) as checkpoint:
        write_model(checkpoint.spec, checkpoint, folder / "model.onnx", GraphForm(Dialect.PAGED, form))
    return onnx.load(folder / "model.onnx", load_external_data=False)


def read(model: onnx.ModelProto, folder: Path, name: str) -> NDArray[Any]:
    """Read one weight out of the external file."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return onnx.numpy_helper.to_array(tensor, str(folder))


@pytest.fixture(params=tiny.TINY_MODELS, ids=lambda model: model.name)
def tiny_paths(request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths]) -> TinyPaths:
    return tiny_models[request.param.name]


@pytest.mark.parametrize("form", [WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FLOAT32])
def test_every_value_is_defined_once_before_its_use(
    form: WeightFormat, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, form).graph
    known = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        assert set(node.input) <= set(known), node.name
        known += node.output
    assert len(known) == len(set(known))
    assert {value.name for value in graph.output} == {"logits"} <= set(known)


def test_a_layer_takes_four_products_and_the_head_one(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    num_layers = tiny_paths.model.num_layers
    ops = Counter(node.op_type for node in graph.node)
    assert ops["Linear"] == 4 * num_layers + 1
    assert ops["PagedAttention"] == num_layers


def test_norms_of_query_and_key_appear_where_the_model_has_them(
    tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    per_layer = 4 if tiny_paths.model.model_type == "qwen3" else 2
    ops = Counter(node.op_type for node in graph.node)
    assert ops["RMSNormalization"] == per_layer * tiny_paths.model.num_layers + 1


def test_a_tied_table_is_stored_once(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    users = [node.op_type for node in graph.node if "embed" in node.input]
    assert users == (["Gather", "Linear"] if tiny_paths.model.tied else ["Gather"])
    assert any(t.name == "lm_head" for t in graph.initializer) is not tiny_paths.model.tied


def test_tensors_in_the_file_are_aligned_and_do_not_overlap(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    graph = write(tiny_paths.gguf, tmp_path, WeightFormat.INT8).graph
    end = 0
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "model.weights"
        assert offset % ALIGNMENT == 0
        assert offset >= end
        assert (
            length == np.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        )
        end = offset + length
    assert (tmp_path / "model.weights").stat().st_size == end


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


def test_a_row_of_zeros_stays_one() -> None:
    levels, scales = quantize_rows(np.zeros((2, 8), np.float32))
    assert not levels.any()
    assert (scales == 1).all()


def test_quantising_reaches_both_ends_and_keeps_tiny_rows() -> None:
    matrix = np.array([[1.27, -1.27, 0.635, 0.0], [1e-30, -5e-31, 0.0, 0.0]], np.float32)
    levels, scales = quantize_rows(matrix)
    np.testing.assert_array_equal(levels, [[127, -127, 64, 0], [127, -64, 0, 0]])
    np.testing.assert_allclose(scales[:, 0], [0.01, 1e-30 / 127], rtol=1e-6)


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


@pytest.mark.parametrize("form", [WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FLOAT32])
def test_writing_takes_a_few_chunks_of_memory_however_large_the_model(
    form: WeightFormat, tmp_path: Path
) -> None:
    spec = ModelSpec(
        family=Family.LLAMA,
        name="large",
        vocab_size=50_000,
        hidden_size=1024,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=6000,
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
    write_model(spec, source, tmp_path / "model.onnx", GraphForm(Dialect.PAGED, form))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * spec.num_parameters > 15 * CHUNK_BYTES
    assert source.largest_read <= CHUNK_BYTES
    assert peak < 5 * CHUNK_BYTES


def test_a_part_of_the_wrong_shape_is_refused_by_name(tmp_path: Path) -> None:
    class Wrong:
        def tensor(self, name: str, rows: slice | None = None) -> FloatArray:  # noqa: ARG002
            return np.zeros((3, 5), np.float32)

    with (
        WeightFile(tmp_path / "w") as file,
        pytest.raises(ValueError, match=r"layers.0.q are \(3, 5\), expected \(3, 4\)"),
    ):
        file.rows("m", Wrong(), {"layers.0.q": 3}, 4, WeightFormat.INT8)
