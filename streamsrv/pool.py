"""The workers of one model: routing, admission, and the life of a stream from submit to its last reader."""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np

from engines.api import Engine
from streamsrv.constraint.compiler import Constraint, ConstraintCompiler
from streamsrv.detokenizer import Detokenizer
from streamsrv.errors import (
    CallerShareUsedError,
    DeadlinePassedError,
    DrainingError,
    FieldViolation,
    InvalidRequestError,
    LogMemoryFullError,
    PromptTooLongError,
    StoppedError,
    StreamElsewhereError,
    StreamExpiredError,
    StreamNotFoundError,
    TooManyWaitingError,
)
from streamsrv.logprobs import TokenLogprobs, TopLogprobs
from streamsrv.observer import PoolObserver, PoolState, StepReport, Unobserved
from streamsrv.output import Job
from streamsrv.request import RESUME_TOKEN_BYTES, GenerateRequest
from streamsrv.scheduler import SchedulerCounters
from streamsrv.sequence import Sequence
from streamsrv.stream import Caller, LogMemory, PromptTokens, Reader, Stream, StreamLog, StreamRegistry
from streamsrv.tokenizer import Tokenizer
from streamsrv.worker import Worker, WorkerState

_RETRY_AFTER_S = 1.0
_PROMPT_PIECE = 64
"""Tokens of a prompt in one element of a log."""
# Of outputs that draw nothing: making one takes as long as parsing the request.
_NO_DRAWS = np.random.default_rng(0)


class CancelOutcome(Enum):
    """What a cancel found."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already finished"
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool admits and keeps."""

    max_running: int
    """Sequences computed at the same time, per worker."""
    max_waiting: int
    """Requests that may wait behind them."""
    max_waiting_tokens: int
    """Prompt tokens that may wait behind them."""
    max_waiting_per_caller: int
    """Requests of one caller that may wait."""
    max_step_tokens: int
    """Tokens computed in one step, per worker."""
    max_context: int
    """Most tokens of a prompt and its output; the model's context and the cache bound it too."""
    max_resume_window_s: float
    """Longest time that a stream outlives its reader."""
    log_memory_bytes: int
    """Memory of what can still be read; when it is full, what was read is dropped, and nothing admitted."""
    stuck_after_s: float
    """A step that takes longer will never end."""
    prefix_cache: bool = True
    """Requests may reuse what others have computed."""
    prompt_lookup: bool = True
    """Outputs may guess their next tokens by what was said before."""


