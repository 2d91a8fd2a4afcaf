"""Prompts of one's own, from a file."""

import json
from pathlib import Path
from typing import Any

from streamsrv.client import ChatMessages
from streamsrv.errors import SettingsError

_ROLES = ("system", "user", "assistant", "tool")
_FORMS = 'a string, {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def read_prompts(path: Path, name: str) -> tuple[str | ChatMessages, ...]:
    """Read a text file with one prompt a line, or, if it is called *.jsonl, one JSON value a line.

    `name` is the flag's, for messages.

    Raises:
        SettingsError: it cannot be read, or a line of JSON is no prompt, or there is no line with text.
    """
    try:
        # Not splitlines, to which a line may also end in the middle of a prompt, such as at U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise SettingsError(f"cannot read {name} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name} {path} is not UTF-8 text (at byte {error.start})") from None
    is_json = path.suffix == ".jsonl"
    prompts = tuple(
        _prompt(line, f"line {number} of {name} {path}") if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise SettingsError(f"{name} {path} has no line with text; give one prompt a line")
    return prompts


def _prompt(line: str, where: str) -> str | ChatMessages:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON ({error}); it must be {_FORMS}") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [_message(message, where) for message in value]
    raise SettingsError(f"{where} is no prompt; it must be {_FORMS}")


def _message(message: Any, where: str) -> tuple[str, str]:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if role not in _ROLES or not isinstance(content, str):
        raise SettingsError(
            f"{where} has a message that is none: it needs a role ({', '.join(_ROLES)}) and a text as content"
        )
    return role, content
