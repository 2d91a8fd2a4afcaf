"""Make tokens.json.xz: what llama.cpp and Hugging Face make of two thousand texts.

Run from the repository's root, in an environment of its own; DEMO is the demo model's GGUF file:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install xllamacpp==2026.10.11549 gguf==0.19.0 \
        sentencepiece==0.2.3 transformers==5.24.0 protobuf
    /tmp/golden/bin/python -m tests.golden.make_tokens DEMO

Three vocabularies: the demo model's, by llama.cpp, also cut into words in the ways of other models; a small
SentencePiece one that is learned here from the texts, by llama.cpp, with and without a space before the
text, and with the tokens that Gemma and Phi-3 add to theirs; and the same as transformers converts it.
"""

import ctypes
import io
import json
import lzma
import random
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import xllamacpp.xllamacpp
from transformers import AutoTokenizer

from tests.golden.texts import make_texts
from tests.golden.tokens import CUTS, EXTENSIONS, GOLDEN_TOKENS, NUM_TEXTS, extended

_SEED = 20
_VOCAB_SIZE = 1000
_NUM_DECODED = 500


class _Params(ctypes.Structure):
    """llama_model_params of this release: only the first flag is set."""

    _fields_ = [
        ("head", ctypes.c_ubyte * 72),
        ("vocab_only", ctypes.c_bool),
        ("flags", ctypes.c_ubyte * 7),
    ]