class WorkerPool:
    """Admits requests, gives each to the worker with the fewest, and knows every stream that can be read.

    A stream lives while it is computed or read, and, if it was granted a resume window, for that long after
    its reader has gone.
    """

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
        observer: PoolObserver | None = None,
    ) -> None:
        """`instance_id` begins every stream id; `clock` is that of the requests' deadlines."""
        self._observer = observer or Unobserved()
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.instance_id = instance_id or _base36(36**4 + secrets.randbelow(35 * 36**4))
        self._clock = clock
        self._workers = [
            Worker(
                engine,
                max_running=limits.max_running,
                max_step_tokens=limits.max_step_tokens,
                prefix_cache=limits.prefix_cache,
                prompt_lookup=limits.prompt_lookup,
                stuck_after_s=limits.stuck_after_s,
                clock=clock,
                on_state=on_state,
                on_end=self._on_end,
                on_step=self._on_step,
            )
            for _ in range(num_workers)
        ]
        model = engine.model
        # The first of them is what ends a text that nothing can follow.
        eos = tokenizer.control_ids([model.vocabulary.eos_token or ""])
        eos_token_ids = sorted(model.vocabulary.eos_token_ids, key=lambda i: i not in eos)
        self._constraints = ConstraintCompiler(
            model.vocabulary.tokenizer_json, model.spec.vocab_size, eos_token_ids
        )
        self._memory = LogMemory(limits.log_memory_bytes)
        self._registry = StreamRegistry()
        self._jobs: dict[str, tuple[Job, Worker]] = {}  # by stream id, of those that are computed
        self._expiries: dict[str, asyncio.TimerHandle] = {}  # by stream id, of those without a reader
        self._next_number = 1
        self._next_sequence = 1
        self._num_admitted = 0
        self._draining = False
        self._changed = asyncio.Event()

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
        """Streams that can be read."""
        return len(self._registry)

    @property
    def num_admitted(self) -> int:
        """Requests let in since the start."""
        return self._num_admitted

    @property
    def num_unfinished(self) -> int:
        """Streams whose readers do not have all of them."""
        return sum(not stream.is_delivered for stream in self._registry)

    @property
    def num_read(self) -> int:
        """Streams that are being read."""
        return sum(stream.reader is not None for stream in self._registry)

    @property
    def num_running(self) -> int:
        """Outputs that are computed or wait."""
        return sum(worker.num_outputs for worker in self._workers)

    @property
    def num_waiting(self) -> int:
        """Outputs that own no blocks yet."""
        return sum(worker.num_waiting for worker in self._workers)

    @property
    def log_bytes(self) -> int:
        """Memory of what can still be read."""
        return self._memory.used_bytes

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

    def state(self) -> PoolState:
        """Tell how it stands at this moment."""
        workers, num_waiting = self._workers, self.num_waiting
        return PoolState(
            num_running=self.num_running - num_waiting,
            num_waiting=num_waiting,
            num_streams=self.num_streams,
            num_readers=self.num_read,
            log_bytes=self._memory.used_bytes,
            log_limit_bytes=self._memory.limit_bytes,
            num_blocks=sum(worker.num_blocks for worker in workers),
            num_used_blocks=sum(worker.num_used_blocks for worker in workers),
            num_ready_workers=sum(worker.state is WorkerState.READY for worker in workers),
            counters=SchedulerCounters.sum_of(worker.counters for worker in workers),
            num_restarts=sum(worker.num_restarts for worker in workers),
        )

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
                    for expiry in self._expiries.values():
                        expiry.cancel()
                    for task in tasks:
                        task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    # -----------------------------------------------------------------------------------------------------
    # The life of a stream

    async def compile(self, request: GenerateRequest) -> Constraint | None:
        """Compile a request's constraint, on another thread; None if it has none.

        Raises:
            InvalidConstraintError: the compiler refuses it.

        """
        if request.constraint is None:
            return None
        return await asyncio.to_thread(self._constraints.compile, request.constraint)

    def submit(
        self,
        request: GenerateRequest,
        caller: Caller,
        *,
        arrived_s: float | None = None,
        constraint: Constraint | None = None,
    ) -> Stream:
        """Admit a request. Its stream needs a reader at once: `attach` is the caller's next move.

        `arrived_s` is when its call came, on the pool's clock; now, if not given. `constraint` is its own as
        `compile` gives it.

        Raises:
            DrainingError: the server is stopping.
            DeadlinePassedError: the deadline is over already.
            PromptTooLongError: prompt and output do not fit in the context.
            RequestIdInUseError: another stream has the request's id.
            OverloadedError: too much waits, or is kept.
            WorkerLostError: no worker has a context now.

        """
        if self._draining:
            raise DrainingError
        if request.deadline_s is not None and request.deadline_s <= self._clock():
            raise DeadlinePassedError(started=False)
        max_tokens = self._max_tokens(request)
        self._registry.check_request_id(caller, request.request_id)
        self._check_room(request, caller)
        while self._registry.by_request_id(caller, self._stream_id()) is not None:
            self._next_number += 1  # a client's request has the name that this one would be given
        worker = min(self._workers, key=lambda w: (w.state is not WorkerState.READY, w.num_outputs))
        stream = self._make_stream(request, caller, self._clock() if arrived_s is None else arrived_s)
        try:
            job = self._make_job(stream, request, max_tokens, constraint)
            worker.submit(job)
        except BaseException:
            stream.log.discard()  # it may hold the prompt
            raise
        self._next_number += 1
        self._registry.add(stream)
        self._num_admitted += 1
        self._jobs[stream.stream_id] = (job, worker)
        return stream

    def check_request_id(self, caller: Caller, request_id: str) -> None:
        """Refuse a request id that one of the caller's streams here has.

        Raises:
            RequestIdInUseError: another stream has the request's id.

        """
        self._registry.check_request_id(caller, request_id)

    def find(
        self,
        caller: Caller,
        *,
        stream_id: str | None = None,
        request_id: str | None = None,
        resume_token: bytes,
    ) -> Stream:
        """Find the stream that a call wants to resume.

        Raises:
            StreamNotFoundError: there was never one, or the caller may not read it.
            StreamExpiredError: there is none any more.
            StreamElsewhereError: another server instance had it.

        """
        if stream_id is not None:
            stream = self._registry.by_stream_id(stream_id)
            if stream is None:
                raise self._why_missing(stream_id)
        else:
            stream = self._registry.by_request_id(caller, request_id or "")
        # A token that is given counts: a caller's own request of the same id is not the one that it means.
        if stream is None or not (
            hmac.compare_digest(stream.resume_token, resume_token)
            if resume_token
            else caller.authenticated and caller == stream.caller
        ):
            raise StreamNotFoundError(stream_id or request_id or "")
        if not stream.is_resumable:
            raise StreamExpiredError(stream.stream_id)
        return stream

    def attach(self, stream: Stream, position: int, on_change: Callable[[], None]) -> Reader:
        """Begin to read a stream at a position; `release` must follow. One reader replaces another.

        Raises:
            PositionEvictedError: the log holds that position no longer.
            PositionInFutureError: the stream has not got there.

        """
        reader = stream.attach(position, on_change)
        if (expiry := self._expiries.pop(stream.stream_id, None)) is not None:
            expiry.cancel()
        return reader

    def release(self, reader: Reader) -> None:
        """Take back a reader. Its stream ends, or waits for the next one as long as its window says."""
        stream = reader.stream
        if not stream.detach(reader):
            return
        if stream.is_resumable:
            loop = asyncio.get_running_loop()
            expiry = loop.call_later(stream.resume_window_s, self._forget, stream)
            self._expiries[stream.stream_id] = expiry
        else:
            self._forget(stream)
        self._changed.set()

    async def cancel(
        self, caller: Caller, *, stream_id: str | None = None, request_id: str | None = None
    ) -> CancelOutcome:
        """End a stream; its blocks are free when this returns. An authenticated caller's is only its own."""
        if stream_id is not None:
            stream = self._registry.by_stream_id(stream_id)
        else:
            stream = self._registry.by_request_id(caller, request_id or "")
        if stream is None or (stream.caller.authenticated and stream.caller != caller):
            return CancelOutcome.NOT_FOUND
        stream.dismissed = True
        self._changed.set()
        if stream.log.ended:
            return CancelOutcome.ALREADY_FINISHED
        job, worker = self._jobs[stream.stream_id]
        worker.abort(job)
        await job.done.wait()
        return CancelOutcome.ABORTED

    async def wait_idle(self) -> None:
        """Wait until everything is computed, and every reader has gone with all that its stream said."""
        while self.num_unfinished:
            self._changed.clear()
            await self._changed.wait()
        for worker in self._workers:
            await worker.wait_idle()

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests and wait for the streams that live; False if some were left and ended.

        Those left after `grace_s` seconds, or when this is cancelled, end with StoppedError.
        """
        self._draining = True
        finished = True
        try:
            async with asyncio.timeout(grace_s):
                await self.wait_idle()
        except TimeoutError:
            finished = False
        finally:
            for job, worker in list(self._jobs.values()):
                worker.abort(job, StoppedError())
        return finished

    def check_integrity(self) -> None:
        """Hold the books against each other; for tests and idle moments."""
        for worker in self._workers:
            worker.check_integrity()
        assert set(self._jobs) <= {stream.stream_id for stream in self._registry}
        assert sum(job.num_open for job, _ in self._jobs.values()) == self.num_running
        assert self._memory.used_bytes == sum(stream.log.size_bytes for stream in self._registry)
        without_reader = {stream.stream_id for stream in self._registry if stream.reader is None}
        assert set(self._expiries) == without_reader

    def _forget(self, stream: Stream) -> None:
        self._expiries.pop(stream.stream_id, None)
        if stream.stream_id in self._jobs:
            job, worker = self._jobs.pop(stream.stream_id)
            worker.abort(job)
        self._registry.remove(stream)
        self._changed.set()

    def _on_end(self, job: Job) -> None:
        self._jobs.pop(job.stream.stream_id, None)
        self._changed.set()
        self._observer.request_ended(job.stream)

    def _on_step(self, report: StepReport) -> None:
        if self._memory.is_full:
            self._make_room()
        self._observer.step_taken(report)

    def _make_room(self) -> None:
        """Drop what was read before what was not, and nothing that lies before a reader."""
        for stream in list(self._registry):
            if not self._memory.is_full:
                return
            if stream.reader is None and stream.log.ended:
                self._expiries[stream.stream_id].cancel()
                self._forget(stream)
        for stream in self._registry:
            if not self._memory.is_full:
                return
            position = stream.num_taken if stream.reader is None else stream.reader.position
            stream.log.drop_before(position)

    # -----------------------------------------------------------------------------------------------------
    # Admission

    def _check_room(self, request: GenerateRequest, caller: Caller) -> None:
        limits, num_prompt_tokens = self.limits, len(request.prompt_token_ids) * request.num_outputs
        waiting = [sequence for worker in self._workers for sequence in worker.waiting]
        # Those that the next step will start do not wait.
        num_free = limits.max_running * len(self._workers) - (self.num_running - len(waiting))
        num_waiting = max(0, len(waiting) - num_free)
        if len(waiting) + request.num_outputs > num_free + limits.max_waiting:
            raise TooManyWaitingError(
                "requests are waiting",
                num_waiting,
                limits.max_waiting,
                subject="waiting requests",
                retry_after_s=_RETRY_AFTER_S,
            )
        num_tokens = sum(sequence.num_tokens for sequence in waiting)
        if waiting and num_tokens + num_prompt_tokens > limits.max_waiting_tokens:
            raise TooManyWaitingError(
                "prompt tokens are waiting",
                num_tokens,
                limits.max_waiting_tokens,
                subject="waiting prompt tokens",
                retry_after_s=_RETRY_AFTER_S,
            )
        # A request that waits has a sequence that does: where few wait, nobody's need be counted.
        num_own = 0
        if len(waiting) >= limits.max_waiting_per_caller:
            num_own = sum(job.stream.caller == caller and job.is_waiting for job, _ in self._jobs.values())
        if num_own >= limits.max_waiting_per_caller:
            raise CallerShareUsedError(
                f"requests of {caller.name} are waiting",
                num_own,
                limits.max_waiting_per_caller,
                subject=f"waiting requests of {caller.name}",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._memory.is_full:
            self._make_room()
        if self._memory.is_full:
            raise LogMemoryFullError(
                "bytes of streams are kept for their readers",
                self._memory.used_bytes,
                self._memory.limit_bytes,
                subject="log memory",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _stream_id(self) -> str:
        # Short, since every message has it.
        return f"{self.instance_id}-{_base36(self._next_number)}"

    def _make_stream(self, request: GenerateRequest, caller: Caller, arrived_s: float) -> Stream:
        stream_id = self._stream_id()
        window_s = min(request.stream.resume_window_s, self.limits.max_resume_window_s)
        token = request.resume_token or secrets.token_bytes(RESUME_TOKEN_BYTES)
        return Stream(
            stream_id,
            request.request_id or stream_id,
            StreamLog(self._memory),
            caller=caller,
            output=request.output,
            num_prompt_tokens=len(request.prompt_token_ids),
            resume_window_s=window_s,
            resume_token=token if window_s > 0 else b"",
            arrived_s=arrived_s,
        )

    def _make_job(
        self, stream: Stream, request: GenerateRequest, max_tokens: int, constraint: Constraint | None
    ) -> Job:
        job = Job(request, stream)
        seed, eos_token_ids = request.sampling.seed, frozenset(self.engine.model.vocabulary.eos_token_ids)
        prompt_detokenizer = self._begin_prompt(job)
        kept = request.tool_parsing.format.markers if request.tool_parsing is not None else ()
        for index in range(request.num_outputs):
            sequence = Sequence(
                self._next_sequence,
                request,
                max_tokens=max_tokens,
                eos_token_ids=eos_token_ids,
                group_id=self._next_sequence - index,
                priority=request.scheduling.priority,
                use_prefix_cache=request.scheduling.use_prefix_cache,
                cache_salt=request.scheduling.cache_salt,
                wants_prompt_logits=request.output.prompt_logprobs and index == 0,
            )
            self._next_sequence += 1
            detokenizer = Detokenizer(
                self.tokenizer,
                stop=request.stop.stop,
                include_stop=request.stop.include_stop,
                skip_special=request.output.skip_special_tokens,
                # What a constraint says is the whole text: a space that it begins with, too.
                continues=request.continues_text or constraint is not None,
                kept=kept,
            )
            # The first output is that of a request for one, so that more of them change nothing about it.
            own_seed = seed if index == 0 or seed is None else [seed, index]
            job.add(
                sequence,
                detokenizer,
                _NO_DRAWS if request.sampling.is_greedy else np.random.default_rng(own_seed),
                prompt_detokenizer=prompt_detokenizer if index == 0 else None,
                constraint=constraint,
                vocab_size=self.vocab_size,
                looks_up=self.limits.prompt_lookup
                and request.scheduling.prompt_lookup
                and constraint is None,
            )
        return job

    def _begin_prompt(self, job: Job) -> Detokenizer | None:
        """Tell of the prompt what needs no step: all of it, or its first token, which has no probability.

        Returns what makes the text of the rest, where that is wanted.
        """
        request, options = job.request, job.request.output
        if not (options.echo or options.prompt_logprobs):
            return None
        ids = request.prompt_token_ids
        detokenizer = Detokenizer(self.tokenizer, skip_special=options.skip_special_tokens)
        size = 1 if options.prompt_logprobs else _PROMPT_PIECE
        for first in range(0, 1 if options.prompt_logprobs else len(ids), size):
            piece = ids[first : first + size]
            text = "".join(map(detokenizer.push, piece)) if options.echo else ""
            if options.echo and first + size >= len(ids):
                text += detokenizer.flush()
            known = (TokenLogprobs(0.0, TopLogprobs()),) if options.prompt_logprobs else None
            job.stream.log.append(PromptTokens(piece, text, known))
        return detokenizer if options.echo and options.prompt_logprobs else None

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

    def _why_missing(self, stream_id: str) -> StreamNotFoundError | StreamExpiredError | StreamElsewhereError:
        instance_id, _, number = stream_id.rpartition("-")
        if not (instance_id and number.isascii() and number.isalnum()):
            return StreamNotFoundError(stream_id)
        if instance_id != self.instance_id:
            return StreamElsewhereError(stream_id, self.instance_id)
        if not 0 < int(number, 36) < self._next_number:
            return StreamNotFoundError(stream_id)
        return StreamExpiredError(stream_id)


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits
