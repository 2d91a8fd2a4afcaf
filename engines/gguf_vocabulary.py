"""The vocabulary in a GGUF file's metadata."""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from engines.api import CheckpointError
from engines.control_texts import CONTROL_TEXTS, END_TEXTS, FILE_END_TEXTS, ends_message_only
from engines.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from engines.spec import Vocabulary
from engines.tokenizer_json import AddedToken, Frame, TokenizerJson

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """The kinds of token in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTROL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
_NOT_TEXT = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE})
_KEEPING_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's control tokens that leave the white space after them where it is."""
_WITHOUT_TEXT = frozenset({TokenType.UNUSED, TokenType.UNDEFINED})


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """Turn a GGUF file's tokenizer metadata into a vocabulary that gives llama.cpp's ids.

    `metadata` has plain Python values under GGUF's own names. Byte-level BPE (`gpt2`) and
    SentencePiece-style BPE with byte fallback (`llama`) are understood.

    Raises:
        CheckpointError: the tokenizer is of another kind, or the metadata is incomplete or contradictory.

    """
    fields = _Fields(metadata)
    model = fields.text("model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer model {model!r} is not supported: allowed are 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece-style BPE); convert the model with one of these"
        )
    tokens = _tokens(fields)
    types = _types(fields, len(tokens))
    is_spm = model == "llama"
    # The ids that llama.cpp assumes where a SentencePiece vocabulary names none.
    bos = fields.token_id("bos_token_id", tokens, default=1 if is_spm else None)
    eos = fields.token_id("eos_token_id", tokens, default=2 if is_spm else None)
    ends = {eos, fields.token_id("eot_token_id", tokens), fields.token_id("eom_token_id", tokens)}
    pre = PreTokenizer(()) if is_spm else _pre_tokenizer(fields)
    frame = Frame(
        _framing(fields, "add_bos_token", is_spm or pre.adds_bos, tokens, bos),
        _framing(fields, "add_eos_token", False, tokens, eos),
    )
    merges = _sentencepiece_merges(fields, tokens, types) if is_spm else _merges(fields, tokens)
    _mark_control_texts(tokens, types, merges)
    unused: frozenset[str] = frozenset() if is_spm else _unused(tokens, types, merges)
    vocab = {text: i for i, text in enumerate(tokens) if text not in unused}
    strips_right = is_spm and _is_phi3(metadata)
    document = TokenizerJson(vocab, merges, _added(tokens, types, strips_right), frame)
    if is_spm:
        unknown = fields.token_id("unknown_token_id", tokens, default=0)
        tokenizer_json = document.sentencepiece(
            unknown=None if unknown is None else tokens[unknown],
            add_space_prefix=fields.flag("add_space_prefix", default=True),
        )
    else:
        tokenizer_json = document.byte_level(pre)
    return Vocabulary(
        tokenizer_json=tokenizer_json,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        eos_token_ids=_end_ids(tokens, types, ends),
        chat_template=fields.chat_template(),
    )


