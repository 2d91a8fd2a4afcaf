"""Small vocabularies for the tests: a byte-level one, and the golden SentencePiece one."""

from functools import cache
from pathlib import Path

from engines.checkpoint import open_checkpoint
from engines.spec import Vocabulary
from engines.vocabulary import vocabulary_from_gguf, vocabulary_from_hf
from streamsrv.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.golden.tokens import extended, hugging_face_files, sentencepiece_metadata


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of the tiny tokenizer, with changes by the part of a key after `tokenizer.ggml.`.

    A value of None takes the key away.
    """
    num_control = len(tiny_tokenizer.SPECIAL_TOKENS)
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": list(tiny_tokenizer.tokens()),
        "token_type": [3] * num_control + [1] * (tiny_tokenizer.VOCAB_SIZE - num_control),
        "merges": [f"{left} {right}" for left, right in tiny_tokenizer.merges()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def sentencepiece_changed(**changes: object) -> dict[str, object]:
    """Golden SentencePiece metadata with changes, as above."""
    values = sentencepiece_metadata() | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def hugging_face_folder(folder: Path, **changes: str | None) -> Path:
    """Write the golden vocabulary's Hugging Face files; changes are by file name with "_" for "."."""
    files = {name.replace(".", "_"): (name, text) for name, text in hugging_face_files().items()}
    for key, text in changes.items():
        name = files[key][0] if key in files else ".".join(key.rsplit("_", 1))
        files[key] = (name, text or "")
        if text is None:
            del files[key]
    for name, text in files.values():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@cache
def byte_level() -> Tokenizer:
    """The tiny tokenizer, with its chat template."""
    vocabulary = vocabulary_from_gguf(
        byte_level_metadata() | {"tokenizer.chat_template": tiny_tokenizer.CHAT_TEMPLATE}
    )
    return Tokenizer(vocabulary)


@cache
def sentencepiece(add_space_prefix: bool = True) -> Tokenizer:
    """The golden SentencePiece vocabulary."""
    return Tokenizer(vocabulary_from_gguf(sentencepiece_changed(add_space_prefix=add_space_prefix)))


@cache
def family(name: str) -> Tokenizer:
    """The golden SentencePiece vocabulary with what a family adds to it: "gemma" or "phi3"."""
    return Tokenizer(vocabulary_from_gguf(extended(sentencepiece_metadata(), name)))


@cache
def demo_vocabulary(path: Path) -> Vocabulary:
    """The demo model's."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.vocabulary


@cache
def demo(path: Path) -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer(demo_vocabulary(path))


def from_hugging_face(folder: Path) -> Tokenizer:
    """A folder's tokenizer."""
    return Tokenizer(vocabulary_from_hf(folder))
