"""The workers of one model: routing, admission, and the life of a stream from submit to release."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np

from engines.api import Engine
from streamsrv.detokenizer import Detokenizer
from streamsrv.errors import (
    DeadlinePassedError,
    DrainingError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    StoppedError,
)
from streamsrv.request import GenerateRequest
from streamsrv.sequence import Sequence
from streamsrv.stream import Stream, StreamLog, StreamRegistry
from streamsrv.tokenizer import Tokenizer
from streamsrv.worker import Job, Worker, WorkerState

_RETRY_AFTER_S = 1.0


class CancelOutcome(Enum):
    """What a cancel found."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already finished"
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool admits."""

    max_running: int
    """Sequences computed at the same time, per worker."""
    max_waiting: int
    """Requests that may wait behind them, per worker."""
    max_step_tokens: int
    """Tokens computed in one step, per worker."""
    max_context: int
    """Most tokens of a prompt and its output; the model's context and the cache bound it too."""


class WorkerPool:
    """Admits requests, gives each to the worker with the fewest, and knows every stream that lives."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: PoolLimits,
        *,
        num_workers: int = 1,
        instance_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        """`instance_id` begins every stream id; `clock` is that of the requests' deadlines."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.instance_id = instance_id or secrets.token_hex(3)
        self._clock = clock
        self._workers = [
            Worker(
                engine,
                max_running=limits.max_running,
                max_step_tokens=limits.max_step_tokens,
                clock=clock,
                on_state=on_state,
            )
            for _ in range(num_workers)
        ]
        self._registry = StreamRegistry()
        self._jobs: dict[str, tuple[Job, Worker]] = {}  # by stream id
        self._counter = itertools.count(1)
        self._draining = False
        self._released = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Whether a request would be taken."""
        return not self._draining and any(w.state is WorkerState.READY for w in self._workers)

    @property
    def num_workers(self) -> int:
        """Workers, whatever their state."""
        return len(self._workers)

    @property
    def num_streams(self) -> int:
        """Streams that live."""
        return len(self._registry)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""
        return sum(worker.num_waiting for worker in self._workers)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that the model takes."""
        return self.engine.model.spec.vocab_size

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its output together."""
        cache = min(worker.cache.num_tokens for worker in self._workers)
        return min(self.limits.max_context, self.engine.model.spec.context_length, cache)

    @property
    def num_steps(self) -> int:
        """Steps taken by all workers."""
        return sum(worker.num_steps for worker in self._workers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the workers; inside, they are ready.

        Raises:
            StreamsrvError: a worker could not be started.

        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(worker.run()) for worker in self._workers]
                try:
                    # If a worker fails before it is ready, the group cancels this wait.
                    for worker in self._workers:
                        await worker.wait_ready()
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def submit(self, request: GenerateRequest) -> Stream:
        """Admit a request; `release` must be called for its stream, however it ends.

        Raises:
            DrainingError: the server is stopping.
            DeadlinePassedError: the deadline is over already.
            PromptTooLongError: prompt and output do not fit in the context.
            RequestIdInUseError: another stream that lives has the request's id.
            OverloadedError: too many requests wait.
            WorkerLostError: no worker has a context now.

        """
        if self._draining:
            raise DrainingError
        if request.deadline_s is not None and request.deadline_s <= self._clock():
            raise DeadlinePassedError(started=False)
        max_tokens = self._max_tokens(request)
        worker = min(self._workers, key=lambda w: (w.state is not WorkerState.READY, w.num_jobs))
        if worker.num_waiting >= self.limits.max_waiting:
            raise OverloadedError(worker.num_waiting, self.limits.max_waiting, _RETRY_AFTER_S)
        number = next(self._counter)
        stream_id = f"{self.instance_id}-{number}"
        stream = Stream(stream_id, request.request_id or stream_id, number, StreamLog())
        job = self._job(number, request, max_tokens, stream.log)
        self._registry.add(stream)
        try:
            worker.submit(job)
        except BaseException:
            self._registry.remove(stream)
            raise
        self._jobs[stream_id] = (job, worker)
        return stream

    def release(self, stream: Stream) -> None:
        """The reader is done with a stream: end it if it runs, and forget it."""
        job, worker = self._jobs.pop(stream.stream_id)
        stream.log.on_change = None
        worker.abort(job)
        self._registry.remove(stream)
        self._released.set()

    async def cancel(self, *, stream_id: str | None = None, request_id: str | None = None) -> CancelOutcome:
        """End a stream; its blocks are free when this returns."""
        if stream_id is not None:
            stream = self._registry.by_stream_id(stream_id)
        else:
            stream = self._registry.by_request_id(request_id or "")
        if stream is None:
            return CancelOutcome.NOT_FOUND
        if stream.log.ended:
            return CancelOutcome.ALREADY_FINISHED
        job, worker = self._jobs[stream.stream_id]
        worker.abort(job)
        await job.done.wait()
        return CancelOutcome.ABORTED

    async def wait_idle(self) -> None:
        """Wait until no stream lives and every job has ended."""
        while self._registry:
            self._released.clear()
            await self._released.wait()
        for worker in self._workers:
            await worker.wait_idle()

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests and wait for the streams that live; False if some were left and ended.

        Those left after `grace_s` seconds end with StoppedError.
        """
        self._draining = True
        with_time_left = True
        try:
            async with asyncio.timeout(grace_s):
                await self.wait_idle()
        except TimeoutError:
            with_time_left = False
        for job, worker in list(self._jobs.values()):
            worker.abort(job, StoppedError())
        return with_time_left

    def check_integrity(self) -> None:
        """Hold the books against each other; for tests and idle moments."""
        for worker in self._workers:
            worker.check_integrity()
        assert len(self._registry) == len(self._jobs)

    def _job(self, number: int, request: GenerateRequest, max_tokens: int, log: StreamLog) -> Job:
        sequence = Sequence(
            number,
            request,
            max_tokens=max_tokens,
            eos_token_ids=frozenset(self.engine.model.vocabulary.eos_token_ids),
        )
        detokenizer = Detokenizer(
            self.tokenizer,
            stop=request.stop.stop,
            include_stop=request.stop.include_stop,
            skip_special=request.output.skip_special_tokens,
            continues=request.continues_text,
        )
        return Job(sequence, detokenizer, np.random.default_rng(request.sampling.seed), log)

    def _max_tokens(self, request: GenerateRequest) -> int:
        limit, prompt = self.max_context, len(request.prompt_token_ids)
        if prompt >= limit:
            raise PromptTooLongError(
                FieldViolation(
                    "prompt",
                    f"has {prompt} tokens; prompt and its output together may have {limit}",
                )
            )
        room = limit - prompt
        wanted = request.stop.max_tokens
        if wanted is not None and wanted > room:
            raise PromptTooLongError(
                FieldViolation(
                    "stop.max_tokens",
                    f"is {wanted}, but a prompt of {prompt} tokens leaves {room} of {limit}; "
                    "leave it out for as many as fit",
                )
            )
        if request.stop.min_tokens > room:
            raise InvalidRequestError(
                FieldViolation("stop.min_tokens", f"is {request.stop.min_tokens}, but only {room} tokens fit")
            )
        return wanted or room
