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
class Extension:
    """What a family adds to a SentencePiece vocabulary."""

    tokens: tuple[tuple[str, int], ...]
    """Texts and types: 3 is a control token, 4 one that is always cut out of the text."""
    fields: dict[str, object]
    """Metadata."""


EXTENSIONS = {
    "gemma": Extension(
        (
            ("<start_of_turn>", 3),
            ("<end_of_turn>", 3),
            ("[multimodal]", 4),
            *(("\n" * count, 4) for count in range(1, 6)),
            *((" " * count, 4) for count in range(2, 8)),
            ("<table>", 4),
        ),
        {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True},
    ),
    "phi3": Extension(
        (("<|endoftext|>", 3), ("<|assistant|>", 3), ("<|end|>", 3), ("<|user|>", 3), ("<|tag|>", 4)),
        {"tokenizer.ggml.add_space_prefix": True, "general.name": "Tiny Phi-3"},
    ),
}
"""By the sets' names."""


def extended(metadata: dict[str, object], name: str) -> dict[str, object]:
    """Add to the SentencePiece vocabulary what a set has beyond it."""
    extension = EXTENSIONS[name]
    lists = {
        "tokens": [text for text, _ in extension.tokens],
        "scores": [-1000.0] * len(extension.tokens),
        "token_type": [kind for _, kind in extension.tokens],
    }
    longer = {
        f"tokenizer.ggml.{key}": [*metadata[f"tokenizer.ggml.{key}"], *added]  # type: ignore[misc]
        for key, added in lists.items()
    }
    return metadata | longer | extension.fields


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
    """Read one of the sets: smollm2, sentencepiece, sentencepiece_bare, gemma, phi3, hugging_face."""
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
