"""The linear graph's numbers on ONNX Runtime against the oracle, and TensorRT-RTX's parser on each form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from engines.api import FloatArray
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import Precision, WeightFormat
from engines.spec import ModelSpec
from engines.weightfile import WeightSource
from tests import tiny
from tests.accuracy import assert_near, oracle_of, relative_rms, write_graph
from tests.conftest import TinyPaths

F16_RMS = 0.006
"""Root-mean-square difference by float16 activations, in standard deviations of the logits; 0.003 was
measured on the tiny models."""

MAX_LEN = 48
"""Cells of a row, but in the test of the last position."""
GARBAGE = 1e3
"""What unused cells hold, in standard deviations of normally distributed numbers."""
IDS = [(5 + 17 * i + i * i) % 320 for i in range(256)]

WEIGHTS = tuple(form for form in WeightFormat if form is not WeightFormat.AUTO)
EXACT = GraphForm(Dialect.LINEAR, WeightFormat.FLOAT32)


class Decoder:
    """A linear graph on ONNX Runtime, and its caches: a row for each sequence, full of garbage at first."""

    def __init__(self, path: Path, spec: ModelSpec, kind: Precision, num_rows: int, max_len: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # a warning says that caches are copied, as they are here
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._random = np.random.default_rng(0)
        self._kind = {Precision.F32: np.float32, Precision.F16: np.float16}[kind]
        self._shape = (num_rows, spec.num_kv_heads, max_len, spec.head_dim)
        names = [f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(spec.num_layers)]
        self.caches = {name: self._garbage() for name in names}
        self.lengths = [0] * num_rows

    def _garbage(self) -> NDArray[Any]:
        return (GARBAGE * self._random.normal(size=self._shape)).astype(self._kind)

    def run(
        self,
        token_ids: Sequence[Sequence[int]],
        first_row: int = 0,
        logit_rows: Sequence[int] | None = None,
        outputs: Sequence[str] = ("logits",),
    ) -> list[NDArray[Any]]:
        """Feed each row from `first_row` on with its next tokens; by default the logits of all of them."""
        ids = np.array(token_ids, np.int64)
        rows = slice(first_row, first_row + len(ids))
        past = np.array(self.lengths[rows], np.int64)
        wanted = range(ids.size) if logit_rows is None else logit_rows
        feed = {
            "input_ids": ids,
            "position_ids": past[:, None] + np.arange(ids.shape[1]),
            "write_indices": past,
            "logit_rows": np.array(wanted, np.int64),
            "cache_positions": np.arange(self._shape[2]),
            **{name: cache[rows] for name, cache in self.caches.items()},
        }
        new_names = [f"new_{name}" for name in self.caches]
        results: list[NDArray[Any]] = self._session.run([*outputs, *new_names], feed)
        for name, new in zip(self.caches, results[len(outputs) :], strict=True):
            self.caches[name][rows] = new
        for row in range(first_row, first_row + len(ids)):
            self.lengths[row] += ids.shape[1]
        return results[: len(outputs)]

    def logits(self, token_ids: Sequence[int], row: int = 0) -> FloatArray:
        """Logits `[tokens, vocab_size]` of the next tokens of one row."""
        logits: FloatArray = self.run([token_ids], row)[0]
        return logits

    def forget(self, row: int) -> None:
        """Begin another sequence in a row; what the last one left stays in the cells."""
        self.lengths[row] = 0

    def move(self, source: int, target: int) -> None:
        """Copy a row's used cells to another row, and spoil them where they were."""
        length = self.lengths[source]
        for cache in self.caches.values():
            cache[target, :, :length] = cache[source, :, :length]
            cache[source] = -GARBAGE
        self.lengths[target], self.lengths[source] = length, 0


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
        return Decoder(path, spec, form.activations, num_rows, max_len)

    return make


@pytest.fixture(params=tiny.EVERY_MODEL, ids=lambda model: model.name)
def tiny_paths(request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths]) -> TinyPaths:
    return tiny_models[request.param.name]


