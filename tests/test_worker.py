"""A worker's loop over the scripted engine: what happens in which order, and that nothing is lost."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager

import numpy as np
import pytest

from engines.api import Candidates, EngineError, IntArray, StepBatch, StepResult
from engines.scripted import ScriptedContext, ScriptedEngine
from streamsrv.detokenizer import Detokenizer
from streamsrv.errors import DeadlinePassedError, StoppedError, WorkerLostError
from streamsrv.observer import StepReport
from streamsrv.output import Job
from streamsrv.request import GenerateRequest, SamplingParams, StopConditions
from streamsrv.scheduler import Scheduler, Step
from streamsrv.sequence import FinishReason, Sequence
from streamsrv.stream import Caller, LogMemory, OutputEnd, Stream, StreamEnd, StreamLog
from streamsrv.tokenizer import Tokenizer
from streamsrv.worker import Worker
from tests.servers import until

SCRIPT = "one two three four five six seven eight nine ten"
_LONG_S = 20.0


class Steps:
    """Holds a scripted engine's steps, numbered from 1, until they are let through or made to fail."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.failure: Exception | None = None
        self._begun = threading.Condition()
        self._permits = threading.Semaphore(0)

    def __call__(self, _: StepBatch) -> None:
        with self._begun:
            self.num_begun += 1
            self._begun.notify_all()
        assert self._permits.acquire(timeout=_LONG_S), "the test let a step wait"
        if self.failure is not None:
            raise self.failure

    def let_through(self, count: int = 1) -> None:
        self._permits.release(count)

    def wait_begun(self, number: int) -> bool:
        """Block until a step has begun, on whatever thread; False if it does not."""
        with self._begun:
            return self._begun.wait_for(lambda: self.num_begun >= number, _LONG_S)

    async def begun(self, number: int) -> None:
        assert await asyncio.to_thread(self.wait_begun, number)


class Fixture:
    """A worker that runs, and the jobs given to it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.now = 0.0
        self.reports: list[StepReport] = []
        self.ended: list[Job] = []
        self.on_step: Callable[[StepReport], None] = self.reports.append
        self._tokenizer = Tokenizer(engine.model.vocabulary)
        self._num_jobs = 0
        self.worker = Worker(
            engine,
            max_running=8,
            max_step_tokens=64,
            stuck_after_s=_LONG_S,
            clock=lambda: self.now,
            on_end=self.ended.append,
            on_step=lambda report: self.on_step(report),
        )

    def submit(
        self,
        max_tokens: int = 100,
        *,
        sampling: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> Job:
        number = str(self._num_jobs)
        request = GenerateRequest(
            number,
            (5, 6, 7),
            sampling or SamplingParams(temperature=0),
            StopConditions(max_tokens=max_tokens),
            deadline_s=deadline_s,
        )
        eos = frozenset({self.engine.eos_token_id})
        stream = Stream(
            number,
            number,
            StreamLog(LogMemory(1 << 30)),
            caller=Caller("test"),
            output=request.output,
            num_prompt_tokens=3,
        )
        job = Job(request, stream)
        job.add(
            Sequence(self._num_jobs, request, max_tokens=max_tokens, eos_token_ids=eos),
            Detokenizer(self._tokenizer),
            np.random.default_rng(0),
        )
        self._num_jobs += 1
        self.worker.submit(job)
        return job

    async def taken(self, num_steps: int) -> None:
        """Wait until the loop has done with a step."""
        await until(lambda: len(self.reports) >= num_steps)


@asynccontextmanager
async def running(engine: ScriptedEngine) -> AsyncIterator[Fixture]:
    fixture = Fixture(engine)
    task = asyncio.create_task(fixture.worker.run())
    await fixture.worker.wait_ready()
    try:
        yield fixture
        await fixture.worker.wait_idle()
        fixture.worker.check_integrity()
        assert fixture.worker.num_used_blocks == 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def ids_of(job: Job) -> list[int]:
    return [e for e in job.stream.log.read(0) if isinstance(e, int)]


def finish_of(job: Job) -> FinishReason:
    """How a job's log ended; it must have ended once, with both its ends and the usage that it holds."""
    *tokens, output_end, stream_end = job.stream.log.read(0)
    assert all(isinstance(token, int) for token in tokens)
    assert isinstance(output_end, OutputEnd)
    assert stream_end == StreamEnd(3, len(tokens))
    assert job.done.is_set()
    return output_end.finish.reason


async def test_what_a_step_brought_is_told_while_the_next_one_is_computed() -> None:
    steps = Steps()
    engine = ScriptedEngine(SCRIPT, before_step=steps)
    async with running(engine) as f:
        begun_before_told = []

        def on_step(report: StepReport) -> None:
            begun_before_told.append(len(f.reports) == 2 or steps.wait_begun(len(f.reports) + 2))
            f.reports.append(report)

        f.on_step = on_step
        job = f.submit(max_tokens=3)
        steps.let_through(3)
        await job.done.wait()
        assert begun_before_told == [True, True, True]
        assert ids_of(job) == engine.script_ids[:3]
        assert finish_of(job) is FinishReason.LENGTH


