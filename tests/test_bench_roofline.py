from pathlib import Path

import onnx
import pytest

from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.manifest import FileRecord, Manifest
from engines.options import WeightFormat
from engines.preparation import WEIGHTS_FILE
from engines.scripted import ScriptedEngine
from engines.spec import ModelSpec
from streamsrv.bench.suite.read_speed import ReadSpeed
from streamsrv.bench.suite.roofline import (
    Measured,
    Sizes,
    StepBytes,
    num_operations,
    roofline_row,
    roofline_section,
)
from tests import tiny
from tests.conftest import TinyPaths

_FORM = GraphForm(Dialect.PAGED, WeightFormat.INT8)


@pytest.fixture(
    params=(tiny.LLAMA_TIED, tiny.LLAMA_UNTIED, tiny.QWEN2, tiny.GEMMA3), ids=lambda model: model.name
)
def prepared(
    request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> tuple[Manifest, onnx.GraphProto]:
    with open_checkpoint(tiny_models[request.param.name].gguf) as checkpoint:
        write_model(checkpoint.spec, checkpoint, tmp_path / "model.onnx", _FORM)
        size = (tmp_path / WEIGHTS_FILE).stat().st_size
        manifest = Manifest(checkpoint.info, _FORM, {WEIGHTS_FILE: FileRecord(size, "")})
    return manifest, onnx.load(tmp_path / "model.onnx", load_external_data=False).graph


def test_the_bytes_of_a_step_are_those_of_the_tensors_it_reads(
    prepared: tuple[Manifest, onnx.GraphProto],
) -> None:
    manifest, graph = prepared
    sizes, rows = {}, {}
    for tensor in graph.initializer:
        length = {entry.key: entry.value for entry in tensor.external_data}.get("length")
        if length is not None:
            sizes[tensor.name] = int(length)
            rows[tensor.name] = int(length) // tensor.dims[0]
    is_tied = manifest.model.spec.tied_embeddings
    looked_up = {name for name in sizes if name.startswith(("rope.", "embed")) and name != "embed_factor"}
    whole = sum(
        size
        for name, size in sizes.items()
        if name not in looked_up or (is_tied and name.startswith("embed"))
    )
    step = StepBytes.of(manifest, 0.0)
    assert whole <= step.weights <= whole + 63 * len(sizes)
    assert step.rows == sum(rows[name] for name in looked_up)


def test_the_operations_are_two_for_each_weight_of_a_product_and_each_row(
    prepared: tuple[Manifest, onnx.GraphProto],
) -> None:
    manifest, graph = prepared
    spec = manifest.model.spec
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    operations = {
        node.input[1]: 2 * shapes[node.input[1]][0] * shapes[node.input[1]][1]
        for node in graph.node
        if node.op_type == "Linear"
    }
    head = operations.pop("embed" if spec.tied_embeddings else "lm_head")
    others = _vector_weights(spec)
    assert num_operations(spec, 1, 0) == sum(operations.values()) + 2 * others
    assert num_operations(spec, 7, 3) == 7 * num_operations(spec, 1, 0) + 3 * head


def _vector_weights(spec: ModelSpec) -> int:
    """Count the weights that are no matrix's."""
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = 2 * spec.hidden_size + (qkv if spec.qkv_bias else 0)
    layer += 2 * spec.head_dim if spec.qk_norm else 0
    layer += 2 * spec.hidden_size if spec.post_norms else 0
    return spec.num_layers * layer + spec.hidden_size


def test_a_row_holds_the_median_round_against_the_time_that_reading_takes() -> None:
    measured = Measured(
        ScriptedEngine().model.spec,
        StepBytes(weights=8_000_000, rows=500_000, cached_token=10_000.0),
        num_threads=2,
        read_speed=1e9,
        steps_s={2: [0.02, 0.04, 0.05]},
    )
    row = roofline_row(measured, 2, Sizes(num_prompt_tokens=48, num_steps=5))
    # 9 MB of weights, and twice 50 tokens of cache: 10 ms.
    assert row[:6] == ["2", "40.0", "9.0", "1.0", "10.0", "**25** (20-50)"]


def test_memory_is_read_by_any_number_of_threads() -> None:
    for num_threads in (1, 2, 3):
        assert ReadSpeed(1 << 20, num_threads).best_of(5) > 0


async def test_a_tiny_model_is_held_against_the_roofline(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSRV_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    sizes = Sizes(num_prompt_tokens=20, num_steps=3, buffer_bytes=1 << 22)
    text = await roofline_section(str(llama), (1, 3), 2, said.append, sizes)
    title, *_, header, _rule, one, three, last = text.split("\n")
    assert title == "### Steps against the roofline"
    assert header.count("|") == one.count("|") == three.count("|") == 8
    assert [line.split(" | ")[0] for line in (one, three)] == ["| 1", "| 3"]
    assert not last
    assert len(said) == 4
