"""One output on its way through a constraint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from streamsrv.constraint.mask import MaskArray
from streamsrv.constraint.spec import ConstraintFailedError


@dataclass(frozen=True, slots=True)
class MaskShape:
    """How masks of a model lie in memory, and which tokens end its outputs."""

    num_words: int
    """Of the masks that callers see."""
    num_library_words: int
    """Of those that the library writes: more, where its vocabulary is larger than the model's."""
    last_word: int
    """Which bits of the last word are tokens of the model."""
    eos_token_ids: tuple[int, ...]


class ConstraintState:
    """Where an output stands. Used by one thread at a time; masks are made without the interpreter's lock.

    The library tokenises a text that must come next as the model's tokenizer would, and allows the tokens of
    that alone: a mask with one token and `forced_tokens` say the same. End-of-text tokens are allowed exactly
    where the output may end; where it must, the first of them alone.
    """

    def __init__(self, matcher: LLMatcher, shape: MaskShape, remake: Callable[[], LLMatcher]) -> None:
        """Take over a matcher that is in no error; `remake` makes one that shares nothing with others."""
        self._matcher = matcher
        self._shape = shape
        self._remake = remake
        self._token_ids: list[int] = []
        self._is_alone = False
        self._has_ended = False

    @property
    def may_stop(self) -> bool:
        """Whether the output is a text of the language as it is."""
        return self._has_ended or self._matcher.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether the output is complete, and nothing but an end-of-text token can follow."""
        return self._has_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self, out: MaskArray) -> None:
        """Write which tokens may come next: [num_mask_words(vocab_size)], contiguous.

        Raises:
            ConstraintFailedError: the constraint is too complex to go on with.

        """
        shape, eos = self._shape, self._shape.eos_token_ids
        assert out.shape == (shape.num_words,), f"a mask has {shape.num_words} words, not {out.shape}"
        assert out.flags.c_contiguous, "a mask must be contiguous"
        if self.must_stop:
            out.fill(0)
            eos = eos[:1]
        else:
            self._write(out)
            if self._matcher.is_error():
                self._go_on_alone()
                self._write(out)
                self._check()
        out[-1] &= shape.last_word
        may_stop = self.may_stop
        for token_id in eos:
            bit = 1 << token_id % 32
            if may_stop:
                out[token_id // 32] |= bit
            else:
                out[token_id // 32] &= ~bit & 0xFFFF_FFFF

    def forced_tokens(self) -> tuple[int, ...]:
        """Give the tokens that come next whatever the model says; the end of text last, if it is reached.

        They stand in the masks, too, one after another. Empty where there is a choice, and after the end.

        Raises:
            ConstraintFailedError: as `mask`.

        """
        if self._has_ended:
            return ()
        if self.must_stop:
            return self._shape.eos_token_ids[:1]
        token_ids = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._go_on_alone()
            token_ids = self._matcher.compute_ff_tokens()
            self._check()
        return tuple(token_ids)

    def accept(self, token_id: int) -> None:
        """Go on with a token.

        Raises:
            ConstraintFailedError: the constraint does not allow it, or is too complex to go on with.

        """
        if token_id in self._shape.eos_token_ids:
            if not self.may_stop or self._has_ended:
                state = "has ended" if self._has_ended else "is not complete"
                raise ConstraintFailedError(f"token {token_id} ends an output that {state}")
            self._has_ended = True
            return
        if self.must_stop:
            raise ConstraintFailedError(f"token {token_id} follows an output that is complete")
        if not self._matcher.consume_token(token_id):
            self._go_on_alone()
            self._matcher.consume_token(token_id)
            self._check()
        self._token_ids.append(token_id)

    def roll_back(self, num_tokens: int) -> None:
        """Take back the last tokens accepted.

        Raises:
            ConstraintFailedError: the grammar has parts that cannot be taken back (Lark's max_tokens).

        """
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()
            del self._token_ids[-num_tokens:]

    def masks_along(self, draft: Sequence[int], out: MaskArray) -> int:
        """Write the masks at the tokens of a draft and behind it: [len(draft) + 1, num words].

        The state stays where it is. Returns how many masks were written: one more than the tokens at the
        draft's beginning that are allowed, except where the last of them ends the output.

        Raises:
            ConstraintFailedError: as `mask`.

        """
        num_accepted = 0
        for i in range(len(draft) + 1):
            self.mask(out[i])
            if i == len(draft) or not out[i, draft[i] // 32] >> draft[i] % 32 & 1:
                break
            if draft[i] in self._shape.eos_token_ids:
                break
            self.accept(draft[i])
            num_accepted += 1
        self.roll_back(num_accepted)
        return num_accepted + 1

    def copy(self) -> "ConstraintState":
        """Make a state that goes on from here by itself."""
        twin = ConstraintState(self._matcher.deep_copy(), self._shape, self._remake)
        twin._token_ids = self._token_ids.copy()
        twin._has_ended = self._has_ended
        return twin

    def _write(self, out: MaskArray) -> None:
        if self._shape.num_library_words == self._shape.num_words:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        else:
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            out[:] = words[: self._shape.num_words]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailedError(self._matcher.get_error())

    def _go_on_alone(self) -> None:
        """Leave the lexer that all copies share, if it is that which has come to a limit.

        What one output makes it work out stays in it. Nobody's output may end by what others did, so each
        gets a second try with a lexer of its own.
        """
        if self._is_alone or not self._matcher.get_error().startswith("lexer error"):
            return
        self._matcher = self._remake()
        self._is_alone = True
        self._matcher.consume_tokens(self._token_ids)
