"""The TensorRT engines over the stand-ins: numbers, memory, plans, and how everything ends that can fail."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.api import EngineError, ExecutionContext, OutOfMemoryError, StepBatch
from engines.cuda_api import CudaDeviceLostError, CudaError
from engines.options import CacheType, EngineOptions
from engines.plans import PLAN_FILE
from engines.trt import TrtEngine
from engines.trt_library import LIBRARY_NAMES, TENSORRT_RTX
from tests import steps, tiny
from tests.accuracy import oracle_of
from tests.conftest import TinyPaths
from tests.oracle import OracleDecoder
from tests.standins import cuda_gpu
from tests.standins.cuda import Call, Failure
from tests.steps import Feed
from tests.trt_rig import Rig, in_cache, make_rig

BOUND = 2e-4
"""Largest difference of a logit in float32 from the oracle; 6e-5 was measured."""
IDS = [(3 + 31 * i) % 320 for i in range(60)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared models and plans that tests may read and add to."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A GPU and the tensorrt library; everything on it must have been released in the end."""
    made = make_rig()
    yield made
    made.assert_all_released()


@pytest.fixture
def engine(rig: Rig, llama: Path, cache: Path) -> Iterator[TrtEngine]:
    made = rig.open(llama, in_cache(cache))
    yield made
    made.close()


@pytest.fixture
def context(engine: TrtEngine) -> Iterator[ExecutionContext]:
    made = engine.create_context()
    yield made
    made.close()


def one_step(num_tokens: int = 1, block: int = 0) -> StepBatch:
    return steps.batch([(Feed([1] * num_tokens, [block]), num_tokens)])


def drive(context: ExecutionContext, oracle: OracleDecoder, num_steps: int, seed: int) -> None:
    """Take steps on random sequences that come and go, and hold each of their logits against the oracle.

    At most as many sequences as blocks, of ragged lengths, in random pieces; some rest for a step.
    """
    random = np.random.default_rng(seed)
    num_blocks, longest = context.cache.num_blocks, 48
    free = list(range(num_blocks))
    feeds: list[Feed] = []
    for _ in range(num_steps):
        while free and random.random() < 0.4:
            ids = random.integers(0, 320, random.integers(2, longest)).tolist()
            feeds.append(Feed(ids, [free.pop(int(random.integers(len(free))))]))
        taken = [feed for feed in feeds if random.random() < 0.8] or feeds[:1]
        parts, room = [], 64
        for feed in taken:
            left = len(feed.token_ids) - feed.past
            count = min(left, room, 1 if random.random() < 0.6 else int(random.integers(1, 12)))
            if count:
                parts.append((feed, count))
                room -= count
        if parts:
            steps.step(context, parts)
        for feed in [feed for feed in feeds if feed.past == len(feed.token_ids)]:
            difference = np.abs(feed.all_logits() - oracle.logits(feed.token_ids)).max()
            assert difference < BOUND
            feeds.remove(feed)
            free.append(feed.blocks[0])


# Numbers.


@pytest.mark.parametrize("model", tiny.EVERY_MODEL, ids=lambda model: model.name)
def test_logits_are_the_oracles_however_a_sequence_is_cut(
    model: tiny.TinyModel, tiny_models: dict[str, TinyPaths], cache: Path, rig: Rig
) -> None:
    path = tiny_models[model.name].gguf
    engine = rig.open(path, in_cache(cache))
    context = engine.create_context()
    expected = oracle_of(path).logits(IDS)
    for piece in (0, 1, 7):
        assert np.abs(steps.logits_of(context, IDS, piece=piece, blocks=[1]) - expected).max() < BOUND
    context.close()
    engine.close()


def test_sequences_of_all_lengths_at_once_get_the_oracles_logits(
    context: ExecutionContext, llama: Path
) -> None:
    drive(context, oracle_of(llama), num_steps=80, seed=1)


