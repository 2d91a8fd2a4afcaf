"""One context, one scheduler, one thread."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial

from engines.api import CacheSpec, Engine, EngineError, ExecutionContext, StreamsrvError
from streamsrv.engine_thread import EngineThread
from streamsrv.errors import DeadlinePassedError, StoppedError, WorkerLostError
from streamsrv.observer import StepReport
from streamsrv.output import Job, Output
from streamsrv.scheduler import Scheduler, SchedulerCounters, Step
from streamsrv.sequence import Finish, Sequence, SequenceStatus
from streamsrv.stall_watch import StallWatch
from streamsrv.step_taking import Taken, take_step
from streamsrv.stream import Entry, OutputEnd

log = logging.getLogger(__name__)

_FIRST_RESTART_S = 0.5
_LONGEST_RESTART_S = 30.0
# Outputs that run while prompts are looked up: with more of them a step is bound by computing, and guesses
# cost what they are. Of 4 sequences with 7 guesses each a step took three times as long as without, of 2 half
# as long again, of one hardly longer.
_MOST_GUESSING = 2
# Threads that make masks beside a step.
_NUM_HELPERS = 2
# Requests that are sent together arrive a little apart: where nothing runs, the first would take a step of
# its own, and all others wait for it to end. After a burst, the next one is waited for: until nothing has
# come for so long, and for so many times of it at most. 8 requests of a Python client came 0.5 to 2 ms apart.
_LULL_S = 0.002
_MOST_LULLS = 5
# How long stopping waits for a step in flight, before its thread is left behind.
_JOIN_S = 10.0


class WorkerState(Enum):
    """Whether a worker takes steps."""

    STARTING = "starting"
    """Its context is being made."""
    READY = "ready"
    FAILED = "failed"
    """Its context is lost; a new one will be made after a pause."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class _Ending:
    """An output whose blocks are free, and whose reader is still to be told how it ended."""

    output: Output
    how: Finish | StreamsrvError | None
    """None is a cancel."""
    last: Seq[Entry] = ()
    """What came with its end."""


class _StuckError(EngineError):
    """A step takes so long that it will never end."""


def _stuck(limit_s: float) -> _StuckError:
    return _StuckError(f"a step did not end within {limit_s:g} s")


