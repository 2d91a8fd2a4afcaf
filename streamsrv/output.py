"""One output in the making, and the request that it belongs to."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from engines.api import FloatArray, StreamsrvError
from streamsrv.constraint.compiler import Constraint
from streamsrv.constraint.mask import num_mask_words
from streamsrv.constraint.spec import ConstraintFailedError
from streamsrv.constraint.state import ConstraintState
from streamsrv.detokenizer import Detokenizer
from streamsrv.logit_changes import LogitChanges, NothingAllowedError
from streamsrv.logprobs import RowLogprobs
from streamsrv.prompt_lookup import PromptLookup
from streamsrv.request import GenerateRequest
from streamsrv.sampling import NOTHING_LEFT, RowSampling
from streamsrv.sequence import Finish, FinishReason, Sequence, SequenceStatus
from streamsrv.stream import Element, Entry, PromptTokens, Stream, StreamEnd, Token, ToolCallMade
from streamsrv.tool_calls import Piece, ToolCallParser


@dataclass(slots=True)
class Brought:
    """What a step brought to one output."""

    output: "Output"
    elements: list[Element] = field(default_factory=list)
    """Its tokens and calls in order, and before them what was learnt of the prompt."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that its sequence goes on with; of a plain output they are not among the elements."""
    finish: Finish | StreamsrvError | None = None
    """How it ends; with an error where no token could be chosen."""

    @property
    def entries(self) -> Seq[Entry]:
        """All that its log is told."""
        return [*self.elements, *self.token_ids] if self.output.is_plain else self.elements


class Output:
    """One output of a job: a sequence with what it takes to turn its logits into a stream.

    Between two steps it is the loop's, during one the worker's thread's.
    """

    def __init__(
        self,
        job: "Job",
        index: int,
        sequence: Sequence,
        detokenizer: Detokenizer,
        generator: np.random.Generator,
        *,
        prompt_detokenizer: Detokenizer | None = None,
        constraint: ConstraintState | None = None,
        vocab_size: int = 0,
        looks_up: bool = False,
    ) -> None:
        """Begin it.

        Args:
            job: the request that it belongs to.
            index: its place among the request's outputs.
            sequence: its tokens.
            detokenizer: makes their text.
            generator: draws its tokens.
            prompt_detokenizer: makes the prompt's text where that is wanted; it has taken the first token.
            constraint: what it must match.
            vocab_size: the model's; only with a constraint.
            looks_up: whether it guesses tokens by what was said before.

        """
        self.job = job
        self.log, self.progress = job.stream.log, job.stream.progress
        self.index = index
        self.sequence = sequence
        self.detokenizer = detokenizer
        self._prompt_detokenizer = prompt_detokenizer
        request, options = job.request, job.request.output
        params = request.sampling
        self._changes = LogitChanges.of(params, request.prompt_token_ids)
        self._constraint = constraint
        self._mask = None if constraint is None else np.zeros(num_mask_words(vocab_size), np.uint32)
        self._mask_error: ConstraintFailedError | None = None
        self._unbanned = RowSampling(params, generator, changes=self._changes, mask=self._mask)
        self._banned = replace(self._unbanned, banned=tuple(sequence.stop_token_ids))
        self.lookup = PromptLookup(sequence.token_ids) if looks_up else None
        parsing = request.tool_parsing
        self._calls: ToolCallParser | None = None
        self._behind = ""  # text behind the last call
        if parsing is not None:
            self._calls = ToolCallParser(
                parsing.format,
                parsing.tools,
                num_earlier_calls=parsing.num_earlier_calls,
                in_thought=parsing.in_thought,
            )
        self.wants_logprobs = options.wants_logprobs
        self._num_top = options.num_top_logprobs
        self._may_stop = not request.stop.min_tokens  # at any token
        self.is_plain = (
            request.num_outputs == 1
            and parsing is None
            and constraint is None
            and not request.stop.stop
            and not options.wants_logprobs
            and not options.text_lengths
        )
        """Its tokens' text is of no concern before it is sent: the log holds their ids."""

    @property
    def is_constrained(self) -> bool:
        """Whether its rows need a mask, made by `make_mask`."""
        return self._constraint is not None

    def make_mask(self) -> None:
        """Work out what may come next; on any thread, without the interpreter's lock for the most part."""
        if self._constraint is not None and self._mask is not None:
            try:
                self._constraint.mask(self._mask)
            except ConstraintFailedError as error:
                self._mask.fill(0xFFFF_FFFF)
                self._mask_error = error

    def row_sampling(self, num_ahead: int = 0) -> RowSampling:
        """How its row of logits after `num_ahead` further tokens becomes a token."""
        return self._unbanned if self._may_stop or self.sequence.may_stop(num_ahead) else self._banned

    def row_logprobs(self, logits: FloatArray) -> RowLogprobs | None:
        """What is to be told of its row [vocab_size]; None if nothing is."""
        if not self.wants_logprobs:
            return None
        return RowLogprobs(logits, self._num_top, self.detokenizer.token_bytes)

    def accept(self, brought: Brought, token_id: int, known: RowLogprobs | None) -> bool:
        """Go on with a token that was chosen, and with those that must follow it; False if it ends."""
        if self._mask_error is not None:
            brought.finish = self._mask_error
        elif token_id == NOTHING_LEFT:
            num_before = self.sequence.num_output_tokens + len(brought.token_ids)
            brought.finish = NothingAllowedError(num_before)
        elif self.is_plain:
            if self._changes is not None:
                self._changes.push(token_id)
            if self.sequence.may_end_by(token_id, len(brought.token_ids)):
                brought.finish = self.sequence.finish_by(token_id, None, len(brought.token_ids))
            brought.token_ids.append(token_id)
        elif self._take(brought, token_id, known) and self._constraint is not None and not known:
            for forced in self._constraint.forced_tokens():
                if not self._may_be_chosen(forced):
                    break  # the next step will say that nothing is left
                # As many draws as if each had been chosen in a step of its own.
                self.row_sampling().draw_point()
                if not self._take(brought, forced, None):
                    break
        return brought.finish is None

    def read_prompt(self, logits: FloatArray) -> PromptTokens:
        """Tell of the prompt's next tokens by the rows [n, vocab_size] before them."""
        sequence = self.sequence
        first = sequence.num_prompt_logits + 1
        token_ids = sequence.request.prompt_token_ids[first : first + len(logits)]
        token_bytes = self.detokenizer.token_bytes
        known = tuple(
            RowLogprobs(row, self._num_top, token_bytes).of(token_id)
            for row, token_id in zip(logits, token_ids, strict=True)
        )
        text = ""
        if self._prompt_detokenizer is not None:
            text = "".join(map(self._prompt_detokenizer.push, token_ids))
            if first + len(token_ids) == sequence.num_prompt_tokens:
                text += self._prompt_detokenizer.flush()
        return PromptTokens(token_ids, text, known)

    def cancelled(self) -> tuple[list[Element], Finish]:
        """How it ends where it is."""
        text, calls = self.detokenizer.flush(), list[Element]()
        if self._calls is not None:
            text, calls = self._parted([*self._calls.push(text), *self._calls.flush()])
        return calls, Finish(FinishReason.CANCELLED, text=text + self._behind)

    def _may_be_chosen(self, token_id: int) -> bool:
        params = self.job.request.sampling
        return token_id not in params.banned_token_ids and (
            not params.allowed_token_ids or token_id in params.allowed_token_ids
        )

    def _take(self, brought: Brought, token_id: int, known: RowLogprobs | None) -> bool:
        """Go on with one token; False if it ends."""
        sequence, num_ahead = self.sequence, len(brought.token_ids)
        if self._changes is not None:
            self._changes.push(token_id)
        if self._constraint is not None:
            try:
                self._constraint.accept(token_id)
            except ConstraintFailedError as error:
                brought.finish = error
                return False
        text = self.detokenizer.push(token_id, may_stop=sequence.may_stop(num_ahead))
        finish = sequence.finish_by(token_id, self.detokenizer.matched_stop, num_ahead)
        calls: list[Element] = []
        if self._calls is not None:
            pieces = self._calls.push(text)
            if finish is not None:
                pieces = [*pieces, *self._calls.push(self.detokenizer.flush()), *self._calls.flush()]
            text, calls = self._parted(pieces)
        logprobs = None if known is None else known.of(token_id)
        brought.token_ids.append(token_id)
        brought.elements += [Token(self.index, token_id, text, logprobs), *calls]
        if finish is None:
            return True
        brought.finish = replace(
            finish, text=self.detokenizer.flush() if self._calls is None else self._behind
        )
        return False

    def _parted(self, pieces: Seq[Piece]) -> tuple[str, list[Element]]:
        """Part a token's text from the calls that it completes.

        Text goes with tokens. So what is behind a call goes with the next one, lest it be told before it.
        """
        text, self._behind = self._behind, ""
        calls: list[Element] = []
        for piece in pieces:
            if isinstance(piece, str):
                self._behind += piece
            else:
                text, self._behind = text + self._behind, ""
                calls.append(ToolCallMade(self.index, piece))
        if not calls:
            text, self._behind = text + self._behind, ""
        return text, calls