def test_nothing_is_read_before_it_has_come(llama: Path, cache: Path) -> None:
    # The stand-in's streams run nothing before something waits for them.
    rig = make_rig(lazy=True)
    engine = rig.open(llama, in_cache(cache))
    context = engine.create_context()
    drive(context, oracle_of(llama), num_steps=40, seed=2)
    context.close()
    engine.close()
    rig.assert_all_released()


def test_rows_move_when_low_ones_are_free(rig: Rig, context: ExecutionContext, llama: Path) -> None:
    oracle = oracle_of(llama)
    feeds = [Feed([(7 * n + i) % 320 for i in range(20)], [n]) for n in range(8)]
    steps.step(context, [(feed, 9) for feed in feeds[:4]])
    steps.step(context, [(feed, 9) for feed in feeds[4:]])
    kept = [feeds[0], feeds[7]]
    with rig.device() as device:
        num_copies = device.num_calls[Call.COPY]
        for _ in range(11):
            steps.step(context, [(feed, 1) for feed in kept])
        assert device.num_calls[Call.COPY] > num_copies
    for feed in kept:
        assert np.abs(feed.all_logits() - oracle.logits(feed.token_ids)).max() < BOUND


def test_contexts_on_threads_of_their_own_share_one_engine(rig: Rig, llama: Path, cache: Path) -> None:
    engine = rig.open(llama, in_cache(cache, num_contexts=3))
    oracles = [oracle_of(llama) for _ in range(3)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            context = engine.create_context()
            try:
                drive(context, oracles[number], num_steps=40, seed=number)
            finally:
                context.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rig.trt.num_builds <= 1
    engine.close()


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_tokens_are_the_onnxruntime_engines(name: str, llama: Path, cache: Path) -> None:
    from engines.ort import open_onnxruntime

    other = open_onnxruntime(llama, in_cache(cache), lambda _phase, _done: None)
    other_context = other.create_context()
    expected, _ = steps.greedy(other_context, IDS[:9], 40)
    other_context.close()
    other.close()
    rig = make_rig(name)
    engine = rig.open(llama, in_cache(cache))
    assert engine.name == name
    context = engine.create_context()
    assert steps.greedy(context, IDS[:9], 40)[0] == expected
    context.close()
    engine.close()
    rig.assert_all_released()


@pytest.mark.slow
def test_the_demo_models_tokens_are_the_onnxruntime_engines(
    demo_path: Path, rig: Rig, tmp_path: Path
) -> None:
    from engines.ort import open_onnxruntime

    options = in_cache(tmp_path, max_context=256)
    other = open_onnxruntime(demo_path, options, lambda _phase, _done: None)
    other_context = other.create_context()
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    expected, logits = steps.greedy(other_context, prompt, 24)
    other_context.close()
    other.close()
    rig = make_rig(total_bytes=2 << 30)
    engine = rig.open(demo_path, options)
    context = engine.create_context()
    ids, found = steps.greedy(context, prompt, 24)
    assert ids == expected
    assert np.abs(found - logits).max() < BOUND
    context.close()
    engine.close()
    rig.assert_all_released()


def test_16_bit_floats_are_the_default(rig: Rig, llama: Path, cache: Path) -> None:
    options = EngineOptions(max_batch=4, max_step_tokens=32, cache_folder=cache)
    engine = rig.open(llama, options)
    context = engine.create_context()
    expected = oracle_of(llama).logits(IDS)
    got = steps.logits_of(context, IDS)
    assert np.sqrt(np.mean((got - expected) ** 2)) / expected.std() < 0.01
    context.close()
    engine.close()


def test_a_context_can_be_shorter_than_the_models_in_any_measure(llama: Path, cache: Path, rig: Rig) -> None:
    for wanted in (1, 24, 65, 100, 256):
        engine = rig.open(llama, in_cache(cache, max_context=wanted))
        context = engine.create_context()
        assert engine.model.spec.context_length == wanted
        assert wanted <= context.cache.block_size < wanted + 64
        steps.logits_of(context, IDS[:wanted])
        context.close()
        engine.close()


def test_unwritten_cells_are_not_numbers_that_spread(
    monkeypatch: pytest.MonkeyPatch, llama: Path, cache: Path
) -> None:
    monkeypatch.setattr(cuda_gpu, "FRESH_BYTE", 0xFF)  # as a float: not a number
    rig = make_rig()
    engine = rig.open(llama, in_cache(cache))
    context = engine.create_context()
    assert np.isfinite(steps.logits_of(context, IDS)).all()
    context.close()
    engine.close()


# Candidates and rows of logits.


def test_candidates_are_the_best_of_the_full_rows(context: ExecutionContext) -> None:
    feeds = [Feed([5, 6, 7], [0]), Feed([8], [1]), Feed([9], [3])]
    result = context.step(steps.batch([(feeds[0], 3), (feeds[1], 1), (feeds[2], 1)]))
    assert result.candidates is not None
    logits = result.logits.astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : context.num_candidates]
    assert np.array_equal(result.candidates.token_ids, order)
    assert np.array_equal(result.candidates.logits, np.take_along_axis(result.logits, order, 1))
    expected = np.log(np.exp(logits).sum(axis=1))
    assert np.abs(result.candidates.logsumexp - expected).max() < 2e-5


