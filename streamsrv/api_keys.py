"""API keys: how they are made, kept and recognised."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from streamsrv.errors import SettingsError

_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def new_key() -> str:
    """Make a random key."""
    return secrets.token_urlsafe(_KEY_BYTES)


def key_line(name: str, key: str) -> str:
    """Make the line of the file that lets a key in, under a name.

    Raises:
        SettingsError: the name is not one.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{name!r} is no name for a key; {_NAME_RULE}")
    return f"{name} {_digest(key).hex()}"


_NAME_RULE = "it must have 1 to 64 letters, digits, '.', '_', '@' and '-', and begin with a letter or a digit"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, as the server knows it."""

    name: str
    """Who it belongs to; several keys may have one name."""
    digest: bytes
    """Of the key. A plain SHA-256: slow, salted hashes are for what people think up, and nobody finds 32
    random bytes by trying."""


class ApiKeys:
    """The keys that are let in."""

    def __init__(self, keys: Seq[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def name_of(self, key: str) -> str | None:
        """Tell whose key it is; None for a key that is not let in.

        Takes as long for every key: all are compared, each in constant time.
        """
        digest, name = _digest(key), None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                name = known.name
        return name


def parse_api_keys(content: bytes, path: Path) -> ApiKeys:
    """Read a file's keys: lines of NAME and the key's SHA-256 in hexadecimal, and comments after a '#'.

    A file without keys is valid, and lets nobody in.

    Raises:
        SettingsError: a line is not of that form, or a key is there twice; no line is quoted.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            # The line stays unsaid: it may be a key that was put in as it is.
            raise SettingsError(
                f"{path}, line {number}: it must be NAME SHA256, as 'streamsrv keys new NAME' prints it; "
                f"of the name, {_NAME_RULE}"
            )
        key = ApiKey(words[0], bytes.fromhex(words[1]))
        if key.digest in keys:
            raise SettingsError(f"{path}, line {number}: the key of {key.name} is there twice; keep one line")
        keys[key.digest] = key
    return ApiKeys(tuple(keys.values()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
