"""The grouped graph's numbers on ONNX Runtime against the oracle."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from engines.api import EngineError, FloatArray
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.linear import Run
from engines.options import Precision, WeightFormat
from engines.ort_forms import RUN_INPUTS
from engines.spec import ModelSpec
from tests import tiny
from tests.accuracy import assert_near, oracle_of, relative_rms, write_graph
from tests.conftest import TinyPaths

MAX_LEN = 48
"""Cells of a row, but in the test of the last position."""
GARBAGE = 1e3
"""What unused cells hold, in standard deviations of normally distributed numbers."""
IDS = [(5 + 17 * i + i * i) % 320 for i in range(256)]

EXACT = GraphForm(Dialect.GROUPED, WeightFormat.FLOAT32)
INT8 = GraphForm(Dialect.GROUPED, WeightFormat.INT8)
INT4 = GraphForm(Dialect.GROUPED, WeightFormat.INT4)
FORMS = (EXACT, INT8, INT4)

every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.label)


class Decoder:
    """A grouped graph on ONNX Runtime, and its caches: a row for each sequence, full of garbage at first.

    Past and present are bound to one buffer, as the engine does it.
    """

    def __init__(self, path: Path, spec: ModelSpec, num_rows: int, max_len: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        random = np.random.default_rng(0)
        shape = num_rows, spec.num_kv_heads, max_len, spec.head_dim
        self.caches = {
            f"{kind}_cache.{layer}": (GARBAGE * random.normal(size=shape)).astype(np.float32)
            for kind in ("key", "value")
            for layer in range(spec.num_layers)
        }
        self.lengths = [0] * num_rows
        self._vocab_size = spec.vocab_size

    def run(
        self,
        token_ids: Sequence[Sequence[int]],
        first_row: int = 0,
        logit_rows: Sequence[int] | None = None,
    ) -> FloatArray:
        """Feed each row from `first_row` on with its next tokens; by default the logits of all of them."""
        ids = np.array(token_ids, np.int64)
        past = np.array(self.lengths[first_row : first_row + len(ids)], np.int64)
        wanted = np.arange(ids.size) if logit_rows is None else np.array(logit_rows, np.int64)
        positions = past[:, None] + np.arange(ids.shape[1])
        run = Run(first_row, len(ids), ids, positions, past, wanted, np.arange(len(wanted)))
        binding = self._session.io_binding()
        inputs = RUN_INPUTS[Dialect.GROUPED]
        for name, value in {**inputs.constant(0), **inputs.of(run)}.items():
            binding.bind_cpu_input(name, value)
        for name, cache in self.caches.items():
            rows = cache[first_row : first_row + len(ids)]
            place = "cpu", 0, np.float32, rows.shape, rows.ctypes.data
            binding.bind_input(name, *place)
            binding.bind_output(f"new_{name}", *place)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        for row in range(first_row, first_row + len(ids)):
            self.lengths[row] += ids.shape[1]
        logits: FloatArray = binding.copy_outputs_to_cpu()[-1]
        return logits

    def logits(self, token_ids: Sequence[int], row: int = 0) -> FloatArray:
        """Logits `[tokens, vocab_size]` of the next tokens of one row."""
        return self.run([token_ids], row)


MakeDecoder = Callable[..., Decoder]


@pytest.fixture(scope="module")
def make_decoder(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """Make decoders; each checkpoint's graph of a form is written once."""
    folder = tmp_path_factory.mktemp("graphs")
    written: dict[tuple[Path, GraphForm], tuple[Path, ModelSpec]] = {}

    def make(checkpoint: Path, form: GraphForm = EXACT, num_rows: int = 1, max_len: int = MAX_LEN) -> Decoder:
        key = (checkpoint, form)
        if key not in written:
            path = folder / str(len(written)) / "model.onnx"
            path.parent.mkdir()
            written[key] = (path, write_graph(checkpoint, path, form))
        path, spec = written[key]
        return Decoder(path, spec, num_rows, max_len)

    return make


@pytest.fixture(params=tiny.EVERY_MODEL, ids=lambda model: model.name)
def tiny_paths(request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths]) -> TinyPaths:
    return tiny_models[request.param.name]