def test_only_the_wanted_rows_are_copied_and_others_can_be_fetched(
    rig: Rig, context: ExecutionContext
) -> None:
    feeds = [Feed([5, 6, 7], [0]), *(Feed([8 + n], [1 + n]) for n in range(4))]
    parts = [(feed, len(feed.token_ids)) for feed in feeds]
    expected = context.step(steps.batch(parts)).logits.copy()
    batch = replace(steps.batch(parts), full_rows=np.array([0, 0, 1, 0, 0, 1, 0], np.bool_))
    result = context.step(batch)
    assert result.fetch is not None
    assert np.array_equal(result.logits[[2, 5]], expected[[2, 5]])
    result.logits[0] = -1
    with rig.device() as device:
        num_copies = device.num_calls[Call.COPY_OUT]
        result.fetch(np.array([6, 2], np.int32))  # one of them is here
        assert device.num_calls[Call.COPY_OUT] == num_copies + 1
    assert np.array_equal(result.logits[[2, 5, 6]], expected[[2, 5, 6]])
    assert (result.logits[0] == -1).all()
    result.fetch(np.arange(7, dtype=np.int32))
    assert np.array_equal(result.logits, expected)


def test_rows_of_a_step_that_is_over_cannot_be_fetched(context: ExecutionContext) -> None:
    first = context.step(replace(one_step(), full_rows=np.zeros(1, np.bool_)))
    context.step(one_step())
    assert first.fetch is not None
    with pytest.raises(EngineError, match="after a later step"):
        first.fetch(np.zeros(1, np.int32))


def test_a_step_may_want_more_rows_than_are_kept(context: ExecutionContext, llama: Path) -> None:
    oracle = oracle_of(llama)
    feeds = [Feed([(n + i) % 320 for i in range(20)], [n]) for n in range(3)]
    batch = steps.batch([(feed, 20) for feed in feeds])
    result = context.step(replace(batch, full_rows=np.zeros(60, np.bool_)))
    assert result.fetch is not None
    result.fetch(np.arange(60, dtype=np.int32))
    assert result.candidates is not None
    for n, feed in enumerate(feeds):
        expected = oracle.logits(feed.token_ids)
        rows = slice(20 * n, 20 * n + 20)
        assert np.abs(result.logits[rows] - expected).max() < BOUND
        assert np.array_equal(result.candidates.token_ids[rows, 0], expected.argmax(axis=1))