@dataclass(eq=False, slots=True)
class Job:
    """A request at work: its outputs, and the stream that they all go into."""

    request: GenerateRequest
    stream: Stream
    outputs: list[Output] = field(default_factory=list)
    num_open: int = 0
    """Outputs that have not ended."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its blocks are free and its log has ended."""

    def add(
        self,
        sequence: Sequence,
        detokenizer: Detokenizer,
        generator: np.random.Generator,
        *,
        prompt_detokenizer: Detokenizer | None = None,
        constraint: Constraint | None = None,
        vocab_size: int = 0,
        looks_up: bool = False,
    ) -> None:
        """Give it one more output."""
        output = Output(
            self,
            len(self.outputs),
            sequence,
            detokenizer,
            generator,
            prompt_detokenizer=prompt_detokenizer,
            constraint=None if constraint is None else constraint.start(),
            vocab_size=vocab_size,
            looks_up=looks_up,
        )
        self.outputs.append(output)
        self.num_open += 1
        if output.is_plain:
            self.stream.log.detokenizer = detokenizer

    @property
    def open_outputs(self) -> list[Output]:
        """The outputs that have not ended."""
        return [output for output in self.outputs if output.sequence.status is not SequenceStatus.FINISHED]

    @property
    def usage(self) -> StreamEnd:
        """What it has cost so far."""
        sequences = [output.sequence for output in self.outputs]
        return StreamEnd(
            len(self.request.prompt_token_ids),
            self.num_output_tokens,
            # Outputs after the first share its prompt within the request: of that others know nothing.
            num_cached_prompt_tokens=sequences[0].num_cached_tokens,
            num_guessed_tokens=sum(sequence.num_guessed_tokens for sequence in sequences),
            num_accepted_tokens=sum(sequence.num_accepted_tokens for sequence in sequences),
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, over all outputs."""
        return sum(output.sequence.num_output_tokens for output in self.outputs)

    @property
    def is_waiting(self) -> bool:
        """Whether no output owns blocks."""
        return all(o.sequence.status is not SequenceStatus.RUNNING for o in self.outputs)
