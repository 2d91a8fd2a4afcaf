"""The text of a Hugging Face `tokenizer.json`, built from the parts of a vocabulary."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engines.pretokenizer import PreTokenizer

Json = dict[str, object]


def _byte_chars() -> tuple[str, ...]:
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in shown else next(hidden)) for byte in range(256))


BYTE_CHARS = _byte_chars()
"""[256] The printable character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of a text before anything else is done to it."""

    token_id: int
    text: str
    is_control: bool
    """It is cut out only where control tokens are asked for."""
    strips_right: bool = False
    """It takes the white space after it with it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens that go around a plain prompt."""

    before: tuple[int, str] | None = None
    """Id and text of the token before it."""
    after: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """What byte-level and SentencePiece-style BPE have in common."""

    vocab: dict[str, int]
    merges: Sequence[tuple[str, str]]
    """Best first."""
    added: Sequence[AddedToken]
    frame: Frame = field(default=Frame())

    def byte_level(self, pre: PreTokenizer) -> str:
        """Write BPE over characters that stand for bytes."""
        missing = [char for char in BYTE_CHARS if char not in self.vocab]
        patterns = [*map(_split, pre.patterns), _byte_level_step()]
        if missing:
            # Such a byte is lost (SmolLM2 has no token for some control characters). The tokenizers library
            # would then merge what stands left and right of it, which llama.cpp does not.
            patterns.append(_split("[" + "".join(f"\\x{{{ord(char):x}}}" for char in missing) + "]"))
        return self._write(
            pre_tokenizer={"type": "Sequence", "pretokenizers": patterns},
            decoder=_byte_level_step(),
            model={"ignore_merges": pre.ignore_merges},
        )

    def sentencepiece(self, *, unknown: str | None, add_space_prefix: bool) -> str:
        """Write BPE over characters with "▁" for spaces, and byte tokens for characters without a token.

        `add_space_prefix` puts a space before each piece of text, and takes one away in decoding.
        """
        replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        restore: Json = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        normalizers: list[Json] = [replace]
        decoders: list[Json] = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if add_space_prefix:
            normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        has_bytes = all(f"<0x{byte:02X}>" in self.vocab for byte in range(256))
        return self._write(
            normalizer={"type": "Sequence", "normalizers": normalizers},
            decoder={"type": "Sequence", "decoders": decoders},
            model={"unk_token": unknown, "fuse_unk": True, "byte_fallback": has_bytes},
        )

    def _write(
        self,
        *,
        decoder: Json,
        model: Json,
        normalizer: Json | None = None,
        pre_tokenizer: Json | None = None,
    ) -> str:
        document: Json = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(token) for token in self.added],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self._post_processor(),
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                **model,
                "vocab": self.vocab,
                "merges": self.merges,
            },
        }
        return json.dumps(document, ensure_ascii=False)

    def _post_processor(self) -> Json | None:
        around = [token for token in (self.frame.before, self.frame.after) if token is not None]
        if not around:
            return None
        return {
            "type": "TemplateProcessing",
            "single": list(self._template("A", 0)),
            "pair": [*self._template("A", 0), *self._template("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [token_id], "tokens": [text]} for token_id, text in around
            },
        }

    def _template(self, name: str, type_id: int) -> Iterable[Json]:
        if self.frame.before is not None:
            yield {"SpecialToken": {"id": self.frame.before[1], "type_id": type_id}}
        yield {"Sequence": {"id": name, "type_id": type_id}}
        if self.frame.after is not None:
            yield {"SpecialToken": {"id": self.frame.after[1], "type_id": type_id}}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level_step() -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _added(token: AddedToken) -> Json:
    return {
        "id": token.token_id,
        "content": token.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": token.strips_right,
        "normalized": False,
        "special": token.is_control,
    }
