"""A checkpoint's tokenizer, whatever its format, as the text of a Hugging Face `tokenizer.json`."""

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from engines.api import CheckpointError
from engines.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from engines.spec import Vocabulary

_PREFIX = "tokenizer.ggml."

# Texts that end an output wherever a vocabulary has them, as llama.cpp's end-of-generation list has them.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    }
)
# Texts between the files of a repository: a model that writes one has finished what it was asked for.
_FILE_END_TEXTS = frozenset(
    {
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)


class TokenType(IntEnum):
    """The kinds of token in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_chars() -> tuple[str, ...]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    chars = dict(zip(shown, map(chr, shown), strict=True))
    chars |= {b: chr(256 + i) for i, b in enumerate(hidden)}
    return tuple(chars[b] for b in range(256))


BYTE_CHARS = _byte_chars()
"""[256] The printable character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""

_SPECIAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """Turn a GGUF file's tokenizer metadata into a vocabulary that gives llama.cpp's ids.

    `metadata` has plain Python values under GGUF's own names. Byte-level BPE (`gpt2`) and
    SentencePiece-style BPE with byte fallback (`llama`) are understood.

    Raises:
        CheckpointError: the tokenizer is of another kind, or the metadata is incomplete or contradictory.

    """
    model = _text(metadata, "model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer model {model!r} is not supported: allowed are 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece-style BPE); convert the model with one of these"
        )
    tokens = _tokens(metadata)
    types = _types(metadata, tokens)
    is_spm = model == "llama"
    bos = _token_id(metadata, "bos_token_id", len(tokens), default=1 if is_spm else None)
    eos = _token_id(metadata, "eos_token_id", len(tokens), default=2 if is_spm else None)
    ends = {eos, *(_token_id(metadata, f"{name}_token_id", len(tokens)) for name in ("eot", "eom"))}
    end_ids = _end_ids(tokens, types, {i for i in ends if i is not None})
    if is_spm:
        unk = _token_id(metadata, "unknown_token_id", len(tokens), default=0)
        document = _sentencepiece(metadata, tokens, types, tokens[unk] if unk is not None else None)
        adds_bos = _flag(metadata, "add_bos_token", default=True)
    else:
        pre = _pre_tokenizer(metadata)
        document = _byte_level(metadata, tokens, pre)
        adds_bos = _flag(metadata, "add_bos_token", default=pre.adds_bos)
    adds_eos = _flag(metadata, "add_eos_token", default=False)
    for wanted, token_id, name in ((adds_bos, bos, "bos"), (adds_eos, eos, "eos")):
        if wanted and token_id is None:
            raise CheckpointError(
                f"a prompt must have the {name} token added, but {_PREFIX}{name}_token_id is missing"
            )
    document["added_tokens"] = _added_tokens(tokens, types)
    document["post_processor"] = _post_processor(
        tokens, bos if adds_bos else None, eos if adds_eos else None, byte_level=not is_spm
    )
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template must be a text, not {type(template).__name__}")
    return Vocabulary(
        tokenizer_json=json.dumps(document, ensure_ascii=False),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        eos_token_ids=end_ids,
        chat_template=template,
    )


def _value(metadata: Mapping[str, object], name: str) -> object:
    key = _PREFIX + name
    if key not in metadata:
        raise CheckpointError(f"the GGUF metadata has no {key}: the file holds no complete tokenizer")
    return metadata[key]


def _text(metadata: Mapping[str, object], name: str) -> str:
    value = _value(metadata, name)
    if not isinstance(value, str):
        raise CheckpointError(f"{_PREFIX}{name} must be a text, not {type(value).__name__}")
    return value


def _texts(metadata: Mapping[str, object], name: str) -> list[str]:
    value = _value(metadata, name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise CheckpointError(f"{_PREFIX}{name} must be a list of texts, not {type(value).__name__}")
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) != len(value):
        raise CheckpointError(f"{_PREFIX}{name} must hold texts only")
    return texts


def _flag(metadata: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{_PREFIX}{name} must be true or false, not {value!r}")
    return value


def _token_id(
    metadata: Mapping[str, object], name: str, num_tokens: int, default: int | None = None
) -> int | None:
    key = _PREFIX + name
    value = metadata.get(key)
    if value is None:
        return default if default is None or default < num_tokens else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be a whole number, not {value!r}")
    if not 0 <= value < num_tokens:
        raise CheckpointError(f"{key} is {value}, but the vocabulary has ids 0 to {num_tokens - 1}")
    return value


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _texts(metadata, "tokens")
    if not tokens:
        raise CheckpointError(f"{_PREFIX}tokens is empty")
    named = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    if len(set(named)) != len(named):
        first = {text: i for i, text in reversed(list(enumerate(named)))}
        twice = next(text for i, text in enumerate(named) if first[text] != i)
        raise CheckpointError(f"{_PREFIX}tokens holds {twice!r} twice")
    return named


def _numbers(metadata: Mapping[str, object], name: str, count: int) -> list[float] | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise CheckpointError(f"{_PREFIX}{name} must be a list of numbers, not {type(value).__name__}")
    if len(value) != count:
        raise CheckpointError(
            f"{_PREFIX}{name} has {len(value)} entries, but {_PREFIX}tokens has {count}: they must be as many"
        )
    numbers = [item for item in value if isinstance(item, int | float)]
    if len(numbers) != count:
        raise CheckpointError(f"{_PREFIX}{name} must hold numbers only")
    return numbers


def _types(metadata: Mapping[str, object], tokens: list[str]) -> list[TokenType]:
    numbers = _numbers(metadata, "token_type", len(tokens))
    if numbers is None:
        types = [TokenType.NORMAL] * len(tokens)
    else:
        known = {int(t): t for t in TokenType}
        types = [known.get(int(n), TokenType.UNDEFINED) for n in numbers]
    for i, text in enumerate(tokens):
        if text in _END_TEXTS or text in _FILE_END_TEXTS:
            types[i] = TokenType.CONTROL
    return types


def _end_ids(tokens: list[str], types: list[TokenType], ids: set[int]) -> tuple[int, ...]:
    named = {text: i for i, text in enumerate(tokens) if text in _END_TEXTS or text in _FILE_END_TEXTS}
    # In these two layouts "<|end|>" ends a message, with others to follow in the same answer.
    if "<|end|>" in named and (
        {"<|return|>", "<|call|>"} <= named.keys()
        or ("<|flush|>" in named and {"<|call|>", "<|calls|>"} & named.keys())
    ):
        types[named.pop("<|end|>")] = TokenType.USER_DEFINED
    if "<|tool_response>" in named and "</s>" in named:
        types[named.pop("</s>")] = TokenType.NORMAL
    return tuple(sorted(ids | set(named.values())))


def _added_tokens(tokens: list[str], types: list[TokenType]) -> list[dict[str, object]]:
    return [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in _SPECIAL,
        }
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _SPECIAL or kind is TokenType.USER_DEFINED
    ]


def _post_processor(
    tokens: list[str], bos: int | None, eos: int | None, *, byte_level: bool
) -> dict[str, object] | None:
    if bos is None and eos is None:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False} if byte_level else None

    def template(*sequences: str) -> list[dict[str, object]]:
        parts: list[dict[str, object]] = []
        for type_id, name in enumerate(sequences):
            for token_id, part in ((bos, None), (None, name), (eos, None)):
                if part is not None:
                    parts.append({"Sequence": {"id": part, "type_id": type_id}})
                elif token_id is not None:
                    parts.append({"SpecialToken": {"id": tokens[token_id], "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
            for i in (bos, eos)
            if i is not None
        },
    }


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = _text(metadata, "pre") if f"{_PREFIX}pre" in metadata else "default"
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"pre-tokenizer {name!r} ({_PREFIX}pre) is not supported; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _document(vocab: dict[str, int], merges: list[tuple[str, str]], **model: object) -> dict[str, object]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
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
            "vocab": vocab,
            "merges": merges,
        },
    }