async def test_a_step_that_fails_loses_nothing_of_the_one_before() -> None:
    steps = Steps()
    engine = ScriptedEngine(SCRIPT, before_step=steps)
    async with running(engine) as f:
        short, long = f.submit(max_tokens=2), f.submit()
        steps.let_through(2)
        await f.taken(2)
        steps.failure = EngineError("broken")
        steps.let_through()
        await long.done.wait()
        assert ids_of(long) == engine.script_ids[:2]
        assert isinstance(long.stream.log.error, WorkerLostError)
        assert ids_of(short) == engine.script_ids[:2]
        assert finish_of(short) is FinishReason.LENGTH
        assert f.ended == [short, long]


async def test_a_last_token_and_its_end_are_told_together_when_the_blocks_are_free() -> None:
    async with running(ScriptedEngine(SCRIPT)) as f:
        job = f.submit(max_tokens=3)
        told = []
        job.stream.log.on_change = lambda: told.append(
            (job.stream.log.next_position, f.worker.num_used_blocks, job.done.is_set())
        )
        await job.done.wait()
        assert told == [(1, 1, False), (2, 1, False), (5, 0, False)]


async def test_after_a_burst_the_next_one_shares_its_first_step() -> None:
    steps = Steps()
    async with running(ScriptedEngine(SCRIPT, before_step=steps)) as f:
        f.submit(max_tokens=1)
        await steps.begun(1)  # nobody waits for company that has never come
        f.submit(max_tokens=1)
        steps.let_through(2)
        await f.worker.wait_idle()
        f.submit(max_tokens=1)
        await asyncio.sleep(0)
        f.submit(max_tokens=1)
        await asyncio.sleep(0)
        f.submit(max_tokens=1)
        steps.let_through()
        await f.worker.wait_idle()
        assert [report.num_sequences for report in f.reports] == [1, 1, 3]
        f.submit(max_tokens=1)  # alone, and the last that has to wait
        steps.let_through()
        await f.worker.wait_idle()
        f.submit(max_tokens=1)
        await steps.begun(5)
        f.submit(max_tokens=1)
        steps.let_through(2)
        await f.worker.wait_idle()
        assert [report.num_sequences for report in f.reports][3:] == [1, 1, 1]


async def test_a_cancel_during_a_step_keeps_the_steps_token_and_frees_the_blocks_for_the_next() -> None:
    steps = Steps()
    engine = ScriptedEngine(SCRIPT, before_step=steps, num_blocks=1, block_size=32)
    async with running(engine) as f:
        first, second = f.submit(max_tokens=20), f.submit(max_tokens=1)
        steps.let_through(2)
        await steps.begun(3)
        f.worker.abort(first)
        assert not first.done.is_set()
        steps.let_through()
        await first.done.wait()
        assert ids_of(first) == engine.script_ids[:3]
        assert finish_of(first) is FinishReason.CANCELLED
        await steps.begun(4)  # the second one's, in the block of the first
        steps.let_through()
        await second.done.wait()
        assert finish_of(second) is FinishReason.LENGTH
        assert f.ended == [first, second]


async def test_a_cancel_during_the_last_step_changes_nothing() -> None:
    steps = Steps()
    async with running(ScriptedEngine(SCRIPT, before_step=steps)) as f:
        job = f.submit(max_tokens=1)
        await steps.begun(1)
        f.worker.abort(job)
        f.worker.abort(job)
        steps.let_through()
        await job.done.wait()
        f.worker.abort(job)
        assert finish_of(job) is FinishReason.LENGTH
        assert f.ended == [job]


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_an_error_during_a_step_is_told_at_once_and_nothing_after_it(max_tokens: int) -> None:
    steps = Steps()
    async with running(ScriptedEngine(SCRIPT, before_step=steps)) as f:
        job = f.submit(max_tokens)
        await steps.begun(1)
        f.worker.abort(job, StoppedError())
        assert isinstance(job.stream.log.error, StoppedError)
        assert not job.done.is_set()
        assert f.worker.num_used_blocks == 1
        steps.let_through()
        await job.done.wait()
        assert job.stream.log.read(0) == []
        assert isinstance(job.stream.log.error, StoppedError)
        assert f.ended == [job]