class Worker:
    """Steps a context on a thread of its own, and feeds the logs of its jobs from the loop.

    All methods are for the loop's thread. Between two steps everything that arrived is applied; while a
    step is in flight the scheduler's running sequences are left alone. Between two steps only that is done
    on which the next one depends: what a step has brought is told while the next one is computed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        max_step_tokens: int,
        stuck_after_s: float,
        prefix_cache: bool = False,
        prompt_lookup: bool = False,
        clock: Callable[[], float],
        on_state: Callable[[], None] = lambda: None,
        on_end: Callable[[Job], None] = lambda _: None,
        on_step: Callable[[StepReport], None] = lambda _: None,
    ) -> None:
        """`clock` gives seconds, on any thread; `on_state` is called whenever `state` has changed.

        `on_end` is called with each job that has ended, `on_step` after each step.

        A step that takes longer than `stuck_after_s` will never end: the context is given up. With
        `prefix_cache` requests reuse what others have computed, with `prompt_lookup` outputs that ask for it
        guess their next tokens.
        """
        self._engine = engine
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._stuck_after_s = stuck_after_s
        self._prefix_cache = prefix_cache
        self._prompt_lookup = prompt_lookup
        self._helpers = ThreadPoolExecutor(_NUM_HELPERS, "streamsrv-mask")
        self._clock = clock
        self._on_state = on_state
        self._on_end = on_end
        self._on_step = on_step
        self._cache: CacheSpec | None = None
        self._scheduler: Scheduler | None = None
        self._outputs: dict[int, Output] = {}  # by sequence id: every output that has not ended
        self._with_deadline: dict[Job, None] = {}  # that have not ended, in order
        self._to_abort: list[tuple[Job, StreamsrvError | None]] = []
        self._wake = asyncio.Event()
        self._num_submitted = 0
        self._comes_in_bursts = False
        self._ready = asyncio.Event()
        self._state = WorkerState.STARTING
        self._num_steps = 0
        self._num_restarts = 0
        self._past_counters = SchedulerCounters()  # of contexts that were lost

    @property
    def state(self) -> WorkerState:
        """Whether it takes steps."""
        return self._state

    @property
    def cache(self) -> CacheSpec:
        """The size of the context's cache; known once it has been ready."""
        assert self._cache is not None, "the worker was never ready"
        return self._cache

    @property
    def num_outputs(self) -> int:
        """Outputs that have not ended."""
        return len(self._outputs)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """The sequences that own no blocks."""
        return self._scheduler.waiting if self._scheduler else ()

    @property
    def num_waiting(self) -> int:
        """Outputs that own no blocks."""
        return self._scheduler.num_waiting if self._scheduler else 0

    @property
    def num_steps(self) -> int:
        """Steps taken since the start."""
        return self._num_steps

    @property
    def num_restarts(self) -> int:
        """How often a lost context was to be made again."""
        return self._num_restarts

    @property
    def counters(self) -> SchedulerCounters:
        """What its schedulers have done since the start."""
        if self._scheduler is None:
            return self._past_counters
        return SchedulerCounters.sum_of([self._past_counters, self._scheduler.counters])

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache; 0 while there is none."""
        return self.cache.num_blocks if self._scheduler else 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the cache that sequences own."""
        return self.cache.num_blocks - self._scheduler.num_free_blocks if self._scheduler else 0

    def check_integrity(self) -> None:
        """Hold the books against each other; for tests and idle moments."""
        if self._scheduler is not None:
            self._scheduler.check_integrity()
            assert self._scheduler.num_waiting + self._scheduler.num_running == len(self._outputs)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            WorkerLostError: the worker has no context now.

        """
        if self._scheduler is None or self._state is not WorkerState.READY:
            raise WorkerLostError("it is being restarted")
        for output in job.outputs:
            self._outputs[output.sequence.sequence_id] = output
            self._scheduler.add(output.sequence, caller=job.stream.caller.name, now_s=self._clock())
        self._num_submitted += 1
        if job.request.deadline_s is not None:
            self._with_deadline[job] = None
        self._wake.set()

    def abort(self, job: Job, error: StreamsrvError | None = None) -> None:
        """End a job within a step: with FinishReason.CANCELLED, or with an error. Nothing if it has ended.

        Of an error its reader knows at once, even if the step in flight never ends.
        """
        if job.done.is_set():
            return
        if job.is_waiting:
            for output in job.open_outputs:
                self._end(output, error)
        else:
            if error is not None:
                self._tell(job, error)
            self._to_abort.append((job, error))
            self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until every job has ended."""
        while self._outputs:
            await next(iter(self._outputs.values())).job.done.wait()

    async def wait_ready(self) -> None:
        """Wait until it takes steps."""
        await self._ready.wait()

    async def run(self) -> None:
        """Make the context and take steps until cancelled; a lost context is made again after a pause.

        Raises:
            StreamsrvError: the first context could not be made.

        """
        pause_s = _FIRST_RESTART_S
        try:
            while True:
                began_s = self._clock()
                try:
                    await self._serve()
                except Exception:
                    if not self._ready.is_set():
                        raise
                    self._set_state(WorkerState.FAILED)
                    if self._clock() - began_s > 2 * _LONGEST_RESTART_S:
                        pause_s = _FIRST_RESTART_S
                    log.exception("a worker lost its context; it restarts in %g s", pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RESTART_S)
                self._num_restarts += 1
        finally:
            self._set_state(WorkerState.STOPPED)
            self._end_all(StoppedError())
            self._helpers.shutdown(wait=False)

    async def _serve(self) -> None:
        self._set_state(WorkerState.STARTING)
        thread = EngineThread("streamsrv-worker")
        stuck = False
        made: list[ExecutionContext] = []
        try:
            context = await thread.call(_make_context, self._engine, made)
            try:
                async with StallWatch(self._stuck_after_s, _stuck) as watch:
                    await self._take_steps(thread, context, watch)
            except Exception as error:
                # At once: closing what is broken may take its time, or never end.
                self._lose(error)
                stuck = isinstance(error, _StuckError)
                raise
        finally:
            # What is being made or stepped at this moment ends before: one thread does it all.
            thread.post(partial(_close_contexts, made))
            thread.close()
            if not stuck and not await asyncio.to_thread(thread.join, _JOIN_S):
                log.error("a step did not end within %g s; its thread is left behind", _JOIN_S)

    async def _take_steps(self, thread: EngineThread, context: ExecutionContext, watch: StallWatch) -> None:
        self._cache = context.cache
        scheduler = self._scheduler = Scheduler(
            context.cache,
            max_running=self._max_running,
            max_step_tokens=self._max_step_tokens,
            prefix_cache=self._prefix_cache,
            whole_rows=context.cache.block_size >= self._engine.model.spec.context_length,
        )
        self._set_state(WorkerState.READY)
        self._ready.set()
        taken: Taken | None = None
        num_before: int | None = None  # jobs when it stood still, until the first step since then
        while True:
            self._wake.clear()
            endings = self._settle(scheduler, taken)
            try:
                step = scheduler.schedule(self._guesses())
                flight = None if step is None else self._launch(thread, context, step)
            finally:
                self._tell_of(taken, endings)
            if flight is None:
                if self._outputs:
                    raise EngineError(f"{len(self._outputs)} outputs wait for a step that never comes")
                taken = None
                num_before = self._num_submitted
                await self._wake.wait()
                await self._gather()
                continue
            watch.begin()
            taken = await flight
            watch.end()
            self._num_steps += 1
            if num_before is not None:
                self._comes_in_bursts, num_before = self._num_submitted > num_before + 1, None

    async def _gather(self) -> None:
        """Wait for what comes together with what has come, if the last time several came."""
        num_seen = 0
        for _ in range(_MOST_LULLS if self._comes_in_bursts else 0):
            if num_seen == self._num_submitted:
                break
            num_seen = self._num_submitted
            await asyncio.sleep(_LULL_S)

    def _launch(self, thread: EngineThread, context: ExecutionContext, step: Step) -> "asyncio.Future[Taken]":
        outputs = [self._outputs[part.sequence.sequence_id] for part in step.parts]
        flight = thread.call(take_step, context, step, outputs, self._clock, self._helpers)
        thread.let_begin()
        return flight

    def _settle(self, scheduler: Scheduler, taken: Taken | None) -> list[_Ending]:
        """Book a step, and free the blocks of all that end with it, by an abort or at their deadline."""
        endings: list[_Ending] = []
        failed: list[tuple[Job, StreamsrvError]] = []
        if taken is not None:
            scheduler.update(taken.step, taken.tokens)
            for b in taken.brought:
                if b.finish is None:
                    continue
                if isinstance(b.finish, StreamsrvError):
                    failed.append((b.output.job, b.finish))
                elif not b.output.log.ended:
                    scheduler.finish(b.output.sequence)
                    endings.append(_Ending(b.output, b.finish, b.entries))
        aborts, self._to_abort = self._to_abort, []
        for job, error in [*aborts, *failed, *self._expired()]:
            for output in job.open_outputs:
                scheduler.finish(output.sequence)
                endings.append(_Ending(output, error))
        return endings

    def _guesses(self) -> dict[int, Seq[int]]:
        """Guess what follows, where few enough outputs run that verifying costs little."""
        if not self._prompt_lookup or len(self._outputs) > _MOST_GUESSING:
            return {}
        guesses = {}
        for sequence_id, output in self._outputs.items():
            if output.lookup is not None and output.sequence.num_uncomputed == 1:
                guesses[sequence_id] = output.lookup.guess()
        return guesses

    def _expired(self) -> list[tuple[Job, StreamsrvError]]:
        now = self._clock()
        expired = [job for job in self._with_deadline if (job.request.deadline_s or 0.0) <= now]
        return [(job, DeadlinePassedError(started=job.num_output_tokens > 0)) for job in expired]

    def _tell_of(self, taken: Taken | None, endings: list[_Ending]) -> None:
        """Pass on what a step has brought, and who has ended."""
        report = None if taken is None else self._report(taken)
        for b in taken.brought if taken is not None else ():
            output = b.output
            log = output.log
            if log.ended or isinstance(b.finish, Finish):
                continue  # it was told to end during the step, or they come with the end
            if b.elements:
                log.append(*b.elements)
            if output.is_plain and b.token_ids:
                log.append_ids(b.token_ids)
        for ending in endings:
            self._end(ending.output, ending.how, ending.last)
        if report is not None:
            self._on_step(report)

    def _report(self, taken: Taken) -> StepReport:
        """Note what a step has brought to each request's progress, and sum it up."""
        queue_times_s, first_tokens_s, num_prompt_tokens = [], [], 0
        for output in taken.outputs:
            progress = output.progress
            if progress.started_s is None:
                progress.started_s = taken.began_s
                queue_times_s.append(taken.began_s - progress.arrived_s)
        now = self._clock()
        gaps_s: dict[float, int] = {}
        num_output_tokens = 0
        for b in taken.brought:
            if not b.token_ids:
                continue
            progress = b.output.progress
            num_tokens = len(b.token_ids)
            num_output_tokens += num_tokens
            progress.num_output_tokens += num_tokens
            if progress.last_token_s is None:
                progress.first_token_s = now
                first_tokens_s.append(now - progress.arrived_s)
                num_prompt_tokens += b.output.sequence.num_prompt_tokens
            else:
                gap_s = now - progress.last_token_s
                gaps_s[gap_s] = gaps_s.get(gap_s, 0) + 1
            if num_tokens > 1:
                gaps_s[0.0] = gaps_s.get(0.0, 0) + num_tokens - 1
            progress.last_token_s = now
        return StepReport(
            taken.ended_s - taken.began_s,
            taken.step.batch.num_sequences,
            taken.step.batch.num_tokens,
            num_output_tokens,
            num_prompt_tokens,
            tuple(queue_times_s),
            tuple(first_tokens_s),
            gaps_s,
        )

    def _end(self, output: Output, how: Finish | StreamsrvError | None, last: Seq[Entry] = ()) -> None:
        """The one place where an output ends: blocks first, then the reader is told, if it has not been.

        Without `how` it is cancelled.
        """
        job = output.job
        if how is None:
            last, how = output.cancelled()
        if self._scheduler is not None and output.sequence.status is not SequenceStatus.FINISHED:
            self._scheduler.finish(output.sequence)
        del self._outputs[output.sequence.sequence_id]
        job.num_open -= 1
        self._tell(job, how, output, last)
        if job.num_open == 0:
            self._with_deadline.pop(job, None)
            job.done.set()
            self._on_end(job)

    def _tell(
        self,
        job: Job,
        how: Finish | StreamsrvError,
        output: Output | None = None,
        last: Seq[Entry] = (),
    ) -> None:
        """Tell a stream of the end of an output, or of the fault that ends them all."""
        if job.stream.log.ended:
            return
        if isinstance(how, Finish):
            assert output is not None
            elements = [*last, OutputEnd(output.index, how)]
            if job.num_open == 0:
                self._note_end(job, how)
                elements.append(job.usage)
            job.stream.log.append(*elements)
        else:
            self._note_end(job, how)
            job.stream.log.fail(how)

    def _note_end(self, job: Job, how: Finish | StreamsrvError) -> None:
        progress = job.stream.progress
        progress.ended_s, progress.outcome = self._clock(), how

    def _end_all(self, error: StreamsrvError) -> None:
        for output in list(self._outputs.values()):
            self._end(output, error)
        self._to_abort.clear()

    def _lose(self, error: Exception) -> None:
        self._end_all(WorkerLostError(str(error) or type(error).__name__))
        self._past_counters, self._scheduler = self.counters, None
        self._set_state(WorkerState.FAILED)

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        with contextlib.suppress(RuntimeError):  # the loop may be closing
            self._on_state()


def _make_context(engine: Engine, made: list[ExecutionContext]) -> ExecutionContext:
    """Make a context that is known to be there even if nobody waits for it any more."""
    made.append(engine.create_context())
    return made[0]


def _close_contexts(made: list[ExecutionContext]) -> None:
    for context in made:
        context.close()
