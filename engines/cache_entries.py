"""The folders that a cache on disk is made of, such as prepared models and plans.

Each appears under its name by one rename, complete, and is renamed away before it is removed. Who uses one
holds a lock beside it, shared; who removes one needs it alone.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.filelock import FileLock

_DRAFT_PREFIX = "draft-"
"""Begins the names of folders that are not, or no longer, an entry."""
_USED_FILE = "last_used"
"""Empty; its modification time orders the entries by use."""


@contextmanager
def making_entry(entry: Path) -> Iterator[Path]:
    """Give a folder to write an entry into, which takes its name at the end, in place of one that is there.

    The caller keeps others from making it at the same time. Of what fails nothing is left.

    Raises:
        OSError: the folder cannot be written.

    """
    for leftover in entry.parent.glob(f"{_DRAFT_PREFIX}{entry.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that died
    draft = _draft_folder(entry)
    try:
        yield draft
        if entry.exists():
            remove_entry(entry)
        draft.rename(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_entry(entry: Path) -> None:
    """Remove an entry, out of its name first: a half-removed one must not look whole."""
    grave = _draft_folder(entry)
    entry.replace(grave)  # onto an empty folder
    shutil.rmtree(grave, ignore_errors=True)


def remove_unused(entry: Path) -> int:
    """Remove an entry unless a process uses it; the bytes freed."""
    with FileLock(use_lock(entry)) as lock:
        if not lock.exclusive(wait=False) or not entry.exists():
            return 0
        size = size_bytes(entry)
        remove_entry(entry)
        lock.discard()
        return size


def entry_folders(folder: Path, manifest_file: str) -> Iterator[Path]:
    """Yield the entries of a folder, whole or not, that have a manifest; no drafts."""
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(_DRAFT_PREFIX) and (entry / manifest_file).exists():
                yield entry


def size_bytes(folder: Path) -> int:
    """Bytes of the files in a folder and the folders in it."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process removes it just now
                total += (Path(parent) / name).stat().st_size
    return total


def note_use(entry: Path) -> None:
    """Note that an entry is used now."""
    (entry / _USED_FILE).touch()


def last_used(entry: Path) -> float:
    """When an entry was last used, in seconds since the epoch; 0 if it never was, or is gone."""
    try:
        return (entry / _USED_FILE).stat().st_mtime
    except OSError:
        return 0.0


def use_lock(entry: Path) -> Path:
    """Held shared by who uses an entry, alone by who removes it."""
    return entry.with_name(f"{entry.name}.use")


def make_lock(entry: Path) -> Path:
    """Held by who makes an entry."""
    return entry.with_name(f"{entry.name}.make")


def _draft_folder(entry: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{entry.name}-", dir=entry.parent))
