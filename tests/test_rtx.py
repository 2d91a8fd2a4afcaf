"""A TensorRT-RTX compile check: its real parser and builder take our graphs.

They work without a GPU. The plan cannot be opened without a driver, so its inputs, outputs, profiles and
cache updates are checked in the network that it is serialised from; nothing is executed.
"""

import logging
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest

from engines.api import EngineError
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import Precision, WeightFormat
from engines.plan_key import PlanShape
from engines.trt_build import PHASE, build_plan, make_profile, parse
from engines.trt_graph import AttentionForm, read_graph
from engines.trt_library import TENSORRT_RTX, TrtLibrary, TrtLog, load_library
from tests import tiny
from tests.conftest import TinyPaths

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed; it has wheels for x86-64 alone")

SHAPE = PlanShape(max_batch=16, max_piece=32, max_len=64, max_logit_rows=16, decode_batches=(16,))
K = 8
F16, BF16, F32 = Precision.F16, Precision.BF16, Precision.F32

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def library() -> TrtLibrary:
    return load_library(TENSORRT_RTX)


@pytest.fixture
def log(library: TrtLibrary) -> TrtLog:
    return TrtLog(library)


@pytest.fixture
def write(tiny_models: dict[str, TinyPaths], tmp_path: Path) -> Write:
    def write(
        weights: WeightFormat = WeightFormat.F16,
        activations: Precision = F16,
        model: tiny.TinyModel = tiny.LLAMA_TIED,
        path: Path | None = None,
    ) -> Path:
        folder = tmp_path / f"{model.name}-{weights.value}-{activations.value}"
        folder.mkdir()
        with open_checkpoint(path or tiny_models[model.name].gguf) as checkpoint:
            form = GraphForm(Dialect.LINEAR, weights, activations, K)
            write_model(checkpoint.spec, checkpoint, folder / "model.onnx", form)
        return folder / "model.onnx"

    return write


def compile_graph(library: TrtLibrary, path: Path, shape: PlanShape = SHAPE, **options: Any) -> int:
    """Build a plan and return its size in bytes."""
    plan = build_plan(library, TrtLog(library), path, shape, compute_capabilities=[89], **options)
    return len(plan.serialized)


@pytest.mark.parametrize("model", tiny.EVERY_MODEL, ids=lambda model: model.name)
def test_every_family_compiles_in_half_precision(
    library: TrtLibrary, write: Write, model: tiny.TinyModel
) -> None:
    assert compile_graph(library, write(model=model)) > 0


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        (WeightFormat.BF16, BF16),
        (WeightFormat.FLOAT32, F32),
        (WeightFormat.INT8, F16),
        (WeightFormat.INT8, BF16),
        (WeightFormat.INT4, F16),
        (WeightFormat.INT4, BF16),
        (WeightFormat.FP8, F16),
        (WeightFormat.FP8, BF16),
    ],
    ids=lambda value: value.value,
)
def test_every_form_compiles(
    library: TrtLibrary, write: Write, weights: WeightFormat, activations: Precision
) -> None:
    assert compile_graph(library, write(weights, activations)) > 0


@pytest.mark.parametrize("activations", [F16, BF16, F32], ids=lambda value: value.value)
def test_attention_by_lengths_compiles(library: TrtLibrary, write: Write, activations: Precision) -> None:
    weights = {F16: WeightFormat.F16, BF16: WeightFormat.BF16, F32: WeightFormat.FLOAT32}[activations]
    size = compile_graph(library, write(weights, activations), attention=AttentionForm.LENGTHS)
    assert size > 0


@pytest.mark.slow
def test_a_plan_is_compiled_for_every_capability_that_the_library_names(
    library: TrtLibrary, log: TrtLog, write: Write
) -> None:
    assert library.targets == (75, 80, 86, 89, 120, 121)
    path = write()
    for target in library.targets:
        build_plan(library, log, path, SHAPE, compute_capabilities=[target])