def _byte_level(metadata: Mapping[str, object], tokens: list[str], pre: PreTokenizer) -> dict[str, object]:
    vocab = {text: i for i, text in enumerate(tokens)}
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(_texts(metadata, "merges")):
        # A token may begin with a space, so the separator is looked for after the first character.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                f"{_PREFIX}merges[{rank}] is {line!r}: it must be two tokens with a space between them, "
                f"and both and their joining must be in the vocabulary"
            )
        merges.setdefault((left, right))
    document = _document(vocab, list(merges), ignore_merges=pre.ignore_merges)
    splits: list[dict[str, object]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [*splits, byte_level, *_missing_bytes(vocab)],
    }
    document["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return document


def _missing_bytes(vocab: dict[str, int]) -> list[dict[str, object]]:
    """Keep a byte that has no token from joining its neighbours.

    Such a byte is lost (SmolLM2 has no token for some control characters). The tokenizers library would
    then merge what stands left and right of it, which llama.cpp does not.
    """
    missing = [char for char in BYTE_CHARS if char not in vocab]
    if not missing:
        return []
    pattern = "[" + "".join(f"\\x{{{ord(char):x}}}" for char in missing) + "]"
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], types: list[TokenType], unk_token: str | None
) -> dict[str, object]:
    scores = _numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError(
            f"the GGUF metadata has no {_PREFIX}scores, which a 'llama' tokenizer merges by"
        )
    vocab = {text: i for i, text in enumerate(tokens)}
    document = _document(
        vocab,
        _merges_by_score(tokens, types, scores),
        unk_token=unk_token,
        fuse_unk=True,
        byte_fallback=all(f"<0x{b:02X}>" in vocab for b in range(256)),
    )
    add_prefix = _flag(metadata, "add_space_prefix", default=True)
    prepend: list[dict[str, object]] = [{"type": "Prepend", "prepend": "▁"}] if add_prefix else []
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
    }
    strip: list[dict[str, object]] = (
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_prefix else []
    )
    document["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ],
    }
    return document


