"""One output in the making: its tokens, its blocks, and how far it has been computed."""

from array import array
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from streamsrv.request import GenerateRequest


class SequenceStatus(Enum):
    """Where a sequence stands. WAITING ⇄ RUNNING → FINISHED, and WAITING → FINISHED."""

    WAITING = "waiting"
    """Owns no blocks."""
    RUNNING = "running"
    """Owns blocks and takes part in steps."""
    FINISHED = "finished"
    """Owns no blocks, and never will again."""


_ALLOWED = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
}


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended."""

    reason: FinishReason
    matched: int | str | None = None
    """The token id or the stop text, for STOP."""
    text: str = ""
    """What the detokenizer still held back."""


class Sequence:
    """The tokens of one output, prompt included, and its place in the cache.

    `num_computed` tokens are in the cache; a step computes more, and when it has caught up with all
    tokens, the next one can be sampled. Preemption sets it back to 0, and the tokens stay.
    """

    def __init__(
        self,
        sequence_id: int,
        request: GenerateRequest,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        group_id: int | None = None,
        priority: int = 0,
        use_prefix_cache: bool = True,
        cache_salt: str = "",
        wants_prompt_logits: bool = False,
    ) -> None:
        """Begin an output with the request's prompt.

        Args:
            sequence_id: ascending in the order of arrival.
            request: what the caller asked for.
            max_tokens: the request's, or what the context leaves.
            eos_token_ids: the model's.
            group_id: the same for all outputs of a request: the first one's `sequence_id`. None is its own.
            priority: the higher first, where not all can be computed.
            use_prefix_cache: whether it takes what others computed, and leaves them what it does.
            cache_salt: only sequences of equal salt share.
            wants_prompt_logits: whether the logits after each of the prompt's tokens are wanted.

        """
        self.sequence_id = sequence_id
        """Ascending in the order of arrival."""
        self.request = request
        self.max_tokens = max_tokens
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self._num_before_last = self.num_prompt_tokens + max_tokens - 1
        self.num_computed = 0
        self.block_ids = array("i")
        """Joined to those of others in no time."""
        self.group_id = sequence_id if group_id is None else group_id
        self.priority = priority
        self.use_prefix_cache = use_prefix_cache
        self.cache_salt = cache_salt
        self.wants_prompt_logits = wants_prompt_logits
        self.num_prompt_logits = 0
        """The prompt's leading tokens whose logits were given, if wanted."""
        self.num_cached_tokens = 0
        """The prompt's leading tokens that were found in the cache when it began."""
        self.num_guessed_tokens = 0
        """Guesses that were verified for it."""
        self.num_accepted_tokens = 0
        """Guesses that were right."""
        self.num_charged = 0
        """Its leading tokens that its caller's share has been charged with, or that were found."""
        self.num_preemptions = 0
        """How often it had to give its blocks back."""
        self.num_waits = 0
        """How often it waited for what another sequence was computing."""
        self.caller = ""
        """For whom it is; set by the scheduler."""
        self.arrived_s = 0.0
        """When it came to the scheduler, on the scheduler's clock in seconds; set by it."""
        self.rank: tuple[float, int] = (0.0, sequence_id)
        """Its place among all sequences, the first to be computed first; set by the scheduler."""
        self.space = b""
        """Digest of whom it shares the cache with; set by the scheduler."""
        self.block_keys: list[bytes] = []
        """What its leading full blocks are found by, as far as that was needed."""
        self.packed = bytearray()
        """Its leading tokens as bytes, which compare fast, as far as that was needed."""
        self._status = SequenceStatus.WAITING
        stop = request.stop
        self._min_tokens = stop.min_tokens
        self.stop_token_ids = stop.stop_token_ids | (frozenset() if stop.ignore_eos else eos_token_ids)
        """Tokens that end the output, and must not be chosen before `min_tokens`."""

    @property
    def status(self) -> SequenceStatus:
        """Where it stands."""
        return self._status

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; an illegal change is a fault of ours."""
        assert (self._status, status) in _ALLOWED, f"{self._status} cannot become {status}"
        self._status = status

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not in the cache yet; at least 1 while it is not finished."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_in_prompt(self) -> bool:
        """Whether some of the prompt is not in the cache yet."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def num_reusable(self) -> int:
        """Leading tokens that need not be computed if they are found in the cache.

        The last token's logits are always needed. A prompt leaves two tokens, as single ones are computed by
        other kernels, which round differently; and all of those whose logits are wanted and not given yet.
        """
        if self.wants_prompt_logits and self.num_prompt_logits < self.num_prompt_tokens - 1:
            return self.num_prompt_logits
        return max(0, self.num_tokens - (1 if self.num_output_tokens else 2))

    def set_space(self, *, shared: bool) -> None:
        """Say whom it shares the cache with: all of its salt, or only the outputs of its own request."""
        own = (self.cache_salt, b"salt") if shared else (str(self.group_id), b"request")
        self.space = blake2b(own[0].encode(), digest_size=16, person=own[1]).digest()

    def may_stop(self, num_ahead: int = 0) -> bool:
        """Whether the token after `num_ahead` further ones may end the output by a stop."""
        if not self._min_tokens:
            return True
        return self.num_output_tokens + num_ahead + 1 > self._min_tokens

    def may_end_by(self, token_id: int, num_ahead: int) -> bool:
        """Whether `finish_by` is worth asking, where no text stops the output: nearly never."""
        return token_id in self.stop_token_ids or len(self.token_ids) + num_ahead >= self._num_before_last

    def finish_by(self, token_id: int, matched_stop: str | None, num_ahead: int = 0) -> Finish | None:
        """How the output ends with `token_id`, which completes `matched_stop`; None if it goes on.

        `num_ahead` tokens come before it that are not booked yet.
        """
        if token_id in self.stop_token_ids and self.may_stop(num_ahead):
            return Finish(FinishReason.STOP, token_id)
        if matched_stop is not None:
            return Finish(FinishReason.STOP, matched_stop)
        if len(self.token_ids) + num_ahead >= self._num_before_last:
            return Finish(FinishReason.LENGTH)
        return None
