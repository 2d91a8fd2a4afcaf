"""Where the golden tokens are, and what they are of."""

import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GOLDEN_TOKENS = Path(__file__).with_name("tokens.json.xz")
"""Made by make_tokens.py."""

NUM_TEXTS = 2000

CUTS = (
    *("default", "falcon", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o"),
    *("deepseek-v3", "deepseek-coder"),
)
"""One of each kind."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's ids. Nothing is added around it."""

    text: str
    plain: list[int]
    """What looks like a control token is text."""
    parsed: list[int]
    """It is that token."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The bytes of ids."""

    ids: list[int]
    whole: bytes
    """Control tokens have their text."""
    skipped: bytes | None
    """Control tokens are left out; None where it was not asked."""


@dataclass(frozen=True, slots=True)
class GoldenTokens:
    """One vocabulary, and what another program makes of it."""

    encoded: list[Encoded]
    decoded: list[Decoded]
    framed: list[int]
    """The ids of "Hello world" with what the model wants around a prompt."""
    end_ids: list[int]
    """Ids that end an output; empty where the program has no such list."""


@cache
def _document() -> dict[str, dict[str, object]]:
    with lzma.open(GOLDEN_TOKENS, "rt", encoding="utf-8") as file:
        document: dict[str, dict[str, object]] = json.load(file)
        return document


def golden_tokens(name: str) -> GoldenTokens:
    """Read one of the sets: smollm2, sentencepiece, sentencepiece_bare, hugging_face."""
    entry = json.loads(json.dumps(_document()[name]))
    return GoldenTokens(
        [Encoded(text, plain, parsed or plain) for text, plain, parsed in entry["encoded"]],
        [
            Decoded(ids, bytes.fromhex(whole), None if skipped is None else bytes.fromhex(skipped))
            for ids, whole, skipped in entry["decoded"]
        ],
        entry["framed"],
        entry["end_ids"],
    )


def pre_tokenized(pre: str) -> list[tuple[str, list[int]]]:
    """Read texts and their ids by the demo model's merges, cut into words as another model does."""
    return [
        (str(text), list(ids)) for text, ids in json.loads(json.dumps(_document()["pre_tokenizers"][pre]))
    ]


def sentencepiece_metadata() -> dict[str, object]:
    """Read the SentencePiece vocabulary, as a GGUF file has it."""
    return dict(_document()["sentencepiece_metadata"])


def hugging_face_files() -> dict[str, str]:
    """Read the same vocabulary as a Hugging Face folder has it: texts by file name."""
    return {name: str(text) for name, text in _document()["hugging_face_files"].items()}