def test_a_prompt_among_garbage_gives_the_oracles_logits(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    for path in (tiny_paths.gguf, tiny_paths.folder):
        assert_near(make_decoder(path).logits(IDS[:40]), oracle_of(path).logits(IDS[:40]))


@pytest.mark.parametrize("piece", [1, 2, 7, 16])
def test_a_prompt_in_pieces_gives_the_oracles_logits(
    piece: int, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(tiny_paths.gguf)
    pieces = [decoder.logits(IDS[i : min(i + piece, 40)]) for i in range(0, 40, piece)]
    assert_near(np.concatenate(pieces), oracle_of(tiny_paths.gguf).logits(IDS[:40]))


def test_the_last_cell_of_a_row_is_as_good_as_the_others(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    length = tiny_paths.model.context_length
    decoder = make_decoder(tiny_paths.gguf, max_len=length)
    parts = (IDS[: length - 9], IDS[length - 9 : length - 1], IDS[length - 1 : length])
    logits = [decoder.logits(part) for part in parts]
    assert_near(np.concatenate(logits), oracle_of(tiny_paths.gguf).logits(IDS[:length]))


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_rows_at_different_positions_are_decoded_in_one_run(
    batch_size: int, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=batch_size)
    prompts = [IDS[3 * row : 3 * row + 5 * row] for row in range(batch_size)]
    for row, prompt in enumerate(prompts):
        if prompt:  # the first row begins in the run, with its first token
            decoder.logits(prompt, row)
    steps = [IDS[100 + step : 100 + step + batch_size] for step in range(3)]
    logits = [decoder.run([[token_id] for token_id in step]) for step in steps]
    for row, prompt in enumerate(prompts):
        expected = oracle.logits([*prompt, *(step[row] for step in steps)])[-3:]
        assert_near(np.stack([step[row] for step in logits]), expected)


def test_rows_that_all_begin_with_one_token_know_that_they_have_no_past(
    llama: Path, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(llama, num_rows=3)
    logits = decoder.run([[5], [6], [7]])
    assert_near(logits, np.concatenate([oracle_of(llama).logits([token_id]) for token_id in (5, 6, 7)]))


def test_a_range_of_rows_in_the_middle_leaves_the_others_alone(
    llama: Path, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(llama, num_rows=4)
    before = {name: cache.copy() for name, cache in decoder.caches.items()}
    decoder.logits(IDS[:9], 1)
    decoder.lengths[2] = 20
    decoder.run([[3], [4]], 1)
    for name, cache in decoder.caches.items():
        for row, cells in ((0, slice(0, None)), (1, slice(10, None)), (2, slice(0, 20)), (3, slice(0, None))):
            np.testing.assert_array_equal(cache[row, :, cells], before[name][row, :, cells])


def test_a_row_can_be_used_again_for_a_shorter_sequence(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=2)
    for begin, length in ((0, 48), (60, 12), (90, 30)):
        decoder.lengths = [0, 0]
        first, second = IDS[begin : begin + length], IDS[begin + 1 : begin + length]
        decoder.logits(first[:-1])
        decoder.logits(second[:-1], 1)
        logits = decoder.run([first[-1:], second[-1:]])
        assert_near(logits, np.stack([oracle.logits(ids)[-1] for ids in (first, second)]))


def test_a_hole_between_rows_harms_neither_them_nor_its_own_sequence(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=4)
    prompts = [IDS[:12], IDS[1:31], IDS[2:10]]
    for row, prompt in enumerate(prompts):
        decoder.logits(prompt, row)
    decoder.lengths[3] = MAX_LEN - 1  # a full row is a hole at its last cell
    logits = [decoder.run([[1], [0], [3], [0]])]
    decoder.lengths[1] -= 1
    decoder.lengths[3] -= 1
    logits.append(decoder.run([[4], [5], [6], [0]]))
    for row, fed in enumerate(([1, 4], [5], [3, 6])):
        got = np.stack([step[row] for step in logits[-len(fed) :]])
        assert_near(got, oracle.logits([*prompts[row], *fed])[-len(fed) :])


def test_logits_come_for_any_tokens_in_any_order(llama: Path, make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(llama)
    whole = decoder.logits(IDS[:16])
    for wanted in ([15], [9, 2, 2, 0], list(range(15, -1, -1))):
        decoder.lengths = [0]
        assert_near(decoder.run([IDS[:16]], logit_rows=wanted), whole[wanted])


def test_attention_in_a_scale_of_its_own_gives_the_oracles_logits(
    tmp_path: Path, make_decoder: MakeDecoder
) -> None:
    folder = tiny.write_hf(tiny.GEMMA3_SCALED, tmp_path / "scaled")
    assert_near(make_decoder(folder).logits(IDS[:40]), oracle_of(folder).logits(IDS[:40]))


# Weights of few bits


RMS_BOUNDS = {EXACT: 1e-5, INT8: 0.1, INT4: 0.7}
"""Root-mean-square difference by the weights, in standard deviations of the logits; 1e-6, 0.06 and 0.45 were
measured. Random weights forgive little."""


@every_form
def test_every_form_stays_near_the_oracle(
    form: GraphForm, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(tiny_paths.gguf, form)
    logits = np.concatenate(
        [decoder.logits(IDS[:30]), *(decoder.logits(IDS[i : i + 1]) for i in range(30, 40))]
    )
    assert relative_rms(logits, oracle_of(tiny_paths.gguf).logits(IDS[:40])) < RMS_BOUNDS[form]


# What rounding the activations costs: 0.02 to 0.03 was measured.


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_keeps_a_model_that_was_of_four_bits_already(
    kind: str, tmp_path: Path, make_decoder: MakeDecoder
) -> None:
    checkpoint = tiny.write_gguf(tiny.QWEN3, tmp_path / "model.gguf", kind)
    decoder = make_decoder(checkpoint, INT4)
    assert relative_rms(decoder.logits(IDS[:40]), oracle_of(checkpoint).logits(IDS[:40])) < 0.05


def test_int8_keeps_a_model_that_was_of_eight_bits_already(tmp_path: Path, make_decoder: MakeDecoder) -> None:
    checkpoint = tiny.write_gguf(tiny.QWEN3, tmp_path / "model.gguf", "Q8_0")
    decoder = make_decoder(checkpoint, INT8)
    assert relative_rms(decoder.logits(IDS[:40]), oracle_of(checkpoint).logits(IDS[:40])) < 0.05


@every_form
def test_a_sequences_logits_do_not_depend_on_the_others_of_a_run(
    form: GraphForm, llama: Path, make_decoder: MakeDecoder
) -> None:
    logits: list[NDArray[np.float32]] = []
    for others in ([], [[1], [2]], [[9], [8]]):
        decoder = make_decoder(llama, form, num_rows=3)
        for row in range(3):
            decoder.logits(IDS[row : 12 + 5 * row], row)
        logits.append(decoder.run([[7], *others])[0])
    np.testing.assert_array_equal(logits[1], logits[2])
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-3)  # one row alone is another kernel


# The file


@every_form
def test_inputs_and_outputs_have_their_names_types_and_shapes(
    form: GraphForm, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    spec = write_graph(tiny_paths.gguf, tmp_path / "model.onnx", form)
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    cache = (TensorProto.FLOAT, "B", spec.num_kv_heads, "M", spec.head_dim)
    caches = [f"{kind}_cache.{layer}" for layer in range(spec.num_layers) for kind in ("key", "value")]
    assert signature(graph.input) == {
        "input_ids": (TensorProto.INT64, "B", "S"),
        "seqlens_k": (TensorProto.INT32, "B"),
        "total_sequence_length": (TensorProto.INT32,),
        "logit_rows": (TensorProto.INT64, "R"),
        **dict.fromkeys(caches, cache),
    }
    assert signature(graph.output) == {
        "logits": (TensorProto.FLOAT, "R", spec.vocab_size),
        **{f"new_{name}": cache for name in caches},
    }


def signature(values: Sequence[onnx.ValueInfoProto]) -> dict[str, tuple[int | str, ...]]:
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            *(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    }


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.label)
def test_the_table_is_stored_once_for_the_look_up_and_a_tied_head(
    form: GraphForm, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    write_graph(tiny_paths.gguf, tmp_path / "model.onnx", form)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
    }
    assert places["embed"] == places["embed_rows"]
    assert ("lm_head" in places) is not tiny_paths.model.tied


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (EXACT, {"head_dim": 24}, "heads of 24 numbers"),
        (INT8, {"intermediate_size": 100}, "width of the feed-forward network, 100"),
        (INT4, {"hidden_size": 72}, "hidden size, 72"),
    ],
)
def test_sizes_that_the_nodes_do_not_take_are_refused(
    form: GraphForm, change: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    with open_checkpoint(llama) as checkpoint, pytest.raises(EngineError, match=message):
        write_model(replace(checkpoint.spec, **change), checkpoint, tmp_path / "model.onnx", form)


@pytest.mark.parametrize(
    "form", [replace(EXACT, weights=WeightFormat.FP8), replace(EXACT, activations=Precision.F16)]
)
def test_a_form_that_has_no_graph_is_refused(form: GraphForm, llama: Path, tmp_path: Path) -> None:
    with open_checkpoint(llama) as checkpoint, pytest.raises(EngineError, match="int8, int4, float32"):
        write_model(checkpoint.spec, checkpoint, tmp_path / "model.onnx", form)