class _Fields:
    """The metadata, checked as it is read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def has(self, name: str) -> bool:
        return self._metadata.get(_PREFIX + name) is not None

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise CheckpointError(f"{_PREFIX}{name} must be a text, not {_kind(value)}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._list(name)
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) != len(value):
            raise CheckpointError(f"{_PREFIX}{name} must hold texts only")
        return texts

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._list(name)
        if len(value) != count:
            raise CheckpointError(
                f"{_PREFIX}{name} has {len(value)} entries and {_PREFIX}tokens has {count}; "
                f"they must be as many"
            )
        numbers = [item for item in value if isinstance(item, int | float) and math.isfinite(item)]
        if len(numbers) != count:
            raise CheckpointError(f"{_PREFIX}{name} must hold finite numbers only")
        return numbers

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name) if self.has(name) else default
        if not isinstance(value, bool):
            raise CheckpointError(f"{_PREFIX}{name} must be true or false, not {_kind(value)}")
        return value

    def token_id(self, name: str, tokens: Sequence[str], default: int | None = None) -> int | None:
        if not self.has(name):
            return default if default is None or default < len(tokens) else None
        value = self._value(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{_PREFIX}{name} must be a whole number, not {_kind(value)}")
        if not 0 <= value < len(tokens):
            raise CheckpointError(
                f"{_PREFIX}{name} is {value}, but the vocabulary has ids 0 to {len(tokens) - 1}"
            )
        return value

    def chat_template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        if value is None or isinstance(value, str):
            return value
        raise CheckpointError(f"tokenizer.chat_template must be a text, not {_kind(value)}")

    def _list(self, name: str) -> Sequence[object]:
        value = self._value(name)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise CheckpointError(f"{_PREFIX}{name} must be a list, not {_kind(value)}")
        return value

    def _value(self, name: str) -> object:
        if not self.has(name):
            raise CheckpointError(f"the metadata has no {_PREFIX}{name}: the file holds no whole tokenizer")
        return self._metadata[_PREFIX + name]


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _tokens(fields: _Fields) -> list[str]:
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(fields.texts("tokens"))]
    if not tokens:
        raise CheckpointError(f"{_PREFIX}tokens is empty")
    if len(set(tokens)) != len(tokens):
        last = {text: i for i, text in enumerate(tokens)}
        first = next(i for i, text in enumerate(tokens) if last[text] != i)
        raise CheckpointError(
            f"{_PREFIX}tokens has {tokens[first]!r} twice, as ids {first} and {last[tokens[first]]}"
        )
    return tokens


def _types(fields: _Fields, count: int) -> list[TokenType]:
    if not fields.has("token_type"):
        return [TokenType.NORMAL] * count
    known = {int(kind): kind for kind in TokenType}
    return [known.get(int(n), TokenType.UNDEFINED) for n in fields.numbers("token_type", count)]


def _framing(
    fields: _Fields, name: str, default: bool, tokens: Sequence[str], token_id: int | None
) -> tuple[int, str] | None:
    if not fields.flag(name, default=default):
        return None
    if token_id is None:
        wanted = name.removeprefix("add_") + "_id"
        raise CheckpointError(f"a prompt gets the token {_PREFIX}{wanted}, which the metadata does not have")
    return token_id, tokens[token_id]


def _pre_tokenizer(fields: _Fields) -> PreTokenizer:
    name = fields.text("pre") if fields.has("pre") else "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"pre-tokenizer {name!r} ({_PREFIX}pre) is not supported; known are {known}")
    return PRE_TOKENIZERS[name]


def _merges(fields: _Fields, tokens: Iterable[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(fields.texts("merges")):
        # A token may begin with a space, so the separator is looked for after the first character.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in known or right not in known or left + right not in known:
            raise CheckpointError(
                f"{_PREFIX}merges[{rank}] is {line!r}: it must be two tokens with a space between them, "
                f"and both and the two joined must be in the vocabulary"
            )
        merges.setdefault((left, right))
    return list(merges)


def _sentencepiece_merges(
    fields: _Fields, tokens: Sequence[str], types: Sequence[TokenType]
) -> list[tuple[str, str]]:
    scores = fields.numbers("scores", len(tokens))
    text_scores = {score for score, kind in zip(scores, types, strict=True) if kind is TokenType.NORMAL}
    if len(text_scores) == 1 and fields.has("merges"):
        # Converted from a tokenizer.json, which has no scores: one stands for all of them.
        return _merges(fields, tokens)
    return _merges_by_score(tokens, types, scores)


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[TokenType], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the best-scored joined one first.

    SentencePiece joins whichever neighbours give the best-scored token, the leftmost of equals first. As a
    list of merges that is every split of every token: exact where scores differ, as they do in every model
    that SentencePiece learned. Control, unknown and byte tokens never come out of text: that is
    SentencePiece's own rule; llama.cpp lets text join to them where their parts are tokens.
    """
    known = {text for text, kind in zip(tokens, types, strict=True) if kind not in _NOT_TEXT}
    # Equal scores: the longer token first, then the longer left part, which is what going leftmost first
    # does to runs of one character.
    order = sorted(range(len(tokens)), key=lambda i: (-scores[i], -len(tokens[i])))
    return [
        (text[:cut], text[cut:])
        for text in (tokens[i] for i in order if tokens[i] in known)
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in known and text[cut:] in known
    ]


def _mark_control_texts(
    tokens: Sequence[str], types: list[TokenType], merges: Iterable[tuple[str, str]]
) -> None:
    """Give well-known control tokens their type where the file does not.

    One that merging makes out of text is text: "</s>" is a piece of HTML in Qwen's vocabulary. (llama.cpp
    takes that one for the end, too.)
    """
    candidates = {text: i for i, text in enumerate(tokens) if text in CONTROL_TEXTS}
    for left, right in merges:
        if left + right in candidates and types[candidates[left + right]] is TokenType.NORMAL:
            del candidates[left + right]
    for i in candidates.values():
        types[i] = TokenType.CONTROL


def _unused(
    tokens: Sequence[str], types: Sequence[TokenType], merges: Iterable[tuple[str, str]]
) -> frozenset[str]:
    """Find the tokens that only fill the table up to a round size: they have no text."""
    unused = {text for text, kind in zip(tokens, types, strict=True) if kind in _WITHOUT_TEXT}
    if unused:
        for left, right in merges:
            unused -= {left, right, left + right}
    return frozenset(unused)


def _added(tokens: Sequence[str], types: Sequence[TokenType], strips_right: bool) -> list[AddedToken]:
    return [
        AddedToken(
            i, text, is_control=kind in _CONTROL, strips_right=strips_right and text not in _KEEPING_SPACE
        )
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _CONTROL or kind is TokenType.USER_DEFINED
    ]


def _is_phi3(metadata: Mapping[str, object]) -> bool:
    """Whether control tokens take the white space after them, which no field of the format says.

    llama.cpp (src/llama-vocab.cpp) goes by the model's name. Not all files of Phi-3 have one that it knows.
    """
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name or metadata.get("general.architecture") == "phi3"


def _end_ids(
    tokens: Sequence[str], types: Sequence[TokenType], named: Iterable[int | None]
) -> tuple[int, ...]:
    controls = {text: i for i, text in enumerate(tokens) if types[i] is TokenType.CONTROL}
    texts = controls.keys() & (END_TEXTS | FILE_END_TEXTS)
    if ends_message_only(frozenset(texts)):
        texts -= {"<|end|>"}
    return tuple(sorted({i for i in named if i is not None} | {controls[text] for text in texts}))