def test_a_step_may_want_no_row(context: ExecutionContext) -> None:
    feed = Feed([5, 6, 7], [0])
    result = context.step(steps.batch([(feed, 3)], logits=False))
    assert result.logits.shape == (0, 320)
    assert result.candidates is not None
    assert result.candidates.token_ids.shape == (0, context.num_candidates)


# Threads and lives.


def test_another_thread_is_refused(context: ExecutionContext) -> None:
    refused: list[str] = []

    def meddle() -> None:
        for call in (lambda: context.step(one_step()), context.close):
            try:
                call()
            except EngineError as error:
                refused.append(str(error))

    thread = threading.Thread(target=meddle)
    thread.start()
    thread.join()
    assert len(refused) == 2
    assert all("the thread that made it" in words for words in refused)
    context.step(one_step())


def test_closing_twice_is_allowed_and_a_closed_context_takes_no_step(engine: TrtEngine) -> None:
    context = engine.create_context()
    context.close()
    context.close()
    with pytest.raises(EngineError, match="the context is closed"):
        context.step(one_step())


def test_a_closed_engine_makes_no_context(rig: Rig, llama: Path, cache: Path) -> None:
    engine = rig.open(llama, in_cache(cache))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.create_context()


def test_an_engine_waits_for_contexts_that_are_being_closed(rig: Rig, llama: Path, cache: Path) -> None:
    engine = rig.open(llama, in_cache(cache))
    made, closing = threading.Event(), threading.Event()

    def live() -> None:
        context = engine.create_context()
        made.set()
        closing.wait()
        context.close()

    thread = threading.Thread(target=live)
    thread.start()
    made.wait()
    threading.Timer(0.05, closing.set).start()
    engine.close()
    thread.join()


def test_an_engine_is_not_closed_beneath_a_context(
    engine: TrtEngine,
    context: ExecutionContext,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engines.trt._CLOSE_S", 0.01)
    engine.close()
    assert "1 contexts are still open" in caplog.text
    context.step(one_step())


def test_a_senseless_batch_is_refused_and_harms_nothing(context: ExecutionContext) -> None:
    with pytest.raises(EngineError, match="token id"):
        context.step(steps.batch([(Feed([320], [0]), 1)]))
    context.step(one_step())


def test_a_hundred_lives_of_contexts_leave_nothing(rig: Rig, llama: Path, cache: Path) -> None:
    engine = rig.open(llama, in_cache(cache))
    after_first: tuple[int, int] | None = None
    for _ in range(100):
        context = engine.create_context()
        context.step(one_step(3))
        context.close()
        with rig.device() as device, device.activate():
            free = device.memory_info()
        after_first = after_first or free
        assert free == after_first
    engine.close()


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps(context: ExecutionContext, rig: Rig) -> None:
    import psutil

    process = psutil.Process()
    random = np.random.default_rng(0)

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            feeds = [Feed([int(n)] * 3, [b]) for b, n in enumerate(random.integers(0, 320, 6))]
            context.step(steps.batch([(feeds[0], 3), *((feed, 1) for feed in feeds[1:])]))

    take(2000)
    live, growths = len(rig.cuda.leaks()), list[int]()
    for _ in range(3):  # whatever else the process holds may grow once
        resident = process.memory_info().rss
        take(2700)
        growths.append(process.memory_info().rss - resident)
    assert min(growths) < 2 << 20, growths
    assert len(rig.cuda.leaks()) == live


# Faults.


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        (Call.ALLOCATE, Failure.OUT_OF_MEMORY),
        (Call.PINNED, Failure.OUT_OF_MEMORY),
        (Call.STREAM, Failure.INVALID_VALUE),
        (Call.EVENT, Failure.INVALID_VALUE),
        (Call.FILL, Failure.INVALID_VALUE),
        (Call.COPY_IN, Failure.INVALID_VALUE),
        (Call.MEMORY_INFO, Failure.INVALID_VALUE),
        (Call.STREAM_SYNCHRONIZE, Failure.DEVICE_LOST),
    ],
    ids=lambda value: value.name,
)
def test_a_context_that_cannot_be_made_leaves_nothing(
    call: Call, failure: Failure, rig: Rig, engine: TrtEngine
) -> None:
    before = sorted(rig.cuda.leaks())
    engine.create_context().close()
    with rig.device() as device:
        num_calls = device.num_calls[call]
        engine.create_context().close()
        num_calls = device.num_calls[call] - num_calls
    assert num_calls
    kind = OutOfMemoryError if failure is Failure.OUT_OF_MEMORY else CudaError
    for nth in range(1, 2 if failure is Failure.DEVICE_LOST else num_calls + 1):
        with rig.device() as device:
            device.fail(call, failure, nth)
        with pytest.raises(kind):
            engine.create_context()
        assert sorted(rig.cuda.leaks()) == before


