"""The ONNX Runtime engine's numbers against the oracle, and what it refuses."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.api import EngineError, EngineNotInstalledError, ExecutionContext, FloatArray, OutOfMemoryError
from engines.memory import usable_processors
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.ort import OnnxRuntimeContext, OnnxRuntimeEngine, open_onnxruntime
from tests import steps, tiny
from tests.accuracy import (
    EXACT_BOUND,
    Continued,
    assert_same_choice,
    continue_prompts,
    oracle_of,
    relative_rms,
)
from tests.conftest import TinyPaths
from tests.golden.logits import GOLDEN_IDS, GOLDEN_LOGITS
from tests.steps import Feed

EXACT = EngineOptions(WeightFormat.FLOAT32, Precision.F32, CacheType.F32)
FLOAT32 = EngineOptions(WeightFormat.FLOAT32)
INT8 = EngineOptions(WeightFormat.INT8)
INT4 = EngineOptions(WeightFormat.INT4)

RMS = {EXACT: 1e-5, FLOAT32: 1e-5, INT8: 0.15, INT4: 0.6}
"""Root-mean-square difference by the weights, in standard deviations of the logits; 1e-6, 0.05 and 0.45 were
measured on the tiny models, whose random weights suit 4 bits badly."""
DEMO_RMS = 0.15
"""The same on the demo model, which has 4 bits itself; 0.06 was measured at int8, 0.05 at int4."""
GARBAGE = 1e3

IDS = list(GOLDEN_IDS) + [(3 + 31 * i) % 320 for i in range(60)]

every_form = pytest.mark.parametrize("options", RMS, ids=["exact", "float32", "int8", "int4"])

OpenEngine = Callable[[Path, EngineOptions], OnnxRuntimeEngine]


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenEngine]:
    """Open engines on one cache of prepared models; each model and its options once."""
    cache = tmp_path_factory.mktemp("prepared")
    opened: dict[tuple[Path, EngineOptions], OnnxRuntimeEngine] = {}

    def get(path: Path, options: EngineOptions) -> OnnxRuntimeEngine:
        if (path, options) not in opened:
            in_cache = replace(options, cache_folder=cache)
            opened[path, options] = open_onnxruntime(path, in_cache, lambda _phase, _done: None)
        return opened[path, options]

    yield get
    for engine in opened.values():
        engine.close()


@pytest.fixture
def make_context(open_engine: OpenEngine) -> Iterator[Callable[[Path, EngineOptions], OnnxRuntimeContext]]:
    """Make contexts that are closed after the test."""
    made: list[OnnxRuntimeContext] = []

    def make(path: Path, options: EngineOptions) -> OnnxRuntimeContext:
        made.append(open_engine(path, options).create_context())
        return made[-1]

    yield make
    for context in made:
        context.close()


MakeContext = Callable[[Path, EngineOptions], OnnxRuntimeContext]


DEMO_CONTEXT = 256
"""Tokens of a row: the standard attention reads the whole row at each step."""


@pytest.fixture(scope="module")
def demo(demo_path: Path, open_engine: OpenEngine) -> list[Continued]:
    engine = open_engine(demo_path, replace(EXACT, max_context=DEMO_CONTEXT))
    return continue_prompts(engine, demo_path, 16)


@pytest.fixture(params=tiny.TINY_MODELS, ids=lambda model: model.name)
def tiny_paths(request: pytest.FixtureRequest, tiny_models: dict[str, TinyPaths]) -> TinyPaths:
    return tiny_models[request.param.name]


def spoil(context: OnnxRuntimeContext) -> None:
    """Fill every cell with large numbers."""
    random = np.random.default_rng(0)
    for cache in context._caches.values():
        cache[:] = GARBAGE * random.normal(size=cache.shape)


def test_float32_chooses_the_oracles_tokens_on_the_demo_model(demo: list[Continued]) -> None:
    for continued in demo:
        assert_same_choice(continued.ids, continued.expected)
        assert np.abs(continued.logits - continued.expected).max() < EXACT_BOUND


def test_float32_chooses_the_oracles_tokens_on_each_family(
    tiny_paths: TinyPaths, make_context: MakeContext
) -> None:
    oracle = oracle_of(tiny_paths.gguf)
    for path in (tiny_paths.gguf, tiny_paths.folder):
        context = make_context(path, EXACT)
        for prompt in (IDS[:1], IDS[:40], IDS[50:90]):
            chosen, logits = steps.greedy(context, prompt, 32)
            expected = oracle.logits(prompt + chosen[:-1])[len(prompt) - 1 :]
            assert_same_choice(chosen, expected)
            assert np.abs(logits - expected).max() < EXACT_BOUND


def test_float32_gives_hugging_faces_logits(tiny_paths: TinyPaths, make_context: MakeContext) -> None:
    with np.load(GOLDEN_LOGITS) as golden:
        expected = golden[tiny_paths.model.name]
    logits = steps.logits_of(make_context(tiny_paths.folder, EXACT), GOLDEN_IDS)
    assert np.abs(logits - expected).max() < EXACT_BOUND


def test_float32_is_exact_up_to_the_last_position(tiny_paths: TinyPaths, make_context: MakeContext) -> None:
    length = tiny_paths.model.context_length
    ids = [(5 + 17 * i + i * i) % 320 for i in range(length)]
    logits = steps.logits_of(make_context(tiny_paths.gguf, EXACT), ids, piece=length - 1)
    assert np.abs(logits - oracle_of(tiny_paths.gguf).logits(ids)).max() < EXACT_BOUND


@every_form
@pytest.mark.parametrize("model", tiny.WINDOWED_MODELS, ids=lambda model: model.name)
def test_every_form_attends_to_windows_however_a_sequence_is_cut(
    model: tiny.TinyModel,
    options: EngineOptions,
    tiny_models: dict[str, TinyPaths],
    make_context: MakeContext,
) -> None:
    path = tiny_models[model.name].gguf
    context, expected = make_context(path, options), oracle_of(path).logits(IDS)
    spoil(context)
    for piece in (0, 1, 9):
        assert relative_rms(steps.logits_of(context, IDS, piece=piece), expected) < RMS[options]


@pytest.mark.parametrize("options", [INT8, INT4], ids=["int8", "int4"])
def test_few_bits_stay_within_their_bound_on_the_demo_model(
    options: EngineOptions, demo_path: Path, demo: list[Continued], make_context: MakeContext
) -> None:
    context = make_context(demo_path, replace(options, max_context=DEMO_CONTEXT))
    for continued in demo:
        logits = steps.logits_of(context, continued.fed)[-16:]
        assert relative_rms(logits, continued.expected) < DEMO_RMS


@every_form
def test_every_form_stays_within_its_bound_on_each_family(
    options: EngineOptions, tiny_paths: TinyPaths, make_context: MakeContext
) -> None:
    context = make_context(tiny_paths.gguf, options)
    assert relative_rms(steps.logits_of(context, IDS), oracle_of(tiny_paths.gguf).logits(IDS)) < RMS[options]


def test_the_demo_model_knows_the_capital_of_france(
    demo_path: Path, demo: list[Continued], open_engine: OpenEngine, make_context: MakeContext
) -> None:
    from tokenizers import Tokenizer

    options = EngineOptions(max_context=DEMO_CONTEXT)
    ids, _ = steps.greedy(make_context(demo_path, options), demo[0].prompt, 2)
    vocabulary = open_engine(demo_path, options).model.vocabulary
    assert Tokenizer.from_str(vocabulary.tokenizer_json).decode(ids).startswith(" Paris")


@every_form
def test_prefill_in_pieces_of_any_size_gives_the_same_logits(
    options: EngineOptions, llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, options)
    whole = steps.logits_of(context, IDS[:70])
    for piece in range(1, 71):
        logits = steps.logits_of(context, IDS[:70], piece=piece)
        assert relative_rms(logits, whole) < RMS[options], piece


def test_a_long_step_is_cut_into_pieces(
    llama: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = steps.logits_of(make_context(llama, EXACT), IDS)
    monkeypatch.setattr("engines.ort._MAX_PIECE", 16)
    context = make_context(llama, replace(EXACT, max_batch=4))
    assert np.abs(steps.logits_of(context, IDS) - whole).max() < EXACT_BOUND


@every_form
def test_a_sequences_logits_do_not_depend_on_its_neighbours(
    options: EngineOptions, tiny_paths: TinyPaths, make_context: MakeContext
) -> None:
    context = make_context(tiny_paths.gguf, options)
    alone = _decode_among(context, list)
    few = _decode_among(context, lambda: [(Feed(IDS[7:17], [40]), 1)])
    many = _decode_among(context, lambda: [(Feed(IDS[7:17], [20 + i]), 1) for i in range(20)])
    mixed = _decode_among(
        context,
        lambda: [
            (Feed(IDS[3:90], [41]), 87),
            (Feed(IDS[20:90], [44]), 3),
            (Feed(IDS[1:2], [48]), 1),
        ],
    )
    np.testing.assert_array_equal(few, alone)
    np.testing.assert_array_equal(many, alone)
    np.testing.assert_array_equal(mixed, alone)


def _decode_among(context: ExecutionContext, neighbours: Callable[[], list[tuple[Feed, int]]]) -> FloatArray:
    """Prefill 20 tokens and decode 40, each step with what `neighbours` gives."""
    feed = Feed(IDS[:60], [7])
    steps.step(context, [(feed, 20), *neighbours()])
    while feed.past < 60:
        steps.step(context, [(feed, 1), *neighbours()])
    return feed.all_logits()


@every_form
def test_many_sequences_in_ragged_steps_equal_the_oracle(
    options: EngineOptions, tiny_paths: TinyPaths, make_context: MakeContext
) -> None:
    context = make_context(tiny_paths.gguf, options)
    spoil(context)
    oracle = oracle_of(tiny_paths.gguf)
    lengths = [1 + (13 * i) % 90 for i in range(40)]
    blocks = np.random.default_rng(0).permutation(context.cache.num_blocks).tolist()
    feeds = [Feed(IDS[i % 9 :][:length], [blocks[i]]) for i, length in enumerate(lengths)]
    turn = 0
    while waiting := [feed for feed in feeds if feed.past < len(feed.token_ids)]:
        # Some decode, some prefill a piece, some wait, and rows are moved for it.
        sizes = [(feed, (1, 17, 0, 40)[(i + turn) % 4]) for i, feed in enumerate(waiting)]
        parts = [(feed, min(size, len(feed.token_ids) - feed.past)) for feed, size in sizes if size]
        if parts:
            steps.step(context, parts)
        turn += 1
    moved = [block for block in range(64) if context._rows.row_of(block) != block]
    assert len(moved) > 10
    for feed in feeds:
        assert relative_rms(feed.all_logits(), oracle.logits(feed.token_ids)) < RMS[options]


@every_form
def test_the_same_logits_come_from_any_row(
    options: EngineOptions, llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, options)
    first = steps.logits_of(context, IDS)
    for block in (1, 31, context.cache.num_blocks - 1):
        np.testing.assert_array_equal(steps.logits_of(context, IDS, blocks=[block]), first)


@every_form
def test_what_unused_cells_hold_does_not_matter(
    options: EngineOptions, llama: Path, make_context: MakeContext
) -> None:
    clean = steps.logits_of(make_context(llama, options), IDS, piece=9)
    context = make_context(llama, options)
    spoil(context)
    np.testing.assert_array_equal(steps.logits_of(context, IDS, piece=9), clean)


@every_form
def test_rows_can_be_used_again(options: EngineOptions, llama: Path, make_context: MakeContext) -> None:
    context = make_context(llama, options)
    first = steps.logits_of(context, IDS, blocks=[4])
    steps.logits_of(context, IDS[::-1], blocks=[4])
    np.testing.assert_array_equal(steps.logits_of(context, IDS, blocks=[4]), first)


@every_form
def test_caches_are_written_in_place(options: EngineOptions, llama: Path, make_context: MakeContext) -> None:
    context = make_context(llama, options)
    spoil(context)
    before = {name: cache.copy() for name, cache in context._caches.items()}
    steps.logits_of(context, IDS[:20], blocks=[5])
    for name, cache in context._caches.items():
        assert (cache[5, :, :20] != before[name][5, :, :20]).all()
        cache[5, :, :20] = before[name][5, :, :20]
        np.testing.assert_array_equal(cache, before[name])


def test_a_step_without_wanted_logits_still_fills_the_cache(llama: Path, make_context: MakeContext) -> None:
    context = make_context(llama, EXACT)
    whole = steps.logits_of(context, IDS)
    feed = Feed(IDS, [0])
    for count in (1, 50):
        silent = context.step(steps.batch([(feed, count)], logits=False))
        assert silent.logits.shape == (0, whole.shape[1])
        feed.past += count
    steps.step(context, [(feed, len(IDS) - 51)])
    np.testing.assert_allclose(feed.all_logits(), whole[51:], atol=EXACT_BOUND)


def test_only_the_wanted_rows_come_in_their_order(llama: Path, make_context: MakeContext) -> None:
    context = make_context(llama, EXACT)
    whole = steps.logits_of(context, IDS)
    everything = steps.batch([(Feed(IDS, [0]), len(IDS))])
    for rows in ([0], [99], [3, 50, 51], list(range(100))):
        some = replace(everything, logit_rows=np.array(rows, np.int64))
        np.testing.assert_array_equal(context.step(some).logits, whole[rows])


def test_logits_are_kept_in_memory_that_the_next_step_overwrites(
    llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, EXACT)
    batch = steps.batch([(Feed(IDS, [0]), 3)])
    first = context.step(batch).logits
    steps.logits_of(context, IDS)  # more rows than a batch has sequences
    assert np.shares_memory(first, context.step(batch).logits)


def test_contexts_of_one_engine_do_not_share_a_cache(llama: Path, make_context: MakeContext) -> None:
    one, other = make_context(llama, EXACT), make_context(llama, EXACT)
    feed, stranger = Feed(IDS, [0]), Feed(IDS[::-1], [0])
    for count in (40, 1, 59):
        steps.step(one, [(feed, count)])
        steps.step(other, [(stranger, count)])
    alone = steps.logits_of(make_context(llama, EXACT), IDS)
    assert np.abs(feed.all_logits() - alone).max() < EXACT_BOUND


def test_threads_can_step_contexts_at_once(llama: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(llama, EXACT)
    results: list[FloatArray] = []

    def run() -> None:
        context = engine.create_context()
        results.append(steps.logits_of(context, IDS, piece=2))
        context.close()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_other_python_threads_run_during_a_step(demo_path: Path, make_context: MakeContext) -> None:
    context = make_context(demo_path, replace(EXACT, max_context=DEMO_CONTEXT))
    batch = steps.batch([(Feed([1] * 256, [0]), 256)], logits=False)
    entered, gaps = threading.Event(), []

    def watch() -> None:
        entered.set()
        last = time.perf_counter()
        while entered.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    entered.wait()
    began = time.perf_counter()
    context.step(batch)
    took = time.perf_counter() - began
    entered.clear()
    watcher.join()
    assert max(gaps) < took / 2, f"a step of {took:.3f} s held the interpreter for {max(gaps):.3f} s"


def test_there_is_a_row_for_each_sequence_of_the_largest_batch(
    llama: Path, make_context: MakeContext
) -> None:
    cache = make_context(llama, replace(EXACT, max_batch=7)).cache
    assert (cache.num_blocks, cache.block_size) == (7, 256)
    assert cache.bytes_per_block == 256 * 2 * 3 * 2 * 16 * 4


def test_a_context_longer_than_a_row_is_cut_to_it(
    llama: Path, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = open_engine(llama, replace(EXACT, max_context=100))
    assert "sequences may have 100 of the model's 256 tokens" in caplog.text
    assert engine.model.spec.context_length == 100
    context = engine.create_context()
    assert context.cache.block_size == 100
    assert np.isfinite(steps.logits_of(context, IDS)).all()
    with pytest.raises(EngineError, match="101 tokens does not fit in the context of 100"):
        context.step(steps.batch([(Feed([1] * 101, [0]), 101)]))
    context.close()


def test_the_rows_fit_in_the_memory_of_the_setting(
    llama: Path, make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    row = 196608
    context = make_context(llama, replace(EXACT, cache_gib=10.5 * row / (1 << 30)))
    assert context.cache.num_blocks == 9, "and a spare one"
    assert "holds 9 sequences of 256 tokens, fewer than the 64 of the largest batch" in caplog.text
    feeds = [(Feed(IDS, [block]), 30) for block in range(9)]
    steps.step(context, feeds)


def test_half_of_the_memory_left_is_the_caches(
    llama: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.ort.available_bytes", lambda: 10 * 196608)
    assert make_context(llama, EXACT).cache.num_blocks == 4


def test_a_cache_too_large_for_the_machine_is_refused_with_the_numbers(
    llama: Path, open_engine: OpenEngine
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"100000 GiB was asked for, but only [0-9.]+ GiB"):
        open_engine(llama, replace(EXACT, cache_gib=1e5)).create_context()


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers(
    llama: Path, open_engine: OpenEngine
) -> None:
    with pytest.raises(OutOfMemoryError, match="a row of 256 tokens takes 196608 bytes"):
        open_engine(llama, replace(EXACT, cache_gib=3e-4)).create_context()


def test_more_memory_than_the_system_maps_is_refused_with_the_numbers(
    llama: Path, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.ort.available_bytes", lambda: 1 << 62)
    huge = replace(EXACT, max_batch=1 << 40, cache_gib=1e9)
    with pytest.raises(OutOfMemoryError, match=r"rows of 196608 bytes, .* could not be allocated"):
        open_engine(llama, huge).create_context()


def test_what_open_contexts_have_yet_to_take_counts_against_the_memory_left(
    llama: Path, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.ort.available_bytes", lambda: 20 << 20)
    engine = open_engine(llama, replace(EXACT, cache_gib=13 / 1024))
    first = engine.create_context()
    with pytest.raises(OutOfMemoryError, match=r"0\.0126953 GiB was asked for, but only 0\.01 GiB"):
        engine.create_context()
    feeds = [(Feed([5] * 250, [block]), 250) for block in range(first.cache.num_blocks)]
    first.step(steps.batch(feeds, logits=False))
    engine.create_context().close()  # the first has taken nearly all of its own
    first.close()
    engine.create_context().close()


def test_a_cell_takes_memory_when_it_is_first_written_and_gives_it_back(
    llama: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(llama, replace(EXACT, max_batch=400))

    def fill() -> tuple[int, int]:
        context = engine.create_context()
        empty = _resident_bytes()
        blocks = range(context.cache.num_blocks)
        context.step(steps.batch([(Feed([5], [block]), 1) for block in blocks], logits=False))
        context.step(steps.batch([(Feed([5] * 256, [block]), 256) for block in blocks], logits=False))
        full = _resident_bytes()
        assert context.promised_bytes == context.cache.bytes_per_block, "the spare row's"
        context.close()
        return empty, full

    fill()
    before = _resident_bytes()
    empty, full = fill()
    assert empty < before + (8 << 20)
    assert full > before + (64 << 20)
    assert _resident_bytes() < before + (8 << 20)


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def test_a_step_that_makes_no_sense_is_refused_and_harms_nothing(
    llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, EXACT)
    batch = steps.batch([(Feed(IDS, [0]), 3)])
    before = context.step(batch).logits.copy()
    for change, message in (
        ({"token_ids": np.array([1, 320, 2], np.int64)}, r"token id .* 0 \.\. 319"),
        ({"block_ids": np.array([64], np.int32)}, "block of the step"),
        ({"past_lens": np.array([254], np.int32)}, "257 tokens .* context of 256"),
    ):
        with pytest.raises(EngineError, match=message):
            context.step(replace(batch, **change))
    np.testing.assert_array_equal(context.step(batch).logits, before)


def test_a_fault_of_onnx_runtime_says_what_it_was(
    llama: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(llama, EXACT)
    monkeypatch.setattr(type(context._inputs), "of", lambda _self, _run: {})
    with pytest.raises(EngineError, match=r"ONNX Runtime failed in a step of 3 tokens: .*input_ids"):
        context.step(steps.batch([(Feed(IDS, [0]), 3)]))


def test_closing_twice_is_allowed_and_a_closed_context_refuses_steps(
    llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, EXACT)
    context.close()
    context.close()
    with pytest.raises(EngineError, match="closed"):
        context.step(steps.batch([(Feed(IDS, [0]), 3)]))


def test_a_closed_engine_makes_no_contexts(llama: Path, tmp_path: Path) -> None:
    engine = open_onnxruntime(llama, replace(EXACT, cache_folder=tmp_path), lambda _phase, _done: None)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.create_context()


def test_opening_reports_progress_in_order(llama: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    engine = open_onnxruntime(
        llama, replace(EXACT, cache_folder=tmp_path), lambda phase, done: heard.append((phase, done))
    )
    engine.close()
    assert list(dict.fromkeys(phase for phase, _ in heard)) == ["read", "convert", "compile"]
    assert heard[-1] == ("compile", 1.0)


def test_threads_follow_the_setting_and_else_the_processors_allowed(
    llama: Path, open_engine: OpenEngine
) -> None:
    def threads(options: EngineOptions) -> int:
        session = open_engine(llama, options)._session
        assert session is not None
        return int(session.get_session_options().intra_op_num_threads)

    assert threads(EXACT) == usable_processors()
    assert threads(replace(EXACT, num_threads=1)) == 1


def test_threads_do_not_stay_awake_after_a_step(llama: Path, open_engine: OpenEngine) -> None:
    session = open_engine(llama, EXACT)._session
    assert session is not None
    settings = session.get_session_options()
    assert int(settings.get_session_config_entry("session.intra_op.spin_duration_us")) < 100


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engines.ort")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineNotInstalledError, match=r"pip install 'streamsrv\[onnxruntime\]'"):
        import engines.ort  # noqa: F401


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": WeightFormat.FP8}, "hold weights as fp8; choose of int8, int4, float32"),
        ({"weights": WeightFormat.F16}, "hold weights as f16"),
        ({"weights": WeightFormat.BF16}, "hold weights as bf16"),
        ({"precision": Precision.BF16}, "compute in bf16; choose of auto, f32"),
        ({"cache_type": CacheType.U8}, "keep keys and values as u8; choose of auto, f32"),
    ],
)
def test_what_it_does_not_have_is_refused_with_what_it_has(
    change: dict[str, object], message: str, llama: Path, tmp_path: Path
) -> None:
    options = EngineOptions(cache_folder=tmp_path)
    with pytest.raises(EngineError, match=message):
        open_onnxruntime(llama, replace(options, **change), lambda _phase, _done: None)  # type: ignore[arg-type]


def test_a_closed_engine_gives_its_weights_back(demo_path: Path, tmp_path: Path) -> None:
    def open_and_close() -> tuple[int, int]:
        """Resident bytes while it is open, and after it is closed but still known."""
        options = EngineOptions(max_context=DEMO_CONTEXT, cache_folder=tmp_path)
        engine = open_onnxruntime(demo_path, options, lambda _phase, _done: None)
        context = engine.create_context()
        steps.logits_of(context, IDS)
        context.close()
        in_use = _resident_bytes()
        engine.close()
        return in_use, _resident_bytes()

    open_and_close()
    in_use, closed = open_and_close()
    assert closed < in_use - (100 << 20)


@every_form
def test_memory_stays_flat_over_steps_of_many_shapes(
    options: EngineOptions, llama: Path, make_context: MakeContext
) -> None:
    context = make_context(llama, options)

    def run(sizes: range) -> None:
        for size in sizes:
            feeds = [Feed([5] * size, [0])] + [Feed([7], [1 + i]) for i in range(size % 50)]
            context.step(steps.batch([(feed, len(feed.token_ids)) for feed in feeds]))

    run(range(1, 130))
    run(range(250, 200, -1))  # the largest buffers
    before = _resident_bytes()
    run(range(130, 240))
    assert _resident_bytes() < before + (8 << 20)
