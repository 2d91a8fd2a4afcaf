"""Scheduled steps on engines that compute: every output is that of a run alone."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from engines.api import CacheSpec, Engine, ExecutionContext
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.registry import open_engine
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import Scheduler, SchedulerCounters, Step
from streamsrv.sequence import Sequence
from tests import steps, tiny
from tests.conftest import TinyPaths

EXACT = EngineOptions(WeightFormat.FLOAT32, Precision.F32, CacheType.F32, max_batch=8, cache_gib=0.01)
NUM_OUTPUT = 24


@dataclass(slots=True)
class Model:
    """An engine on the tiny model, with what runs alone give."""

    engine: Engine
    context: ExecutionContext
    alone: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def has_whole_rows(self) -> bool:
        return self.engine.model.spec.context_length <= self.context.cache.block_size

    def output(self, prompt: tuple[int, ...]) -> list[int]:
        """The greedy output of a run alone, prompt in one piece, token by token."""
        if prompt not in self.alone:
            context = self.engine.create_context()
            self.alone[prompt], _ = steps.greedy(context, list(prompt), NUM_OUTPUT)
            context.close()
        return self.alone[prompt]


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def model(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, TinyPaths],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    pytest.importorskip(request.param)
    options = replace(EXACT, cache_folder=tmp_path_factory.mktemp("cache"))
    engine = open_engine(request.param, tiny_models[tiny.LLAMA_TIED.name].gguf, options)
    context = engine.create_context()
    yield Model(engine, context)
    context.close()
    engine.close()


def run_mix(model: Model, seed: int) -> SchedulerCounters:
    """Requests with beginnings in common come, guess and are preempted; each gets its output."""
    rng = random.Random(seed)
    cache, vocabulary = model.context.cache, 300
    stem = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 100))]
    prompts = [
        (*stem[: rng.randint(1, len(stem))], *(rng.randrange(3, vocabulary) for _ in range(rng.randrange(9))))
        for _ in range(rng.randint(2, 5))
    ]
    sequences = list[Sequence]()
    for prompt in prompts:
        first = len(sequences)
        for _ in range(rng.choice([1, 1, 3])):
            request = GenerateRequest("", prompt, stop=StopConditions(NUM_OUTPUT))
            number = len(sequences)
            sequences.append(
                Sequence(number, request, max_tokens=NUM_OUTPUT, eos_token_ids=frozenset(), group_id=first)
            )
    most = max(map(len, prompts)) + NUM_OUTPUT
    least_blocks = 1 if model.has_whole_rows else -(-most // cache.block_size)
    num_blocks = rng.randint(least_blocks, min(cache.num_blocks, 3 * least_blocks))
    scheduler = Scheduler(
        CacheSpec(num_blocks, cache.block_size, 0),
        max_running=rng.randint(1, 6),
        max_step_tokens=rng.choice([6, 20, 64]),
        prefix_cache=True,
        whole_rows=model.has_whole_rows,
    )
    pending = list(sequences)
    while pending or scheduler.has_work:
        while pending and (rng.random() < 0.5 or not scheduler.has_work):
            scheduler.add(pending.pop(0))
        step = scheduler.schedule(guesses_of(model, sequences, rng))
        assert step is not None
        scheduler.update(step, verified(model.context, step))
        for sequence in step.sampled:
            if sequence.num_output_tokens == NUM_OUTPUT:
                scheduler.finish(sequence)
        scheduler.check_integrity()
    for sequence in sequences:
        prompt, output = tuple(sequence.token_ids[:-NUM_OUTPUT]), sequence.token_ids[-NUM_OUTPUT:]
        assert output == model.output(prompt), f"sequence {sequence.sequence_id} of mix {seed}"
    return scheduler.counters


def guesses_of(model: Model, sequences: list[Sequence], rng: random.Random) -> dict[int, list[int]]:
    """Guess what will come for some, with mistakes."""
    guesses = {}
    for sequence in sequences:
        if rng.random() < 0.3:
            prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
            own = model.output(prompt)[sequence.num_output_tokens :][: rng.randint(1, 5)]
            guesses[sequence.sequence_id] = [t if rng.random() < 0.8 else rng.randrange(3, 300) for t in own]
    return guesses


def verified(context: ExecutionContext, step: Step) -> list[list[int]]:
    """The best tokens of a step, as far as the guesses before them are right."""
    best = iter(context.step(step.batch).logits.argmax(axis=1).tolist())
    accepted = []
    for part in step.parts:
        rows = [next(best) for _ in range(part.num_sampled_rows)]
        if rows:
            right = 0
            while right < part.num_drafts and rows[right] == part.guesses[right]:
                right += 1
            accepted.append(rows[: right + 1])
    return accepted


def run_mixes(model: Model, seeds: range) -> None:
    found = preempted = accepted = 0
    for seed in seeds:
        counters = run_mix(model, seed)
        found += counters.num_cached_tokens
        preempted += counters.num_preemptions
        accepted += counters.num_accepted_tokens
    assert found > 0
    assert accepted > 0
    assert preempted > 0 or model.has_whole_rows


def test_random_mixes_give_what_runs_alone_give(model: Model) -> None:
    run_mixes(model, range(10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_mixes_give_what_runs_alone_give(model: Model) -> None:
    run_mixes(model, range(10, 210))