class LlamaCpp:
    """llama.cpp's tokenizer, through the C functions that xllamacpp's extension module exports."""

    def __init__(self, path: Path) -> None:
        """Load a file's vocabulary."""
        self._lib = lib = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
        lib.llama_model_default_params.restype = _Params
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Params]
        lib.llama_model_load_from_file.restype = pointer
        lib.llama_model_get_vocab.argtypes = [pointer]
        lib.llama_model_get_vocab.restype = pointer
        lib.llama_vocab_n_tokens.argtypes = [pointer]
        lib.llama_vocab_is_eog.argtypes = [pointer, number]
        lib.llama_vocab_is_eog.restype = flag
        lib.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, number, pointer, number, flag, flag]
        lib.llama_detokenize.argtypes = [pointer, pointer, number, pointer, number, flag, flag]
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.num_tokens = lib.llama_vocab_n_tokens(self._vocab)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turn a text into ids."""
        data = text.encode()
        ids = (ctypes.c_int32 * (2 * len(data) + 16))()
        count = self._lib.llama_tokenize(
            self._vocab, data, len(data), ids, len(ids), add_special, parse_special
        )
        assert count >= 0
        return list(ids[:count])

    def decode(self, ids: list[int], *, unparse_special: bool) -> bytes:
        """Turn ids into bytes."""
        array = (ctypes.c_int32 * max(1, len(ids)))(*ids)
        buffer = ctypes.create_string_buffer(1 << 16)
        count = self._lib.llama_detokenize(
            self._vocab, array, len(ids), buffer, len(buffer), False, unparse_special
        )
        assert count >= 0
        return buffer.raw[:count]

    def end_ids(self) -> list[int]:
        """List the tokens that end generation."""
        return [i for i in range(self.num_tokens) if self._lib.llama_vocab_is_eog(self._vocab, i)]


def main() -> None:
    """Write the file beside this module."""
    texts = make_texts(NUM_TEXTS, _SEED)
    document: dict[str, Any] = {"smollm2": _by_llama_cpp(Path(sys.argv[1]), texts, special=range(17))}
    with tempfile.TemporaryDirectory() as root:
        model = _train(texts, Path(root))
        for name, prefix in (("sentencepiece", True), ("sentencepiece_bare", False)):
            file = Path(root) / f"{name}.gguf"
            metadata = _metadata(model, add_space_prefix=prefix)
            _write_gguf(metadata, file)
            document[name] = _by_llama_cpp(file, texts if prefix else texts[::4], special=range(3))
        for name in ("gemma", "phi3"):
            file = Path(root) / f"{name}.gguf"
            _write_gguf(extended(_metadata(model, add_space_prefix=False), name), file)
            document[name] = _by_llama_cpp(file, _texts_of(name, texts), special=range(3))
        document["pre_tokenizers"] = _by_pre_tokenizer(Path(sys.argv[1]), texts[::12], Path(root))
        document["sentencepiece_metadata"] = _metadata(model, add_space_prefix=True)
        document["hugging_face"], document["hugging_face_files"] = _by_transformers(model, texts[::2])
    with lzma.open(GOLDEN_TOKENS, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as out:
        json.dump(document, out, ensure_ascii=True, separators=(",", ":"))
    print(GOLDEN_TOKENS.stat().st_size, {name: len(json.dumps(entry)) for name, entry in document.items()})


def _texts_of(name: str, texts: list[str]) -> list[str]:
    """Every eighth text, and others with the tokens that the set has beyond the vocabulary."""
    rng = random.Random(_SEED)
    pieces = [text for text, _ in EXTENSIONS[name].tokens] + ["\n", " ", "\t", "a", "word", "\u2581", "</s>"]
    made = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 9))) for _ in range(200)]
    return texts[::8] + made


def _by_llama_cpp(path: Path, texts: list[str], special: range) -> dict[str, Any]:
    llama = LlamaCpp(path)
    encoded = []
    for text in texts:
        plain = llama.encode(text, add_special=False, parse_special=False)
        parsed = llama.encode(text, add_special=False, parse_special=True)
        encoded.append((text, plain, None if parsed == plain else parsed))
    decoded = []
    for ids in _id_sequences(llama.num_tokens, [plain for _, plain, _ in encoded], special):
        # After a control token llama.cpp takes no space away from what follows, Hugging Face does.
        skipped = None if ids[0] in special else llama.decode(ids, unparse_special=False).hex()
        decoded.append((ids, llama.decode(ids, unparse_special=True).hex(), skipped))
    framed = llama.encode("Hello world", add_special=True, parse_special=False)
    return {"encoded": encoded, "decoded": decoded, "framed": framed, "end_ids": llama.end_ids()}


def _by_pre_tokenizer(demo: Path, texts: list[str], folder: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(demo).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.ggml.")}
    encoded = {}
    for name in CUTS:
        path = folder / f"{name}.gguf"
        _write_gguf(metadata | {"tokenizer.ggml.pre": name}, path)
        llama = LlamaCpp(path)
        encoded[name] = [
            (text, llama.encode(text, add_special=False, parse_special=False))
            for text in texts
            if not _cut_otherwise(name, text)
        ]
    return encoded


def _cut_otherwise(pre: str, text: str) -> bool:
    """Whether llama.cpp is known to cut a text in another way than the model's own tokenizer.

    Its regular expressions know neither marks nor the case of letters beyond ASCII, and where they name
    ranges, no white space beyond ASCII.
    """
    foreign = [char for char in text if ord(char) > 127]
    if pre in ("tekken", "gpt-4o"):
        return any(unicodedata.category(char) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me") for char in foreign)
    return pre == "deepseek-coder" and any(char.isspace() for char in foreign)


def _id_sequences(num_tokens: int, encoded: list[list[int]], special: range) -> list[list[int]]:
    """Ids drawn at random, and ids of texts cut and joined within characters."""
    rng = random.Random(_SEED)
    broken = [ids for ids in encoded if len(ids) > 3]
    sequences = []
    for i in range(_NUM_DECODED):
        ids = [rng.randrange(num_tokens) for _ in range(rng.randint(1, 12))]
        if i % 2:
            pieces = [rng.choice(broken) for _ in range(3)]
            ids = [i for piece in pieces for i in piece[rng.randrange(len(piece)) :][:6]]
        if i % 5 == 0:
            ids.insert(rng.randrange(len(ids) + 1), rng.choice(special))
        sequences.append(ids)
    return sequences


def _train(texts: list[str], folder: Path) -> Path:
    lines = [line.replace("\x00", "") for text in texts for line in text.split("\n")]
    # Only letters of these blocks get tokens of their own; the rest falls back to bytes.
    kept = [
        "".join(char for char in line if ord(char) < 0x250 or 0x400 <= ord(char) < 0x430) for line in lines
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in kept if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=_VOCAB_SIZE,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def _metadata(model: Path, *, add_space_prefix: bool) -> dict[str, Any]:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(pieces.vocab_size())
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def _write_gguf(metadata: dict[str, Any], path: Path) -> None:
    """Write a file without tensors: llama.cpp reads a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _by_transformers(model: Path, texts: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    folder = model.parent / "hf"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder, legacy=False)
    encoded, decoded = [], []
    for text in texts:
        ids = {
            split: tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids
            for split in (True, False)
        }
        encoded.append((text, ids[True], None if ids[False] == ids[True] else ids[False]))
        whole, skipped = (
            tokenizer.decode(ids[False], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            for skip in (False, True)
        )
        decoded.append((ids[False], whole.encode().hex(), skipped.encode().hex()))
    files = {
        "tokenizer.json": tokenizer.backend_tokenizer.to_str(),
        **{name: (folder / name).read_text() for name in ("config.json", "tokenizer_config.json")},
    }
    framed = tokenizer("Hello world").input_ids
    return {"encoded": encoded, "decoded": decoded, "framed": framed, "end_ids": []}, files


if __name__ == "__main__":
    main()
