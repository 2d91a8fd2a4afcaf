"""Outputs under a constraint, drawn at random from what its masks allow."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.spec import Vocabulary
from engines.vocabulary import vocabulary_from_gguf
from streamsrv.constraint.compiler import ConstraintCompiler
from streamsrv.constraint.mask import allowed_ids, num_mask_words
from streamsrv.constraint.spec import ConstraintKind, ConstraintSpec
from streamsrv.constraint.state import ConstraintState
from streamsrv.tokenizer import Tokenizer
from tests import vocabularies

# The order in which tokens of one byte are tried to bring a JSON text to its end, outside of strings.
_ENDINGS = (b"}", b"]", b",:", b"ntf", b"0", b"123456789", b'"', b".abcdefghijklmopqrsuvwxyz-", b"[{")
_ZERO = _ENDINGS.index(b"0")
# Inside of them: first what ends them, then one of these kinds, drawn first.
_KINDS = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"/\\ .,:;@+-_=<>()#")


@dataclass(frozen=True, slots=True)
class Rig:
    """A vocabulary with its compiler."""

    tokenizer: Tokenizer
    compiler: ConstraintCompiler
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    ranks: NDArray[np.int8]
    """[vocab_size] how much a token helps an output to end, outside of strings: the lowest most."""
    kinds: NDArray[np.int8]
    """[vocab_size] which of the kinds of characters a token is of, if it is one byte; or more than those."""
    quote_id: int
    """The token of a quotation mark."""

    def start(self, kind: str, *texts: str) -> ConstraintState:
        """Begin an output under a constraint."""
        return self.compiler.compile(ConstraintSpec(ConstraintKind(kind), texts)).start()

    def allowed(self, state: ConstraintState) -> list[int]:
        """Give the ids that may come next."""
        mask = np.empty(num_mask_words(self.vocab_size), np.uint32)
        state.mask(mask)
        return [int(token_id) for token_id in allowed_ids(mask, self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Turn a text into ids, as it is in the middle of others."""
        return self.tokenizer.encode(text, add_special=False, parse_special=False)

    def takes(self, state: ConstraintState, token_ids: Sequence[int]) -> bool:
        """Whether each of some tokens is allowed where it stands, and the output may end behind them."""
        for token_id in token_ids:
            mask = np.empty(num_mask_words(self.vocab_size), np.uint32)
            state.mask(mask)
            if not mask[token_id // 32] >> token_id % 32 & 1:
                return False
            state.accept(token_id)
        return state.may_stop


def rig(vocabulary: Vocabulary, vocab_size: int | None = None) -> Rig:
    """Make one; `vocab_size` is the model's, where it differs from the tokenizer's."""
    tokenizer = Tokenizer(vocabulary)
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    ranks = np.full(size, len(_ENDINGS), np.int8)
    kinds = np.full(size, len(_KINDS), np.int8)
    for token_id in range(min(size, tokenizer.vocab_size)):
        text = tokenizer.token_bytes(token_id)
        if len(text) == 1:
            ranks[token_id] = next((i for i, chars in enumerate(_ENDINGS) if text in chars), len(_ENDINGS))
            kinds[token_id] = next((i for i, chars in enumerate(_KINDS) if text in chars), len(_KINDS))
    eos = vocabulary.eos_token_ids[::-1]
    ranks[list(eos)] = -1
    [quote_id] = tokenizer.encode('"', add_special=False, parse_special=False)
    compiler = ConstraintCompiler(vocabulary.tokenizer_json, size, eos)
    return Rig(tokenizer, compiler, size, eos, ranks, kinds, quote_id)


@cache
def tiny() -> Rig:
    """The tiny byte-level vocabulary."""
    return rig(vocabulary_from_gguf(vocabularies.byte_level_metadata()))


@cache
def demo(path: Path) -> Rig:
    """The demo model's."""
    return rig(vocabularies.demo_vocabulary(path))


@dataclass(slots=True)
class Output:
    """A drawn output that has ended."""

    token_ids: list[int] = field(default_factory=list)
    """Without the end-of-text token."""
    num_free: int = 0
    """How many were drawn before it was brought to its end."""
    num_forced: int = 0
    """How many were forced."""


def draw_output(
    rig: Rig,
    state: ConstraintState,
    draw: random.Random,
    *,
    num_free: int,
    most: int = 600,
    begun: bytes = b"",
) -> Output:
    """Draw tokens that are allowed, all equally likely, then such that end the output as soon as can be.

    Forced tokens are checked on the way: each is the only one allowed in its place. `begun` is the text that
    brought the state to where it stands.
    """
    output = Output()
    mask = np.empty(num_mask_words(rig.vocab_size), np.uint32)
    forced: list[int] = []
    text = begun
    for i in range(most):
        state.mask(mask)
        ids = allowed_ids(mask, rig.vocab_size)
        assert len(ids), "something is always allowed"
        now = list(state.forced_tokens())
        if forced:
            assert now[: len(forced)] == forced, "what was forced before is forced still"
        if now:
            assert ids.tolist() == now[:1], "the mask allows a forced token alone"
            output.num_forced += 1
        token_id = int(draw.choice(ids)) if i < num_free else _ending(rig, ids, text, draw)
        forced = now[1:]
        state.accept(token_id)
        if token_id in rig.eos_token_ids:
            return output
        text += rig.tokenizer.token_bytes(token_id)
        output.token_ids.append(token_id)
        output.num_free = min(i + 1, num_free)
    raise AssertionError(f"no end after {most} tokens: {rig.tokenizer.decode(output.token_ids)}")


def _ending(rig: Rig, ids: NDArray[np.int64], text: bytes, draw: random.Random) -> int:
    """Choose the token that is likely to bring a text to its end."""
    escaped = (len(text) - len(text.rstrip(b"\\"))) % 2
    is_string = (text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')) % 2
    if is_string and not escaped and rig.quote_id in ids:
        return rig.quote_id
    groups = rig.kinds[ids] if is_string else rig.ranks[ids]
    group = draw.choice(np.unique(groups).tolist()) if is_string else groups.min()
    if group == _ZERO and _ZERO + 1 in groups:
        group = draw.choice((_ZERO, _ZERO + 1))  # multiples of 1000 need zeros, those of 7 others
    best = ids[groups == group]
    return int(best[draw.randrange(len(best))])