def _merges_by_score(
    tokens: list[str], types: list[TokenType], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best score of the joined one first.

    SentencePiece joins whichever neighbours give the best-scored token, leftmost first. As a list of merges
    that is every split of every token. Control, unknown and byte tokens never come out of text.
    """
    excluded = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE}
    known = {text: i for i, text in enumerate(tokens) if types[i] not in excluded}
    # Equal scores: the longer token first, then the longer left part, which is what going leftmost first
    # does to runs of one character.
    order = sorted(
        (i for i in known.values() if len(tokens[i]) > 1), key=lambda i: (-scores[i], -len(tokens[i]))
    )
    return [
        (tokens[i][:cut], tokens[i][cut:])
        for i in order
        for cut in range(len(tokens[i]) - 1, 0, -1)
        if tokens[i][:cut] in known and tokens[i][cut:] in known
    ]


def vocabulary_from_hf(folder: Path) -> Vocabulary:
    """Read a Hugging Face folder's tokenizer.json and the settings beside it.

    Raises:
        CheckpointError: a file is missing, is no JSON, or does not fit the others; the message names it.

    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save the tokenizer in that form beside the weights"
        )
    document = _json_object(path)
    settings = _json_object(folder / "tokenizer_config.json")
    ids = _hf_ids(path, document)
    special = {text: i for text, i in ids.items() if _is_special(document, text)}
    bos, eos = (_hf_token_text(folder, settings, name) for name in ("bos_token", "eos_token"))
    ends = {i for text, i in special.items() if text in _END_TEXTS}
    for file in ("generation_config.json", "config.json"):
        ends |= _hf_end_ids(folder / file)
    if eos is not None:
        if eos not in ids:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: eos_token {eos!r} is not in tokenizer.json"
            )
        ends.add(ids[eos])
    return Vocabulary(
        tokenizer_json=path.read_text(encoding="utf-8"),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=tuple(sorted(ends)),
        chat_template=_hf_template(folder, settings),
    )


def _json_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold one JSON object, not {type(value).__name__}")
    return value


def _hf_ids(path: Path, document: dict[str, object]) -> dict[str, int]:
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(vocab, dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(f"{path}: only BPE tokenizers are supported, this one is {kind!r}")
    ids = {str(text): i for text, i in vocab.items() if isinstance(i, int)}
    for token in _hf_added(document):
        content, token_id = token.get("content"), token.get("id")
        if not isinstance(content, str) or not isinstance(token_id, int):
            raise CheckpointError(f"{path}: an added token lacks its content or id: {token!r}")
        ids[content] = token_id
    return ids


def _hf_added(document: dict[str, object]) -> list[dict[str, object]]:
    added = document.get("added_tokens")
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []


def _is_special(document: dict[str, object], text: str) -> bool:
    return any(token.get("content") == text and token.get("special") is True for token in _hf_added(document))


def _hf_token_text(folder: Path, settings: dict[str, object], name: str) -> str | None:
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {name} must be a text, not {value!r}")


def _hf_end_ids(path: Path) -> set[int]:
    value = _json_object(path).get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = {i for i in values if isinstance(i, int)}
    if len(ids) != len(set(map(repr, values))):
        raise CheckpointError(f"{path}: eos_token_id must be an id or a list of ids, not {value!r}")
    return ids


def _hf_template(folder: Path, settings: dict[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text")
