"""The vocabulary in a Hugging Face folder."""

import json
from pathlib import Path

from engines.api import CheckpointError
from engines.control_texts import END_TEXTS, ends_message_only
from engines.spec import Vocabulary

_Json = dict[str, object]


def vocabulary_from_hf(folder: Path) -> Vocabulary:
    """Read a folder's tokenizer.json as it is, and the settings beside it.

    An output ends with the ids that generation_config.json and config.json name, with the tokenizer's
    end-of-sequence token, and with any control token that is well known to end a turn.

    Raises:
        CheckpointError: a file is missing, is no JSON, or does not fit the others; the message names it.

    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer beside its weights"
        )
    text = _read(path)
    document = _object(path, text)
    ids, control = _tokens(path, document)
    settings_path = folder / "tokenizer_config.json"
    settings = _optional(settings_path)
    bos, eos = (_token_text(settings_path, settings, name, ids) for name in ("bos_token", "eos_token"))
    endings = control & END_TEXTS
    if ends_message_only(endings):
        endings -= {"<|end|>"}
    ends = {ids[text] for text in endings}
    if eos is not None:
        ends.add(ids[eos])
    for name in ("generation_config.json", "config.json"):
        ends |= _end_ids(folder / name)
    return Vocabulary(
        tokenizer_json=text,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=tuple(sorted(ends)),
        chat_template=_chat_template(folder, settings_path, settings),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _object(path: Path, text: str) -> _Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _optional(path: Path) -> _Json:
    return _object(path, _read(path)) if path.is_file() else {}


def _tokens(path: Path, document: _Json) -> tuple[dict[str, int], frozenset[str]]:
    """Read the ids of all tokens by text, and the texts of the control tokens."""
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(f"{path}: the tokenizer's model is {kind!r}; only 'BPE' is supported")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(type(token_id) is int for token_id in vocab.values()):
        raise CheckpointError(f"{path}: model.vocab must give each token an id")
    ids: dict[str, int] = dict(vocab)
    control = set()
    added = document.get("added_tokens") or []
    for token in added if isinstance(added, list) else [added]:
        entry = token if isinstance(token, dict) else {}
        content, token_id = entry.get("content"), entry.get("id")
        if not isinstance(content, str) or not isinstance(token_id, int) or not content:
            raise CheckpointError(f"{path}: each of added_tokens must have a content and an id")
        ids[content] = token_id
        if entry.get("special") is True:
            control.add(content)
    return ids, frozenset(control)


def _token_text(path: Path, settings: _Json, name: str, ids: dict[str, int]) -> str | None:
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: {name} must be a text, not {type(value).__name__}")
    if value not in ids:
        raise CheckpointError(f"{path}: {name} is {value!r}, which is no token of tokenizer.json")
    return value


def _end_ids(path: Path) -> set[int]:
    value = _optional(path).get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in values):
        raise CheckpointError(f"{path}: eos_token_id must be an id or a list of ids, not {value!r}")
    return set(values)


def _chat_template(folder: Path, settings_path: Path, settings: _Json) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    value = settings.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"{settings_path}: chat_template must be a text, not {type(value).__name__}")