def test_a_step_that_tensorrt_refuses_names_the_call_and_its_words(
    rig: Rig, engine: TrtEngine, context: ExecutionContext
) -> None:
    context.step(one_step())
    other = engine.create_context()
    rig.trt.behaviour.refuse_execution = rig.trt.behaviour.num_executions + 1
    with pytest.raises(OutOfMemoryError, match=r"refused execute_async_v3 .*tensorrt says: .*out of memory"):
        context.step(one_step())
    with pytest.raises(EngineError, match="of no use"):
        context.step(one_step())
    other.step(one_step())
    other.close()


@pytest.mark.parametrize(
    ("call", "nth"),
    [(Call.COPY_IN, 1), (Call.ENQUEUE, 1), (Call.COPY_OUT, 1), (Call.COPY_OUT, 2), (Call.RECORD, 1)],
    ids=lambda value: str(value),
)
def test_work_that_fails_on_the_device_loses_it(call: Call, nth: int, rig: Rig, engine: TrtEngine) -> None:
    context, other = engine.create_context(), engine.create_context()
    with rig.device() as device:
        device.fail(call, Failure.LAUNCH_FAILED, nth)
    with pytest.raises(CudaDeviceLostError, match="launch failure"):
        context.step(one_step())
    with pytest.raises(CudaDeviceLostError):
        other.step(one_step())
    context.close()
    other.close()
    with pytest.raises(CudaDeviceLostError):
        engine.create_context()


def test_a_kernel_that_crashes_loses_the_device(rig: Rig, context: ExecutionContext) -> None:
    rig.trt.behaviour.crash_execution = rig.trt.behaviour.num_executions + 1
    with pytest.raises(CudaDeviceLostError, match="launch failure"):
        context.step(one_step())


def test_a_device_that_is_lost_between_steps_is_told_from_a_refusal(
    rig: Rig, context: ExecutionContext
) -> None:
    with rig.device() as device:
        device.lose()
    with pytest.raises(CudaDeviceLostError, match="ECC"):
        context.step(one_step())


# Memory.


def test_too_little_memory_is_refused_with_the_arithmetic(llama: Path, cache: Path) -> None:
    rig = make_rig(total_bytes=514 << 20)
    engine = rig.open(llama, in_cache(cache, num_contexts=2))
    with pytest.raises(OutOfMemoryError) as caught:
        engine.create_context()
    engine.close()
    rig.assert_all_released()
    words = str(caught.value)
    for part in (
        "513.5 MiB of the GPU",
        "512.0 MiB in reserve",
        "each of 2 contexts has 0.8 MiB",
        ", 0.0 MiB are left",
    ):
        assert part in words