async def test_a_deadline_that_passes_during_a_step_ends_after_its_token() -> None:
    steps = Steps()
    engine = ScriptedEngine(SCRIPT, before_step=steps)
    async with running(engine) as f:
        job, other = f.submit(deadline_s=5.0), f.submit(max_tokens=2, deadline_s=50.0)
        await steps.begun(1)
        f.now = 6.0
        steps.let_through(2)
        await job.done.wait()
        assert ids_of(job) == engine.script_ids[:1]
        assert isinstance(job.stream.log.error, DeadlinePassedError)
        await other.done.wait()
        assert finish_of(other) is FinishReason.LENGTH


async def test_ends_are_told_even_if_the_next_step_cannot_be_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, num_calls = Scheduler.schedule, 0

    def failing(scheduler: Scheduler, guesses: Mapping[int, Seq[int]]) -> Step | None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("a fault of ours")
        return schedule(scheduler, guesses)

    monkeypatch.setattr(Scheduler, "schedule", failing)
    steps = Steps()
    async with running(ScriptedEngine(SCRIPT, before_step=steps)) as f:
        short, long = f.submit(max_tokens=1), f.submit()
        num_calls = 0
        steps.let_through()
        await long.done.wait()
        assert finish_of(short) is FinishReason.LENGTH
        assert len(ids_of(long)) == 1
        assert isinstance(long.stream.log.error, WorkerLostError)
        assert f.ended == [short, long]


async def test_a_step_is_reported_with_what_it_brought_and_when() -> None:
    steps = Steps()
    async with running(ScriptedEngine(SCRIPT, before_step=steps)) as f:
        f.now = 1.0
        job = f.submit(max_tokens=2)
        await steps.begun(1)
        f.now = 3.0
        steps.let_through()
        await f.taken(1)
        f.now = 4.0
        steps.let_through()
        await job.done.wait()
        first, second = f.reports
        assert (first.num_sequences, first.num_tokens, first.num_output_tokens) == (1, 3, 1)
        assert (first.queue_times_s, first.times_to_first_token_s) == ((1.0,), (3.0,))
        assert (second.num_tokens, second.queue_times_s, second.token_gaps_s) == (1, (), {1.0: 1})
        progress = job.stream.progress
        assert (progress.started_s, progress.first_token_s, progress.ended_s) == (1.0, 3.0, 4.0)


class FarContext:
    """A scripted context as if its logits were on a GPU: it gives candidates, and full rows on demand."""

    num_candidates = 4

    def __init__(self, context: ScriptedContext) -> None:
        self._context = context
        self.cache = context.cache
        self.close = context.close
        self.wanted: list[list[bool]] = []
        self.fetched: list[list[int]] = []

    def step(self, batch: StepBatch) -> StepResult:
        rows = self._context.step(batch).logits
        assert batch.full_rows is not None
        self.wanted.append(batch.full_rows.tolist())
        logits = np.full_like(rows, np.nan)
        logits[batch.full_rows] = rows[batch.full_rows]
        ids = np.argsort(-rows, axis=1, kind="stable")[:, : self.num_candidates]
        best = np.take_along_axis(rows, ids, axis=1)
        lse = best[:, 0] + np.log(np.exp(rows - best[:, :1]).sum(axis=1))

        def fetch(indices: IntArray) -> None:
            self.fetched.append(indices.tolist())
            logits[indices] = rows[indices]

        return StepResult(logits, Candidates(ids, best, lse), fetch)


class FarEngine(ScriptedEngine):
    """Makes such contexts, and keeps them."""

    def __init__(self, script: str) -> None:
        super().__init__(script)
        self.contexts: list[FarContext] = []

    def create_context(self) -> FarContext:  # type: ignore[override]
        self.contexts.append(FarContext(super().create_context()))
        return self.contexts[-1]


async def test_rows_that_candidates_seldom_decide_are_wanted_with_the_step() -> None:
    engine = FarEngine(SCRIPT)
    async with running(engine) as f:
        cold, hot = f.submit(2), f.submit(2, sampling=SamplingParams(temperature=50))
        await cold.done.wait()
        await hot.done.wait()
        (context,) = engine.contexts
        assert context.wanted == [[False, True]] * 2
        assert context.fetched == []  # the script is certain at any temperature
        assert ids_of(cold) == ids_of(hot) == engine.script_ids[:2]


class SlowEngine(ScriptedEngine):
    """Makes its contexts slowly, and knows which of them are open."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.begun, self.permit = threading.Event(), threading.Event()
        self.open: list[ScriptedContext] = []

    def create_context(self) -> ScriptedContext:
        self.begun.set()
        assert self.permit.wait(_LONG_S)
        context = super().create_context()
        self.open.append(context)
        context.close = lambda: self.open.remove(context)  # type: ignore[method-assign]
        return context


async def test_a_worker_that_is_stopped_while_its_context_is_being_made_closes_it() -> None:
    engine = SlowEngine()
    task = asyncio.create_task(Fixture(engine).worker.run())
    await asyncio.to_thread(engine.begun.wait)
    task.cancel()
    engine.permit.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert engine.open == []
