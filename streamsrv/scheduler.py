"""Which tokens are computed in the next step. Synchronous and pure: no clock, thread or engine in here."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engines.api import CacheSpec, StepBatch
from streamsrv.blocks import BlockPool
from streamsrv.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part in a step."""

    sequence: Sequence
    num_new: int
    """Tokens to compute, at least 1."""
    samples: bool
    """They catch up with all of its tokens, so that a token can be sampled after the step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: who takes part, and the batch for the engine."""

    parts: tuple[Scheduled, ...]
    batch: StepBatch

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the batch's logit rows."""
        return [part.sequence for part in self.parts if part.samples]


class Scheduler:
    """Forms steps within a token budget, and owns the blocks.

    There is no prefill or decode phase: each sequence's computed tokens catch up with its tokens.
    Running sequences come first, those that need one token before those in the middle of a prompt, so a
    long prompt fills what the budget leaves and never holds up a running stream for longer than a step.
    Sequences start in the order of arrival, each when the blocks for the tokens that it has are free;
    those for its output it takes as it goes. When blocks run out, the youngest gives its own back and
    waits at the head of the queue; its tokens stay, are computed again, and its reader sees a pause and
    nothing else.
    """

    def __init__(self, cache: CacheSpec, *, max_running: int, max_step_tokens: int) -> None:
        """`max_running` sequences take part in a step, `max_step_tokens` tokens at most are computed."""
        if max_running < 1 or max_step_tokens < max_running:
            raise ValueError(
                f"max_step_tokens ({max_step_tokens}) must be at least max_running ({max_running}), "
                "and that at least 1"
            )
        self._block_size = cache.block_size
        self._pool = BlockPool(cache.num_blocks)
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order of arrival
        self._num_preemptions = 0

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that own no blocks, the next one first."""
        return iter(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences that own no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._pool.num_free

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks back, since the start."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Its tokens, prompt and output together, must fit in the cache: whoever admits requests sees to it.
        """
        assert sequence.status is SequenceStatus.WAITING
        needed = self._blocks_for(sequence.num_prompt_tokens + sequence.max_tokens)
        assert needed <= self._pool.num_blocks, "a sequence that can never fit was admitted"
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence between two steps, wherever it stands; its blocks are free at once."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move_to(SequenceStatus.FINISHED)

    def schedule(self) -> Step | None:
        """Form the next step, or None when there is nothing to compute."""
        budget = self._max_step_tokens
        parts: list[Scheduled] = []
        # A stable sort: one-token sequences first, each kind in the order of arrival.
        for sequence in sorted(self._running, key=lambda s: s.num_uncomputed > 1):
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            num_new = _piece(sequence.num_uncomputed, budget)
            if not self._grow(sequence, num_new, parts):
                continue
            parts.append(_part(sequence, num_new))
            budget -= num_new
        while self._waiting and budget > 0 and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            blocks = self._pool.allocate(self._blocks_for(sequence.num_tokens))
            if blocks is None:
                break
            self._waiting.popleft()
            sequence.block_ids = blocks
            sequence.move_to(SequenceStatus.RUNNING)
            self._insert_running(sequence)
            num_new = _piece(sequence.num_uncomputed, budget)
            parts.append(_part(sequence, num_new))
            budget -= num_new
        return Step(tuple(parts), _batch(parts)) if parts else None

    def update(self, step: Step, token_ids: Seq[int]) -> None:
        """Book a step that was computed: `token_ids` are those sampled, one for each of `step.sampled`.

        Whoever finds that a sequence has ended calls `finish` for it afterwards.
        """
        tokens = iter(token_ids)
        for part in step.parts:
            part.sequence.num_computed += part.num_new
            if part.samples:
                part.sequence.token_ids.append(next(tokens))

    def check_integrity(self) -> None:
        """Hold the books against each other; for tests and idle moments.

        Raises:
            AssertionError: a block is lost, or owned twice.

        """
        self._pool.check_integrity(s.block_ids for s in self._running)
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            assert len(sequence.block_ids) >= self._blocks_for(sequence.num_computed)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_ids
            assert sequence.num_computed == 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _grow(self, sequence: Sequence, num_new: int, parts: list[Scheduled]) -> bool:
        """Give a running sequence the blocks for `num_new` more tokens.

        Takes them from the youngest where none is free: False if that was the sequence itself.
        """
        missing = self._blocks_for(sequence.num_computed + num_new) - len(sequence.block_ids)
        while (blocks := self._pool.allocate(missing)) is None:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
            parts[:] = [part for part in parts if part.sequence is not youngest]
        sequence.block_ids.extend(blocks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.move_to(SequenceStatus.WAITING)
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []

    def _insert_running(self, sequence: Sequence) -> None:
        # One that was preempted comes back to its place by age; all others are the youngest anyway.
        at = len(self._running)
        while at > 0 and self._running[at - 1].sequence_id > sequence.sequence_id:
            at -= 1
        self._running.insert(at, sequence)


def _piece(num_uncomputed: int, budget: int) -> int:
    """Cut off what fits, but leave no last piece of one token.

    Engines compute a single token by other kernels, which round differently, and what fits depends on the
    neighbours: with this they do not change a sequence's output.
    """
    num_new = min(num_uncomputed, budget)
    return num_new - 1 if num_uncomputed - num_new == 1 and num_new > 2 else num_new


def _part(sequence: Sequence, num_new: int) -> Scheduled:
    return Scheduled(sequence, num_new, samples=num_new == sequence.num_uncomputed)


def _batch(parts: list[Scheduled]) -> StepBatch:
    token_ids: list[int] = []
    block_ids: list[int] = []
    query_begins, block_begins, past_lens, logit_rows = [0], [0], [], []
    for part in parts:
        sequence, past = part.sequence, part.sequence.num_computed
        token_ids += sequence.token_ids[past : past + part.num_new]
        block_ids += sequence.block_ids
        past_lens.append(past)
        query_begins.append(len(token_ids))
        block_begins.append(len(block_ids))
        if part.samples:
            logit_rows.append(len(token_ids) - 1)
    return StepBatch(
        token_ids=np.array(token_ids, np.int64),
        past_lens=np.array(past_lens, np.int32),
        query_begins=np.array(query_begins, np.int32),
        block_ids=np.array(block_ids, np.int32),
        block_begins=np.array(block_begins, np.int32),
        logit_rows=np.array(logit_rows, np.int64),
    )