def test_an_input_that_the_parser_ignores_is_an_error(library: TrtLibrary, write: Write) -> None:
    """Attention's own lengths: the parser takes them and computes as if they were not there."""
    path = write()
    model = onnx.load(path, load_external_data=False)
    model.graph.input.append(onnx.helper.make_tensor_value_info("lengths", onnx.TensorProto.INT64, ["B"]))
    for node in model.graph.node:
        if node.op_type == "Attention":
            del node.input[3:]  # the mask
            node.input.extend(["", "", "", "lengths"])
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"would not compute what .* says: .*Unused Input"):
        compile_graph(library, path)


def test_a_node_that_the_parser_refuses_is_named_with_its_reason(library: TrtLibrary, write: Write) -> None:
    path = write()
    model = onnx.load(path, load_external_data=False)
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    attention.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=rf"does not understand .*: .+ \[Attention {attention.name}\]"):
        compile_graph(library, path)


def test_weights_that_are_missing_are_an_error(library: TrtLibrary, write: Write) -> None:
    path = write()
    path.with_suffix(".weights").unlink()
    with pytest.raises(EngineError, match="does not understand"):
        compile_graph(library, path)


def test_another_capability_than_the_library_knows_is_an_error(library: TrtLibrary, write: Write) -> None:
    with pytest.raises(
        EngineError, match="compute capability 90; it builds them for 75, 80, 86, 89, 120, 121"
    ):
        build_plan(library, TrtLog(library), write(), SHAPE, compute_capabilities=[90])


def test_what_the_builder_cannot_do_is_an_error_with_its_words(library: TrtLibrary, write: Write) -> None:
    path = write(WeightFormat.BF16, BF16)
    with pytest.raises(EngineError, match=r"could not build a plan of .*tensorrt_rtx says: .*sm75"):
        build_plan(library, TrtLog(library), path, SHAPE, compute_capabilities=[75])


def check_network(library: TrtLibrary, path: Path, shape: PlanShape, layers: int, kind: str) -> None:
    """Hold the parsed network against what the contexts bind."""
    trt, log = library.module, TrtLog(library)
    graph = read_graph(path, shape.max_len)
    builder = trt.Builder(log.logger)
    parsed = parse(library, log, graph, builder)
    network = parsed.network
    assert log.refusals == []

    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    found = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in (*inputs, *outputs)}
    cache = next(shape for name, (_, shape) in found.items() if name == "key_cache.0")
    vocabulary, candidates = found["logits"][1][1], found["candidate_logits"][1][1]
    assert cache[0] == -1
    assert cache[2] == shape.max_len
    types = trt.DataType
    expected: dict[str, Any] = {
        "input_ids": (types.INT64, (-1, -1)),
        "position_ids": (types.INT64, (-1, -1)),
        "write_indices": (types.INT64, (-1,)),
        "logit_rows": (types.INT64, (-1,)),
        "cache_positions": (types.INT64, (shape.max_len,)),
        "logits": (types.FLOAT, (-1, vocabulary)),
        "candidate_logits": (types.FLOAT, (-1, candidates)),
        "candidate_ids": (types.INT64, (-1, candidates)),
        "logsumexp": (types.FLOAT, (-1,)),
    }
    for layer in range(layers):
        for name in (f"key_cache.{layer}", f"value_cache.{layer}"):
            expected[name] = expected[f"new_{name}"] = (getattr(types, kind), cache)
    assert found == expected

    # A cache update's output is in the place of its input; there is one for every cache, and it is the
    # network's input and output at once.
    found_layers = [network.get_layer(index) for index in range(network.num_layers)]
    updates = [layer for layer in found_layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    places = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
    assert places == {f"new_{name}": name for name in expected if name.startswith(("key_", "value_"))}
    assert len(updates) == 2 * layers
    kinds = Counter(layer.type for layer in found_layers)
    assert kinds[trt.LayerType.ATTENTION_OUTPUT] == layers

    for profile in shape.profiles:
        made = make_profile(builder, graph.inputs, profile)
        sizes = {
            "B": profile.batch,
            "S": profile.tokens,
            "R": profile.logit_rows,
        }
        for info in graph.inputs:
            if info.name == "cache_positions":
                continue
            shapes = [tuple(bounds) for bounds in made.get_shape(info.name)]
            assert shapes == [
                tuple(size if isinstance(size, int) else sizes[size][which] for size in info.shape)
                for which in range(3)
            ]


@pytest.mark.parametrize(
    ("activations", "kind"), [(F16, "HALF"), (BF16, "BF16"), (F32, "FLOAT")], ids=lambda value: str(value)
)
def test_the_network_has_the_inputs_outputs_and_cache_updates_of_the_graph(
    library: TrtLibrary, write: Write, activations: Precision, kind: str
) -> None:
    weights = {F16: WeightFormat.INT8, BF16: WeightFormat.BF16, F32: WeightFormat.FLOAT32}[activations]
    check_network(library, write(weights, activations), SHAPE, tiny.LLAMA_TIED.num_layers, kind)


@pytest.mark.parametrize(
    "weights",
    [WeightFormat.F16, pytest.param(WeightFormat.INT8, marks=pytest.mark.slow)],
    ids=lambda value: value.value,
)
def test_the_demo_models_graph_compiles_with_two_profiles(
    library: TrtLibrary, write: Write, demo_path: Path, weights: WeightFormat
) -> None:
    shape = PlanShape(max_batch=64, max_piece=512, max_len=2048, max_logit_rows=64, decode_batches=(64,))
    path = write(weights, path=demo_path)
    check_network(library, path, shape, 30, "HALF")
    size = compile_graph(library, path, shape)
    stored = path.with_suffix(".weights").stat().st_size
    # Weights of few bits stay so in the plan; it holds some of them in a second layout.
    assert stored < size < 1.7 * stored


def test_the_builder_says_how_far_it_is(library: TrtLibrary, write: Write) -> None:
    seen: list[tuple[str, float]] = []
    compile_graph(library, write(), progress=lambda phase, done: seen.append((phase, done)))
    fractions = [done for _, done in seen]
    assert {phase for phase, _ in seen} == {PHASE}
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.1
    assert fractions[-1] == 1.0


def test_what_the_progress_callback_raises_stops_the_builder(library: TrtLibrary, write: Write) -> None:
    seen: list[float] = []

    def report(_phase: str, done: float) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise RuntimeError("enough")

    path = write()
    with pytest.raises(RuntimeError, match="enough") as caught:
        compile_graph(library, path, progress=report)
    assert len(seen) == 3
    # Nothing of TensorRT's waits in the traceback for a garbage collection at a bad moment.
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    kept = [
        f.f_locals for f in frames if f.f_code.co_name in ("_build_plan", "parse", "_deferring_interrupts")
    ]
    assert kept
    assert not any(kept)
    assert compile_graph(library, path) > 0


@pytest.mark.parametrize("call", ["log", "progress"])
def test_ctrl_c_stops_the_builder_in_whichever_call_it_comes(
    library: TrtLibrary, write: Write, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []

    def interrupt(*_: object) -> None:
        if not came:
            came.append(call)
            signal.raise_signal(signal.SIGINT)

    path, before = write(), signal.getsignal(signal.SIGINT)
    if call == "log":
        # The parser logs, too: wait for the builder's own lines.
        take = TrtLog.take
        monkeypatch.setattr(
            TrtLog,
            "take",
            lambda log, level, text: interrupt() if "ptimiz" in text else take(log, level, text),
        )
    with pytest.raises(KeyboardInterrupt):
        compile_graph(library, path, progress=interrupt if call == "progress" else None)
    assert came == [call]
    assert signal.getsignal(signal.SIGINT) is before
    assert compile_graph(library, path) > 0


def test_a_build_beside_the_main_thread_leaves_signals_alone(library: TrtLibrary, write: Write) -> None:
    path = write()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(compile_graph, library, path).result() > 0


def test_its_lines_go_to_our_log(library: TrtLibrary, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "engines.trt_library")
    compile_graph(library, write())
    assert "tensorrt_rtx: " in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_second_log_in_the_process_gets_the_lines_too(library: TrtLibrary) -> None:
    """TensorRT ignores a second ILogger while anything made with the first lives."""
    trt, first = library.module, TrtLog(library)
    kept = trt.Builder(first.logger)
    second = TrtLog(library)
    builder = trt.Builder(second.logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, second.logger)
    assert not parser.parse(b"no graph")
    assert second.quote()
    assert first.quote() == second.quote()
    del kept
