"""From a constraint's text to masks, for one model's vocabulary."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from streamsrv.constraint.mask import num_mask_words
from streamsrv.constraint.schema import compiler_schema, read_schema
from streamsrv.constraint.spec import ConstraintKind, ConstraintSpec, InvalidConstraintError
from streamsrv.constraint.state import ConstraintState, MaskShape

_T = TypeVar("_T")

# What bounds the work of one compilation, and of one mask. With the library's own values a counted
# repetition of a repetition took 3.3 s and 200 MB; with these 0.6 s and 30 MB, and no constraint that was
# tried grew beyond 50 MB. The schemas of the tests get by with a quarter of each; a string whose characters
# are counted, up to 40,000 of them, came to the limit after 27,000.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    max_lexer_states=250_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # the state of the parser tells what the output was
)
# The compiler calls itself where rules contain one another, and a stack that is full ends the process. Chains
# of rules as long as a text of 64 KiB can hold needed 8 to 16 MiB. What is not used is never touched.
_MIN_STACK_BYTES = 64 << 20
_STACK_BYTES_PER_BYTE = 4 << 10
_stack_size = threading.Lock()


class Constraint:
    """A compiled constraint. Any number of outputs may start from it, on any threads.

    They share what is worked out on the way, which makes masks fast, until it comes to a limit.
    """

    def __init__(self, make: Callable[[], LLMatcher], shape: MaskShape) -> None:
        """`make` makes a matcher in no error that shares nothing with others.

        Raises:
            InvalidConstraintError: `make` did.

        """
        self._make = make
        self._shape = shape
        self._first: LLMatcher | None = make()

    def start(self) -> ConstraintState:
        """Begin an output."""
        first = self._first
        if first is None:
            first = self._first = self._make()
        return ConstraintState(first.deep_copy(), self._shape, self._remake)

    def _remake(self) -> LLMatcher:
        self._first = None  # those who start now shall not share what is at its limit
        return self._make()


class ConstraintCompiler:
    """Compiles constraints for one model, one at a time, and keeps the latest.

    Any number of threads may use it. It reads the vocabulary when it is first asked to compile (0.3 s for
    49,152 tokens).
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], *, max_kept: int = 32
    ) -> None:
        """`vocab_size` is the model's: how many logits it gives.

        Of the end-of-text tokens, the first is the one that is forced where an output must stop.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._max_kept = max_kept
        self._kept: OrderedDict[ConstraintSpec, Constraint] = OrderedDict()
        self._keeping = threading.Lock()
        # One at a time, so that hard ones take one core from the engine and no more.
        self._compiling = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, spec: ConstraintSpec) -> Constraint:
        """Compile a constraint, or find it compiled. May take a second; the interpreter's lock is free.

        Raises:
            InvalidConstraintError: the compiler refuses it, or no output matches it; with its message.

        """
        if (known := self._find(spec)) is not None:
            return known
        with self._compiling:
            if (known := self._find(spec)) is not None:
                return known
            constraint = self._compile(spec)
            with self._keeping:
                self._kept[spec] = constraint
                if len(self._kept) > self._max_kept:
                    self._kept.popitem(last=False)
            return constraint

    def _find(self, spec: ConstraintSpec) -> Constraint | None:
        with self._keeping:
            if spec in self._kept:
                self._kept.move_to_end(spec)
            return self._kept.get(spec)

    def _compile(self, spec: ConstraintSpec) -> Constraint:
        if self._tokenizer is None:
            self._tokenizer = self._read_vocabulary(spec.kind)
        tokenizer = self._tokenizer
        stack_bytes = max(_MIN_STACK_BYTES, spec.num_bytes * _STACK_BYTES_PER_BYTE)

        def make() -> LLMatcher:
            return _on_large_stack(lambda: _matcher(tokenizer, spec), stack_bytes)

        return Constraint(make, self._shape(tokenizer.vocab_size))

    def _shape(self, library_size: int) -> MaskShape:
        return MaskShape(
            num_words=num_mask_words(self._vocab_size),
            num_library_words=num_mask_words(library_size),
            last_word=0xFFFF_FFFF >> -self._vocab_size % 32,
            eos_token_ids=self._eos_token_ids,
        )

    def _read_vocabulary(self, kind: ConstraintKind) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidConstraintError(kind, "cannot be used with this model: it has no end-of-text token")
        eos = list(self._eos_token_ids)
        try:
            try:
                return LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=eos)
            except ValueError:
                # The tokenizer may have more tokens than the model; those are never allowed.
                return LLTokenizer(self._tokenizer_json, eos_token=eos)
        except ValueError as error:
            raise InvalidConstraintError(
                kind, f"cannot be used with this model, whose tokenizer the compiler cannot read: {error}"
            ) from error


def _matcher(tokenizer: LLTokenizer, spec: ConstraintSpec) -> LLMatcher:
    matcher = LLMatcher(tokenizer, _grammar(spec), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        # Some faults show with the first mask, and it is the one that takes longest.
        matcher.compute_bitmask()
    if matcher.is_error():
        message = matcher.get_error().removesuffix("<non-verbose/>").strip()
        if message == "NoExtensionBias":
            raise InvalidConstraintError(spec.kind, "allows no output at all")
        raise InvalidConstraintError(spec.kind, f"cannot be compiled: {message}")
    return matcher


def _grammar(spec: ConstraintSpec) -> str:
    """Write a spec in the library's own form. A text of the caller's stays inside of a JSON value."""
    text = spec.texts[0]
    match spec.kind:
        case ConstraintKind.JSON_SCHEMA:
            return json.dumps({"grammars": [{"json_schema": compiler_schema(read_schema(text))}]})
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case ConstraintKind.LARK:
            return json.dumps({"grammars": [{"lark_grammar": text}]})
        case ConstraintKind.CHOICES:
            # As one terminal: thousands of alternatives of a rule are more than the parser takes.
            texts = " | ".join(map(json.dumps, spec.texts))
            return json.dumps({"grammars": [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}]})


def _on_large_stack(work: Callable[[], _T], stack_bytes: int) -> _T:
    """Run something on a thread with a stack of its own size."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="compile-constraint")
    with _stack_size:
        usual = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