def test_weights_that_do_not_fit_are_refused_and_their_plan_is_kept(
    llama: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = make_rig(total_bytes=1 << 18)
    with pytest.raises(OutOfMemoryError, match="are free; free some"):
        rig.open(llama, in_cache(cache))
    rig.assert_all_released()
    with_room = make_rig()
    with_room.open(llama, in_cache(cache)).close()
    assert with_room.trt.num_builds == 0


def test_as_many_rows_as_fit_are_given_and_each_context_gets_its_share(llama: Path, cache: Path) -> None:
    row_bytes = 3 * 2 * 2 * 256 * 16 * 4
    rig = make_rig(total_bytes=(512 << 20) + 3 * ((2 << 20) + 7 * row_bytes))
    engine = rig.open(llama, in_cache(cache, num_contexts=3))
    contexts = [engine.create_context() for _ in range(3)]
    rows = [context.cache.num_blocks for context in contexts]
    assert min(rows) >= 1
    assert max(rows) - min(rows) <= 1
    assert max(rows) < 8
    contexts[1].close()
    contexts[1] = engine.create_context()  # as after a restart of its worker
    assert abs(contexts[1].cache.num_blocks - rows[1]) <= 1
    for context in contexts:
        context.step(one_step())
        context.close()
    engine.close()
    rig.assert_all_released()


def test_the_setting_for_the_cache_counts_and_is_held_against_what_is_free(
    rig: Rig, llama: Path, cache: Path
) -> None:
    engine = rig.open(llama, in_cache(cache, cache_gib=5 * 196608 / 2**30))
    context = engine.create_context()
    assert context.cache.num_blocks == 4  # and a spare one
    context.close()
    engine.close()
    engine = rig.open(llama, in_cache(cache, cache_gib=1.0))
    with pytest.raises(OutOfMemoryError, match="1 GiB for each context was asked for"):
        engine.create_context()
    engine.close()


# Plans.


def test_a_plan_is_built_once(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reported: list[str] = []
    rig = make_rig()
    for _ in range(2):
        rig.open(llama, in_cache(tmp_path), lambda phase, _done: reported.append(phase)).close()
    assert rig.trt.num_builds == 1
    assert "build" in reported
    assert caplog.text.count("builds a plan, once") == 1
    rig.assert_all_released()


def plan_file(cache: Path) -> Path:
    (file,) = cache.rglob(PLAN_FILE)
    return file


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_damaged_plan_is_built_again(
    harm: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.open(llama, in_cache(tmp_path)).close()
    file = plan_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if harm == "changed" else content[:-7])
    engine = rig.open(llama, in_cache(tmp_path))
    context = engine.create_context()
    context.step(one_step())
    context.close()
    engine.close()
    assert rig.trt.num_builds == 2
    assert "is damaged" in caplog.text


def test_a_plan_of_another_version_of_the_library_is_not_used(llama: Path, tmp_path: Path) -> None:
    make_rig().open(llama, in_cache(tmp_path)).close()
    newer = make_rig(version="11.5.0")
    newer.open(llama, in_cache(tmp_path)).close()
    assert newer.trt.num_builds == 1


def test_a_plan_that_the_runtime_refuses_is_built_again(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.open(llama, in_cache(tmp_path)).close()
    rig.trt.behaviour.refuse_plans = 1
    rig.open(llama, in_cache(tmp_path)).close()
    assert rig.trt.num_builds == 2
    assert "refused by the runtime" in caplog.text
    assert "not compatible" in caplog.text
    rig.assert_all_released()


def test_a_new_plan_that_the_runtime_refuses_is_refused_for_good(llama: Path, tmp_path: Path) -> None:
    rig = make_rig()
    rig.trt.behaviour.refuse_plans = 9
    with pytest.raises(EngineError, match=r"built a plan of .* and does not take it on Stand-in GPU"):
        rig.open(llama, in_cache(tmp_path))
    assert rig.trt.num_builds == 1
    rig.assert_all_released()


def test_caches_that_are_not_updated_in_place_are_refused(llama: Path, tmp_path: Path) -> None:
    rig = make_rig()
    rig.trt.behaviour.has_aliases = False
    with pytest.raises(EngineError, match=r"new_key_cache\.0 is in the place of None"):
        rig.open(llama, in_cache(tmp_path))
    rig.assert_all_released()


def test_a_build_that_fails_says_what_the_library_says(llama: Path, tmp_path: Path) -> None:
    rig = make_rig()
    rig.trt.refuse_builds = 1
    with pytest.raises(EngineError, match="Could not find any implementation"):
        rig.open(llama, in_cache(tmp_path))
    rig.assert_all_released()


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_prepared(llama: Path, tmp_path: Path) -> None:
    rig = make_rig()
    with pytest.raises(CudaError, match="there is no GPU 3"):
        rig.open(llama, in_cache(tmp_path, device=3))
    assert list(tmp_path.iterdir()) == []


def test_settings_that_exclude_each_other_are_refused(llama: Path, tmp_path: Path) -> None:
    rig = make_rig()
    with pytest.raises(EngineError, match="does not go with"):
        rig.open(llama, in_cache(tmp_path, cache_type=CacheType.U8))
    rig.assert_all_released()


# CUDA graphs.


@pytest.fixture
def recording(rig: Rig, llama: Path, cache: Path) -> Iterator[Callable[..., ExecutionContext]]:
    """Contexts that record their decode runs."""
    opened: list[ExecutionContext] = []
    engine = rig.open(llama, in_cache(cache, cuda_graphs=True))

    def make() -> ExecutionContext:
        opened.append(engine.create_context())
        return opened[-1]

    yield make
    for context in opened:
        context.close()
    engine.close()


def test_recorded_runs_give_the_oracles_logits(
    recording: Callable[[], ExecutionContext], rig: Rig, llama: Path
) -> None:
    drive(recording(), oracle_of(llama), num_steps=80, seed=3)
    with rig.device() as device:
        assert device.num_calls[Call.LAUNCH] > 20


def test_a_run_is_recorded_the_second_time_and_replayed_from_then_on(
    recording: Callable[[], ExecutionContext], rig: Rig
) -> None:
    context = recording()
    with rig.device() as device:
        launches, executions = [], []
        for _ in range(4):
            context.step(one_step())
            launches.append(device.num_calls[Call.LAUNCH])
            executions.append(rig.trt.behaviour.num_executions)
            context.step(one_step(5))  # which changes profile, shapes and addresses in between
    assert np.diff([0, *launches]).tolist() == [0, 1, 1, 1]
    assert executions == [1, 3, 4, 5]


def test_without_recordings_steps_go_on(
    recording: Callable[[], ExecutionContext],
    rig: Rig,
    llama: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig.trt.behaviour.allocates = True  # which no capture allows
    context = recording()
    with rig.device() as device:
        drive(context, oracle_of(llama), num_steps=30, seed=4)
        assert device.num_calls[Call.LAUNCH] == 0
    assert "no more decode runs are recorded" in caplog.text


def test_the_rtx_library_records_by_itself(llama: Path, cache: Path) -> None:
    rig = make_rig(TENSORRT_RTX)
    engine = rig.open(llama, in_cache(cache, cuda_graphs=True))
    context = engine.create_context()
    drive(context, oracle_of(llama), num_steps=40, seed=5)
    context.close()
    engine.close()
    rig.assert_all_released()
    with rig.device() as device:
        assert device.num_calls[Call.BEGIN_CAPTURE] == 0


def test_the_rtx_library_compiles_kernels_for_few_shapes(llama: Path, cache: Path) -> None:
    rig = make_rig(TENSORRT_RTX)
    engine = rig.open(llama, in_cache(cache))
    context = engine.create_context()
    drive(context, oracle_of(llama), num_steps=60, seed=6)
    context.close()
    engine.close()
    rig.assert_all_released()
    sizes = [dict(shape) for shape in rig.trt.behaviour.specialized_shapes]
    assert all(size["S"] == 1 and size["B"] == size["R"] for size in sizes)
    assert {size["B"] for size in sizes} <= {1, 2, 4, 8}