def test_a_prompt_among_garbage_gives_the_oracles_logits(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    for path in (tiny_paths.gguf, tiny_paths.folder):
        expected = oracle_of(path).logits(IDS[:40])
        assert_near(make_decoder(path).logits(IDS[:40]), expected)


def test_attention_in_a_scale_of_its_own_gives_the_oracles_logits(
    tmp_path: Path, make_decoder: MakeDecoder
) -> None:
    folder = tiny.write_hf(tiny.GEMMA3_SCALED, tmp_path / "scaled")
    assert_near(make_decoder(folder).logits(IDS[:40]), oracle_of(folder).logits(IDS[:40]))


@pytest.mark.parametrize("piece", [1, 7, 16])
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
    logits = [decoder.logits(part) for part in (IDS[: length - 1], IDS[length - 1 : length])]
    assert_near(np.concatenate(logits), oracle_of(tiny_paths.gguf).logits(IDS[:length]))


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_rows_at_different_positions_are_decoded_in_one_run(
    batch_size: int, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=batch_size)
    prompts = [IDS[3 * row : 3 * row + 1 + 5 * row] for row in range(batch_size)]
    for row, prompt in enumerate(prompts):
        decoder.run([prompt], row)
    steps = [IDS[100 + step : 100 + step + batch_size] for step in range(3)]
    logits = [decoder.run([[token_id] for token_id in step])[0] for step in steps]
    for row, prompt in enumerate(prompts):
        expected = oracle.logits([*prompt, *(step[row] for step in steps)])[-3:]
        assert_near(np.stack([step[row] for step in logits]), expected)


def test_rows_that_take_several_tokens_each_are_computed_together(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=3)
    decoder.run([IDS[:9]], 1)
    parts = [IDS[20:26], IDS[30:36], IDS[40:46]]
    logits = decoder.run(parts)[0].reshape(3, 6, -1)
    for row, past in enumerate(([], IDS[:9], [])):
        assert_near(logits[row], oracle.logits(past + parts[row])[-6:])


def test_a_row_can_be_used_again_for_a_shorter_sequence(
    tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=2)
    for begin, length in ((0, 48), (60, 12), (90, 30)):
        for row in range(2):
            decoder.forget(row)
        first, second = IDS[begin : begin + length], IDS[begin + 1 : begin + length]
        decoder.run([first[:-1]])
        decoder.run([second[:-1]], 1)
        logits = decoder.run([first[-1:], second[-1:]])[0]
        assert_near(logits, np.stack([oracle.logits(ids)[-1] for ids in (first, second)]))


def test_a_row_can_move_between_steps(tiny_paths: TinyPaths, make_decoder: MakeDecoder) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    decoder = make_decoder(tiny_paths.gguf, num_rows=4)
    decoder.run([IDS[:11]], 3)
    decoder.run([IDS[50:57]], 1)
    decoder.move(3, 0)
    one = decoder.run([[7], [8]])[0]
    decoder.move(1, 2)
    decoder.move(0, 1)
    other = decoder.run([[9], [10]], 1)[0]
    for row, (prompt, fed) in enumerate(((IDS[:11], [7, 9]), (IDS[50:57], [8, 10]))):
        assert_near(np.stack([one[row], other[row]]), oracle.logits(prompt + fed)[-2:])


def test_a_dummy_token_beyond_a_row_that_pauses_does_not_change_it(
    llama: Path, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(llama, num_rows=3)
    for row in range(3):
        decoder.run([IDS[row : 12 + row]], row)
    decoder.run([[1], [2], [3]])
    decoder.lengths[1] -= 1  # the 2 was a dummy
    logits = decoder.run([[4], [5], [6]])[0]
    assert_near(logits[1], oracle_of(llama).logits([*IDS[1:13], 5])[-1])


def test_logits_come_for_any_tokens_in_any_order(llama: Path, make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(llama, num_rows=2)
    tokens = [IDS[:8], IDS[20:28]]
    whole = decoder.run(tokens)[0]
    for wanted in ([15], [9, 2, 2, 0], list(range(15, -1, -1)), []):
        decoder.lengths = [0, 0]
        assert_near(decoder.run(tokens, logit_rows=wanted)[0], whole[wanted])


def test_the_caches_can_be_written_in_place(llama: Path, make_decoder: MakeDecoder) -> None:
    import onnxruntime

    decoder = make_decoder(llama)
    binding = decoder._session.io_binding()
    values = {
        "input_ids": np.array([IDS[:20]]),
        "position_ids": np.arange(20)[None],
        "write_indices": np.zeros(1, np.int64),
        "logit_rows": np.arange(20),
        "cache_positions": np.arange(MAX_LEN),
    }
    for name, value in values.items():
        binding.bind_cpu_input(name, value)
    before = {name: cache.copy() for name, cache in decoder.caches.items()}
    for name, cache in decoder.caches.items():
        memory = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(name, memory)
        binding.bind_ortvalue_output(f"new_{name}", memory)
        decoder.caches[name] = memory.numpy()
    binding.bind_output("logits")
    decoder._session.run_with_iobinding(binding)
    assert_near(binding.copy_outputs_to_cpu()[-1], oracle_of(llama).logits(IDS[:20]))
    for name, cache in decoder.caches.items():
        np.testing.assert_array_equal(cache[:, :, 20:], before[name][:, :, 20:])


# Other forms


@pytest.mark.parametrize("weights", [WeightFormat.FLOAT32, WeightFormat.F16])
def test_float16_activations_stay_near_the_oracle(
    weights: WeightFormat, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(tiny_paths.gguf, GraphForm(Dialect.LINEAR, weights, Precision.F16))
    logits = np.concatenate(
        [decoder.logits(IDS[:30]), *(decoder.logits(IDS[i : i + 1]) for i in range(30, 40))]
    )
    assert relative_rms(logits, oracle_of(tiny_paths.gguf).logits(IDS[:40])) < F16_RMS


def test_a_sequence_that_overflows_float16_leaves_its_row_usable(llama: Path, tmp_path: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class Overflowing:
        checkpoint: WeightSource

        def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
            values = self.checkpoint.tensor(name, rows)
            if name == "embed":
                values = values.copy()
                values[[7, 9]] = [[np.inf], [3e4]]
            return values

    form = GraphForm(Dialect.LINEAR, WeightFormat.FLOAT32, Precision.F16)
    with open_checkpoint(llama) as checkpoint:
        write_model(checkpoint.spec, Overflowing(checkpoint), tmp_path / "model.onnx", form)
        decoder = Decoder(tmp_path / "model.onnx", checkpoint.spec, Precision.F16, 1, MAX_LEN)
    ids = [token_id for token_id in IDS[:40] if token_id not in (7, 9)]
    spoilt = decoder.logits([*ids[:20], 9, 7, *ids[:20]])
    assert np.isnan(spoilt[21]).all()
    decoder.forget(0)
    expected = oracle_of(llama).logits(ids)
    usable = [token_id for token_id in range(320) if token_id not in (7, 9)]  # the head is the same table
    assert relative_rms(decoder.logits(ids)[:, usable], expected[:, usable]) < F16_RMS


RMS_BOUNDS = {
    WeightFormat.INT8: 0.1,
    WeightFormat.INT4: 0.7,
    WeightFormat.FP8: 0.25,
    WeightFormat.F16: 0.005,
    WeightFormat.BF16: 0.025,
    WeightFormat.FLOAT32: F16_RMS,
}
"""Likewise by each kind of weights; half of it or more was measured. Random weights forgive little."""


@pytest.mark.parametrize("activations", [Precision.F32, Precision.F16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_kind_of_weights_stays_near_the_oracle(
    weights: WeightFormat, activations: Precision, tiny_paths: TinyPaths, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(tiny_paths.gguf, GraphForm(Dialect.LINEAR, weights, activations))
    expected = oracle_of(tiny_paths.gguf).logits(IDS[:40])
    assert relative_rms(decoder.logits(IDS[:40]), expected) < RMS_BOUNDS[weights]


def test_int4_keeps_a_model_that_was_of_four_bits_already(tmp_path: Path, make_decoder: MakeDecoder) -> None:
    checkpoint = tiny.write_gguf(tiny.QWEN3, tmp_path / "model.gguf", "Q4_1")
    decoder = make_decoder(checkpoint, GraphForm(Dialect.LINEAR, WeightFormat.INT4))
    assert relative_rms(decoder.logits(IDS[:40]), oracle_of(checkpoint).logits(IDS[:40])) < 0.05


@pytest.mark.parametrize("activations", [Precision.F32, Precision.F16, Precision.BF16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_form_is_sound_onnx(
    weights: WeightFormat, activations: Precision, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    write_graph(tiny_paths.gguf, path, GraphForm(Dialect.LINEAR, weights, activations, num_candidates=20))
    onnx.checker.check_model(str(path), full_check=True)


def test_inputs_and_outputs_have_their_names_types_and_shapes(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    form = GraphForm(Dialect.LINEAR, WeightFormat.INT8, Precision.BF16, num_candidates=20)
    spec = write_graph(tiny_paths.gguf, path, form)
    graph = onnx.load(path, load_external_data=False).graph
    cache = (TensorProto.BFLOAT16, "B", spec.num_kv_heads, "M", spec.head_dim)
    caches = [f"{kind}_cache.{layer}" for layer in range(spec.num_layers) for kind in ("key", "value")]
    assert signature(graph.input) == {
        "input_ids": (TensorProto.INT64, "B", "S"),
        "position_ids": (TensorProto.INT64, "B", "S"),
        "write_indices": (TensorProto.INT64, "B"),
        "logit_rows": (TensorProto.INT64, "R"),
        "cache_positions": (TensorProto.INT64, "M"),
        **dict.fromkeys(caches, cache),
    }
    assert signature(graph.output) == {
        "logits": (TensorProto.FLOAT, "R", spec.vocab_size),
        "candidate_logits": (TensorProto.FLOAT, "R", 20),
        "candidate_ids": (TensorProto.INT64, "R", 20),
        "logsumexp": (TensorProto.FLOAT, "R"),
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


# Candidates


CANDIDATES = ("logits", "candidate_logits", "candidate_ids", "logsumexp")


@pytest.mark.parametrize("activations", [Precision.F32, Precision.F16])
@pytest.mark.parametrize("num_candidates", [1, 50, 1000])
def test_candidates_are_the_best_of_the_full_logits(
    num_candidates: int, activations: Precision, llama: Path, make_decoder: MakeDecoder
) -> None:
    form = GraphForm(Dialect.LINEAR, WeightFormat.FLOAT32, activations, num_candidates)
    logits, best, ids, logsumexp = make_decoder(llama, form).run([IDS[:40]], outputs=CANDIDATES)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]  # of equals the lower id first
    assert order.shape == (40, min(num_candidates, 320))
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(logits, order, axis=1))
    np.testing.assert_allclose(logsumexp, np.log(np.exp(logits.astype(np.float64)).sum(axis=1)), rtol=1e-6)


def test_the_sum_of_huge_logits_is_finite(llama: Path, tmp_path: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class Louder:
        checkpoint: WeightSource

        def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
            return self.checkpoint.tensor(name, rows) * np.float32(100 if name == "final_norm" else 1)

    form = replace(EXACT, num_candidates=5)
    with open_checkpoint(llama) as checkpoint:
        write_model(checkpoint.spec, Louder(checkpoint), tmp_path / "model.onnx", form)
        decoder = Decoder(tmp_path / "model.onnx", checkpoint.spec, Precision.F32, 1, MAX_LEN)
    logits, best, _, logsumexp = decoder.run([IDS[:10]], outputs=CANDIDATES)
    assert logits.max() > 500
    np.testing.assert_allclose(logsumexp, np.logaddexp.reduce(logits.astype(np.float64), axis=1), rtol=1e-6)
    assert (logsumexp >= best[:, 0]).all()


# TensorRT-RTX, which needs no GPU to parse


@pytest.mark.parametrize("activations", [Precision.F16, Precision.BF16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_tensorrts_parser_takes_every_form_and_ignores_nothing(
    weights: WeightFormat, activations: Precision, llama: Path, tmp_path: Path
) -> None:
    parse(llama, tmp_path, GraphForm(Dialect.LINEAR, weights, activations, num_candidates=20))


def test_tensorrts_parser_takes_every_family(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    parse(tiny_paths.gguf, tmp_path, GraphForm(Dialect.LINEAR, WeightFormat.F16, Precision.F16))


def test_tensorrts_parser_takes_offsets(tmp_path: Path) -> None:
    checkpoint = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "model.gguf", "Q4_1")
    path = parse(checkpoint, tmp_path, GraphForm(Dialect.LINEAR, WeightFormat.INT4, Precision.F16))
    names = {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert "layers.0.qkv_offset" in names


def parse(checkpoint: Path, folder: Path, form: GraphForm) -> Path:
    """Parse a form's graph with its cells made a number, and check that nothing was said against it."""
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX's parser comes with tensorrt-rtx")
    from engines.trt_graph import read_graph

    said: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity not in (trt.ILogger.INFO, trt.ILogger.VERBOSE):
                said.append(message)

    path = folder / "model.onnx"
    write_graph(checkpoint, path, form)
    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(read_graph(path, MAX_LEN).model, str(path))
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert [line for line in said if "Int64 binding" not in line] == []
    return path


# The demo model

PROSE = (
    "The water cycle describes how water moves between the oceans, the air and the land. Heat from the sun "
    "turns water at the surface of the sea into vapour, which rises, cools and forms clouds. When the drops "
    "in a cloud become too heavy they fall as rain or snow. Some of that water runs off into rivers and "
    "lakes; some of it sinks into the ground and feeds springs and wells. In the end nearly all of it "
    "returns to the sea, and the cycle begins again."
)


@pytest.fixture(scope="module")
def prose(demo_path: Path) -> list[int]:
    from tokenizers import Tokenizer

    with open_checkpoint(demo_path) as checkpoint:
        ids: list[int] = Tokenizer.from_str(checkpoint.info.vocabulary.tokenizer_json).encode(PROSE).ids
        return ids


@pytest.fixture(scope="module")
def exact(demo_path: Path, prose: list[int], make_decoder: MakeDecoder) -> FloatArray:
    """The demo model's logits after each token of the prose."""
    return make_decoder(demo_path, EXACT, max_len=128).logits(prose)


@pytest.mark.slow
def test_float32_gives_the_oracles_logits_on_the_demo_model(
    demo_path: Path, prose: list[int], exact: FloatArray
) -> None:
    assert_near(exact[:24], oracle_of(demo_path).logits(prose[:24]))


@pytest.mark.parametrize(
    ("weights", "activations", "bound"),
    [
        (WeightFormat.INT8, Precision.F32, 0.015),
        (WeightFormat.INT4, Precision.F16, 0.01),
        pytest.param(WeightFormat.INT4, Precision.F32, 0.01, marks=pytest.mark.slow),
        pytest.param(WeightFormat.INT8, Precision.F16, 0.015, marks=pytest.mark.slow),
        pytest.param(WeightFormat.FP8, Precision.F32, 0.06, marks=pytest.mark.slow),
        pytest.param(WeightFormat.F16, Precision.F16, 0.0001, marks=pytest.mark.slow),
    ],
)
def test_the_demo_models_choices_hardly_change(
    weights: WeightFormat,
    activations: Precision,
    bound: float,
    demo_path: Path,
    prose: list[int],
    exact: FloatArray,
    make_decoder: MakeDecoder,
) -> None:
    decoder = make_decoder(demo_path, GraphForm(Dialect.LINEAR, weights, activations), max_len=128)
    assert divergence(exact, decoder.logits(prose)) < bound


def divergence(exact: FloatArray, other: FloatArray) -> float:
    """Mean Kullback-Leibler divergence of the next token's distribution, in nats."""

    def logarithms(logits: FloatArray) -> NDArray[np.float64]:
        wide = logits.astype(np.float64)
        return wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)

    p, q = logarithms(exact), logarithms(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())
