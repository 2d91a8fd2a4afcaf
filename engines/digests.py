"""SHA-256 of files, remembered, so that a start does not read gigabytes to learn what it knew."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

_SETTLED_S = 2.0
"""A file changed more recently than this could change again within its timestamp's resolution."""


class FileDigests:
    """Hashes files and remembers the result by path, size, modification time and inode."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sha256(self, path: Path) -> str:
        """Return a file's hex SHA-256, from memory where the file has not changed since.

        Raises:
            OSError: the file cannot be read.

        """
        path = path.resolve()
        stat = path.stat()
        identity = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev]
        note = self._folder / (hashlib.sha256(os.fsencode(path)).hexdigest()[:32] + ".json")
        try:
            known = json.loads(note.read_text())
            if known["file"] == identity:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never seen, or the note is damaged: hash
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if abs(time.time() - stat.st_mtime) > _SETTLED_S:
            self._remember(note, {"file": identity, "sha256": digest})
        return digest

    def _remember(self, note: Path, content: dict[str, object]) -> None:
        """Write a note at once or not at all; without it the next start hashes again."""
        draft = note.with_name(f"{note.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(content))
            draft.replace(note)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
