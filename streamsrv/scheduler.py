"""Which tokens are computed in the next step. Synchronous and pure: no clock, thread or engine in here."""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from engines.api import CacheSpec
from streamsrv.caller_shares import CallerShares
from streamsrv.paged_cache import PagedCache
from streamsrv.row_cache import RowCache
from streamsrv.sequence import Sequence, SequenceStatus
from streamsrv.sequence_cache import SequenceCache
from streamsrv.step import Scheduled, Step, form_batch
from streamsrv.waiting_line import WaitingLine

__all__ = ["AGEING_S_PER_LEVEL", "MAX_EXTRA_ROWS", "Scheduled", "Scheduler", "SchedulerCounters", "Step"]

AGEING_S_PER_LEVEL = 1.0
"""Seconds of waiting that are worth as much as one level of priority."""
MAX_EXTRA_ROWS = 64
"""Rows of logits of a step beyond one for each sequence: for tokens of prompts, and for guesses. A row of a
large vocabulary takes half a megabyte."""
# A sequence waits for what another computes at most so often: each time that may end before it is done.
_MOST_WAITS = 4
_NO_GUESSES: Mapping[int, Seq[int]] = MappingProxyType({})


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start."""

    num_preemptions: int = 0
    """How often a sequence had to give its blocks back."""
    num_cache_hits: int = 0
    """Sequences that found the beginning of their prompt in the cache."""
    num_cached_tokens: int = 0
    """Tokens of prompts that were found there."""
    num_evictions: int = 0
    """How often a block that could have been found was given to another use."""
    num_guessed_tokens: int = 0
    """Guesses that were verified."""
    num_accepted_tokens: int = 0
    """Guesses that were right."""

    @classmethod
    def sum_of(cls, counters: "Iterable[SchedulerCounters]") -> "SchedulerCounters":
        """Add up those of several schedulers."""
        each = list(counters)
        return cls(**{f.name: sum(getattr(one, f.name) for one in each) for f in fields(cls)})


class Scheduler:
    """Forms steps within a token budget, and owns the blocks.

    There is no prefill or decode phase: each sequence's computed tokens catch up with its tokens.
    Running sequences come first, those that need one token before those in the middle of a prompt, so a
    long prompt fills what the budget leaves and never holds up a running stream for longer than a step.
    Sequences start in the order of `WaitingLine`, each when the blocks for the tokens that it has are free;
    those for its output it takes as it goes. When blocks run out, the youngest of the lowest priority gives
    its own back and waits; its tokens stay, are computed again, and its reader sees a pause and nothing else.

    Who is young or low is told by one number, a sequence's rank: the time of its arrival, less a second for
    each level of its priority. So a sequence rises by one level a second, against all that come later, and
    whoever has the lowest rank is neither overtaken nor preempted.

    What was computed is found again where tokens and cache salt are equal, see `PagedCache` and `RowCache`.
    A sequence whose beginning another one is computing waits for it rather than do the same.
    """

    def __init__(
        self,
        cache: CacheSpec,
        *,
        max_running: int,
        max_step_tokens: int,
        prefix_cache: bool = False,
        whole_rows: bool = False,
    ) -> None:
        """Begin with an empty cache.

        Args:
            cache: the size of the engine's.
            max_running: sequences that take part in a step.
            max_step_tokens: tokens computed in a step.
            prefix_cache: whether requests find what others have computed; outputs of one request always do.
            whole_rows: whether a block is as long as any sequence, and the engine can copy one to another.

        """
        if max_running < 1 or max_step_tokens < max_running:
            raise ValueError(
                f"max_step_tokens ({max_step_tokens}) must be at least max_running ({max_running}), "
                "and that at least 1"
            )
        self._num_blocks, self._block_size = cache.num_blocks, cache.block_size
        self._cache: SequenceCache = (RowCache if whole_rows else PagedCache)(
            cache.num_blocks, cache.block_size
        )
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._prefix_cache = prefix_cache
        self._shares = CallerShares()
        self._line = WaitingLine(self._shares)
        self._parked: list[_Parked] = []
        self._running: list[Sequence] = []  # by rank
        # Those of running sequences in a step that computes their newest token: always the same.
        self._decode_parts: dict[Sequence, Scheduled] = {}
        self._counters = SchedulerCounters()

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that own no blocks, in no particular order."""
        return self._waiting()

    @property
    def num_waiting(self) -> int:
        """Sequences that own no blocks."""
        return len(self._line) + len(self._parked)

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._cache.num_free_blocks

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks back, since the start."""
        return self._counters.num_preemptions

    @property
    def counters(self) -> SchedulerCounters:
        """What has happened since the start, as of now."""
        return replace(self._counters, num_evictions=self._cache.num_evictions)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._line or self._parked or self._running)

    def add(self, sequence: Sequence, *, caller: str = "", now_s: float = 0.0) -> None:
        """Queue a sequence for a caller. Of a request with several outputs the first one comes first.

        Its tokens, prompt and output together, must fit in the cache: whoever admits requests sees to it.
        `now_s` is on any clock that never goes back, the same as that of the deadlines.
        """
        assert sequence.status is SequenceStatus.WAITING
        needed = self._cache.blocks_for(sequence.num_prompt_tokens + sequence.max_tokens)
        assert needed <= self._num_blocks, "a sequence that can never fit was admitted"
        sequence.caller, sequence.arrived_s = caller, now_s
        sequence.rank = now_s - AGEING_S_PER_LEVEL * sequence.priority, sequence.sequence_id
        sequence.set_space(shared=self._is_shared(sequence))
        self._cache.prepare(sequence)
        self._shares.enter(caller)
        self._line.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence between two steps, wherever it stands; its blocks are free at once."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        elif any(parked.sequence is sequence for parked in self._parked):
            self._parked = [parked for parked in self._parked if parked.sequence is not sequence]
        else:
            self._line.remove(sequence)
        self._shares.leave(sequence.caller)
        sequence.move_to(SequenceStatus.FINISHED)

    def schedule(self, guesses: Mapping[int, Seq[int]] = _NO_GUESSES) -> Step | None:
        """Form the next step, or None when there is nothing to compute.

        `guesses` are the tokens that may follow the last one of a sequence, by its id. As many are computed,
        to be verified, as the budget and the free blocks leave when everybody has its own tokens.
        """
        room = _Room(self._max_step_tokens, MAX_EXTRA_ROWS)
        parts, others = self._decode(room)
        num_decoding, num_preemptions = len(parts), self._counters.num_preemptions
        for sequence in others:
            if room.num_tokens == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            num_new = room.piece(sequence)
            if num_new and self._grow(sequence, sequence.num_computed + num_new, parts):
                parts.append(room.take(sequence, num_new))
        self._unpark()
        while room.num_tokens > 0 and len(self._running) < self._max_running:
            sequence_or_none = self._line.head()
            if sequence_or_none is None:
                break
            sequence = sequence_or_none
            if self._park(sequence):
                continue
            if not room.piece(sequence) or not self._start(sequence):
                break
            parts.append(room.take(sequence, room.piece(sequence)))
        if guesses:
            parts = [self._with_guesses(part, guesses, room) for part in parts]
        if not parts:
            return None
        if guesses or self._counters.num_preemptions > num_preemptions:
            num_decoding = 0  # those parts are not what they were
        return Step(tuple(parts), form_batch(parts, self._cache.take_copies(), num_decoding))

    def _decode(self, room: "_Room") -> tuple[list[Scheduled], list[Sequence]]:
        """Give the running sequences a part that need one token, and tell the others in their turn.

        Nearly always that is all that there is to do, so little is done for each.
        """
        parts, others = list[Scheduled](), list[Sequence]()
        block_size, decode_parts = self._block_size, self._decode_parts
        for sequence in self._running.copy():
            num_computed = sequence.num_computed
            if num_computed < sequence.num_prompt_tokens or num_computed + 1 < len(sequence.token_ids):
                others.append(sequence)
            elif num_computed < len(sequence.block_ids) * block_size or (
                self._grow(sequence, num_computed + 1, parts)
            ):
                parts.append(decode_parts[sequence])
        room.num_tokens -= len(parts)
        others.sort(key=_turn)
        return parts, others

    def update(self, step: Step, tokens: Seq[int | Seq[int]]) -> None:
        """Book a step that was computed: `tokens` are those sampled, for each of `step.sampled`.

        One, or several: the guesses that were accepted and the token after them, and any that are certain to
        follow. Whoever finds that a sequence has ended calls `finish` for it afterwards.
        """
        brought = iter(tokens)
        charges: dict[str, int] = {}
        for part in step.parts:
            sequence, num_new = part.sequence, part.num_new
            if part.num_prompt_rows:
                sequence.num_prompt_logits += part.num_prompt_rows
            if part.samples:
                new = next(brought)
                if isinstance(new, int):
                    new = (new,)
                if part.guesses:
                    num_new += self._note_guesses(part, new)
                sequence.token_ids += new
            sequence.num_computed += num_new
            self._cache.note_computed(sequence, num_new)
            if sequence.num_computed > sequence.num_charged:  # else it was computed before
                num_charged = sequence.num_computed - sequence.num_charged
                charges[sequence.caller] = charges.get(sequence.caller, 0) + num_charged
                sequence.num_charged = sequence.num_computed
        for caller, num_charged in charges.items():
            self._shares.charge(caller, num_charged)

    def check_integrity(self) -> None:
        """Hold the books against each other; for tests and idle moments.

        Raises:
            AssertionError: a block is lost, or owned twice.

        """
        self._cache.check_integrity(self._running)
        waiting = list(self._waiting())
        assert len(waiting) == self.num_waiting
        assert len({s.sequence_id for s in [*waiting, *self._running]}) == len(waiting) + len(self._running)
        assert self._running == sorted(self._running, key=_rank)
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_uncomputed > 0
        for sequence in waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_ids
            assert sequence.num_computed == 0
        self._shares.check_integrity([s.caller for s in [*waiting, *self._running]])

    def _note_guesses(self, part: Scheduled, tokens: Seq[int]) -> int:
        """Count the guesses that were right, and so are in the cache; the last token never is."""
        num_right = _num_equal(part.guesses, tokens[:-1])
        part.sequence.num_guessed_tokens += part.num_drafts
        part.sequence.num_accepted_tokens += num_right
        self._counters.num_guessed_tokens += part.num_drafts
        self._counters.num_accepted_tokens += num_right
        return num_right

    def _waiting(self) -> Iterator[Sequence]:
        yield from self._line
        for parked in self._parked:
            yield parked.sequence

    def _is_shared(self, sequence: Sequence) -> bool:
        return self._prefix_cache and sequence.use_prefix_cache

    def _start(self, sequence: Sequence) -> bool:
        """Let the head of the line run, if its blocks are free."""
        num_found = self._cache.admit(sequence)
        if num_found is None:
            return False
        self._line.start(sequence)
        sequence.num_computed = num_found
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_charged = num_found
            self._counters.num_cache_hits += num_found > 0
            self._counters.num_cached_tokens += num_found
        sequence.move_to(SequenceStatus.RUNNING)
        insort(self._running, sequence, key=_rank)
        self._decode_parts[sequence] = Scheduled(sequence, 1, samples=True)
        return True

    def _park(self, sequence: Sequence) -> bool:
        """Let a sequence wait for one before it that is computing more of its beginning than can be found."""
        if sequence.num_waits == _MOST_WAITS or sequence.num_reusable < self._cache.least_gain:
            return False
        most, host = self._cache.least_gain - 1, None
        for other in self._running:
            if other.rank > sequence.rank:
                break
            if other.is_in_prompt and other.space == sequence.space:
                num_common = self._cache.num_common(sequence, other)
                if num_common > max(most, other.num_computed):
                    most, host = num_common, other
        if host is None or self._cache.num_findable(sequence) + self._cache.least_gain > most:
            return False
        self._line.remove(sequence)
        self._parked.append(_Parked(sequence, host, most))
        sequence.num_waits += 1
        return True

    def _unpark(self) -> None:
        """Put those back in line for whom all that they waited for is computed, or will not be."""
        if self._parked and any(parked.is_over for parked in self._parked):
            for parked in self._parked:
                if parked.is_over:
                    self._line.add(parked.sequence)
            self._parked = [parked for parked in self._parked if not parked.is_over]

    def _grow(self, sequence: Sequence, num_tokens: int, parts: list[Scheduled]) -> bool:
        """Give a running sequence the blocks for `num_tokens`.

        Takes them from the last in rank where none is free: False if that was the sequence itself.
        """
        while not self._cache.grow(sequence, num_tokens):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
            parts[:] = [part for part in parts if part.sequence is not last]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.move_to(SequenceStatus.WAITING)
        self._line.add(sequence)
        self._counters.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        del self._decode_parts[sequence]
        self._cache.release(sequence, keep=self._is_shared(sequence))

    def _with_guesses(self, part: Scheduled, guesses: Mapping[int, Seq[int]], room: "_Room") -> Scheduled:
        """Add what is left room for of the guesses for a sequence: all that are accepted must be allowed."""
        sequence = part.sequence
        if not part.samples or not (own := guesses.get(sequence.sequence_id)):
            return part
        allowed = sequence.max_tokens - sequence.num_output_tokens - 1
        count = min(len(own), allowed, room.num_tokens, room.num_extra_rows)
        while count > 0 and not self._cache.grow(sequence, sequence.num_tokens + count):
            count -= 1
        if count <= 0:
            return part
        room.num_tokens -= count
        room.num_extra_rows -= count
        return replace(part, guesses=tuple(own[:count]))


@dataclass(frozen=True, slots=True)
class _Parked:
    """A sequence that waits until another one has computed so many tokens."""

    sequence: Sequence
    host: Sequence
    num_tokens: int

    @property
    def is_over(self) -> bool:
        return self.host.status is not SequenceStatus.RUNNING or self.host.num_computed >= self.num_tokens


@dataclass(slots=True)
class _Room:
    """What a step has room for."""

    num_tokens: int
    num_extra_rows: int

    def piece(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens to compute; 0 if it has to wait for the next step.

        Leaves no last piece of one token. Engines compute a single token by other kernels, which round
        differently, and what fits depends on the neighbours: so they do not change a sequence's output.
        """
        most, left = self.num_tokens, sequence.num_uncomputed
        if left == 1 and sequence.num_output_tokens:
            return 1  # the most common case
        if sequence.wants_prompt_logits and sequence.num_prompt_logits < sequence.num_prompt_tokens - 1:
            if self.num_extra_rows < 2:
                return 0
            most = min(most, sequence.num_prompt_logits + self.num_extra_rows - sequence.num_computed)
        num_new = min(left, most)
        return num_new - 1 if left - num_new == 1 and num_new > 2 else num_new

    def take(self, sequence: Sequence, num_new: int) -> Scheduled:
        """Use the room for a piece."""
        num_rows = 0
        if sequence.wants_prompt_logits:
            begin = max(sequence.num_computed, sequence.num_prompt_logits)
            end = min(sequence.num_computed + num_new, sequence.num_prompt_tokens - 1)
            num_rows = max(0, end - begin)
        self.num_tokens -= num_new
        self.num_extra_rows -= num_rows
        return Scheduled(
            sequence, num_new, samples=num_new == sequence.num_uncomputed, num_prompt_rows=num_rows
        )


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _turn(sequence: Sequence) -> tuple[bool, bool]:
    # A stable sort by this keeps the ranks. A stream that needs several tokens at once (guaranteed by a
    # grammar, or computed again) comes before the prompts.
    return sequence.num_uncomputed > 1, sequence.is_in_prompt


def _num_equal(guesses: Seq[int], tokens: Seq[int]) -> int:
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count
