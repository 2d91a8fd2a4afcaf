"""Models made ready for an engine, kept on disk, so that only the first start pays for it.

A prepared model is a folder: the graph, its weights, the tokenizer and a manifest with each file's
size and SHA-256. Its name has two hashes: of what it was made from (the content of the model's files, the
weight format, the dialect) and of the code that prepares. It appears under that name by one rename,
complete.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import platformdirs

from engines.api import CheckpointError, EngineError
from engines.checkpoint import open_checkpoint
from engines.digests import FileDigests
from engines.filelock import FileLock
from engines.manifest import MANIFEST_FILE, TOKENIZER_FILE, FileRecord, Manifest
from engines.memory import GIB
from engines.options import WeightFormat
from engines.spec import ModelInfo

_LOG = logging.getLogger(__name__)

GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.weights"

_USED_FILE = "last_used"
"""Empty; its modification time orders the models by use."""
_DRAFT_PREFIX = "draft-"
_SOURCE_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
"""Files of a Hugging Face folder that can make a difference."""
_RUNTIME_MODULES = {
    "api.py",
    "cachesize.py",
    "demo_model.py",
    "memory.py",
    "ov.py",
    "registry.py",
    "scripted.py",
}
"""Modules that have no part in what is prepared."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PreparedEntry:
    """A prepared model on disk, for people."""

    key: str
    name: str
    path: str
    """The model that it was made from."""
    weights: WeightFormat
    dialect: str
    size_bytes: int
    last_used: float
    """Seconds since the epoch."""


class PreparedModel:
    """A prepared model in use: it is not removed before it is closed."""

    def __init__(self, folder: Path, model: ModelInfo, release: Callable[[], None]) -> None:
        self.folder = folder
        self.model = model
        self._release = release

    def close(self) -> None:
        """Let it be removed. Closing twice is allowed."""
        self._release()


class PreparedModels:
    """The folder of prepared models."""

    def __init__(self, folder: Path | None = None, bound_gib: float = 20.0) -> None:
        """Open the folder; nothing is read or written yet.

        Args:
            folder: where the models are; None is the user's cache folder, or a temporary folder with a
                warning where that cannot be written.
            bound_gib: size in GiB beyond which the least recently used models are removed.

        """
        self._chosen = folder is not None
        self._folder = folder or platformdirs.user_cache_path("streamsrv")
        self._bound_bytes = int(bound_gib * GIB)

    def open(
        self, path: Path, weights: WeightFormat, dialect: str, progress: Progress | None = None
    ) -> PreparedModel:
        """Take a model out of the folder, or prepare it into it.

        Args:
            path: the checkpoint.
            weights: how to hold the matrices.
            dialect: "paged".
            progress: called with a phase's name and the fraction done.

        Raises:
            CheckpointError: the path holds no supported model.
            EngineError: the model cannot be written.

        """
        report = progress or (lambda _phase, _done: None)
        folder, is_temporary = self._writable_folder()
        try:
            report("read", 0.0)
            key = _key(path, weights, dialect, FileDigests(folder / "digests"))
            report("read", 1.0)
            lock = FileLock(folder / f"{key}.lock")
            try:
                entry = folder / key
                manifest = self._load_or_prepare(entry, lock, path, weights, dialect, report)
                (entry / _USED_FILE).touch()
                self._evict(entry)
            except BaseException:
                lock.release()
                raise
        except BaseException:
            if is_temporary:
                shutil.rmtree(folder, ignore_errors=True)
            raise

        def release() -> None:
            lock.release()
            if is_temporary:
                shutil.rmtree(folder, ignore_errors=True)

        return PreparedModel(entry, replace(manifest.model, path=str(path)), release)

    @property
    def folder(self) -> Path:
        """Where the models are."""
        return self._folder

    def entries(self) -> list[PreparedEntry]:
        """List what is there, most recently used first."""
        found = []
        for folder in _entry_folders(self._folder):
            try:
                manifest = Manifest.read(folder)
            except (OSError, ValueError):
                continue
            model = manifest.model
            found.append(
                PreparedEntry(
                    key=folder.name,
                    name=model.name,
                    path=model.path,
                    weights=manifest.weights,
                    dialect=manifest.dialect,
                    size_bytes=_size_bytes(folder),
                    last_used=_last_used(folder),
                )
            )
        return sorted(found, key=lambda entry: -entry.last_used)

    def clear(self) -> int:
        """Remove every model that no process uses, and return the bytes freed."""
        freed = sum(_remove(folder) for folder in _entry_folders(self._folder))
        shutil.rmtree(self._folder / "digests", ignore_errors=True)
        return freed

    def _writable_folder(self) -> tuple[Path, bool]:
        """Make the folder; where the default one cannot be, a temporary one for as long as the model."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                return self._folder, False
        except OSError as error:
            if self._chosen:
                raise EngineError(
                    f"the cache folder {self._folder} cannot be written: {error.strerror or error}; "
                    "choose another one"
                ) from error
            temporary = Path(tempfile.mkdtemp(prefix="streamsrv-"))
            _LOG.warning(
                "the cache folder %s cannot be written (%s); preparing the model in %s for this run only",
                self._folder,
                error.strerror or error,
                temporary,
            )
            return temporary, True

    def _load_or_prepare(
        self,
        entry: Path,
        lock: FileLock,
        path: Path,
        weights: WeightFormat,
        dialect: str,
        report: Progress,
    ) -> Manifest:
        """Leave with the entry whole and the lock shared."""
        digests = FileDigests(entry.parent / "digests")
        while True:
            lock.shared()
            manifest = _verified(entry, digests)
            if manifest is not None:
                return manifest
            lock.release()
            lock.exclusive()
            # Whoever had the lock before may have prepared it meanwhile.
            if _verified(entry, digests) is None:
                _prepare(entry, path, weights, dialect, report)
            # Between the two locks another process may evict the model; then the loop prepares it again.

    def _evict(self, opened: Path) -> None:
        """Remove what is of no use any more and, beyond the bound, what was not used for longest.

        Of no use is what other code made of the model just opened. What is in use stays.
        """
        source = opened.name.partition("-")[0]
        total = 0
        for entry in sorted(_entry_folders(opened.parent), key=_last_used, reverse=True):
            total += (size := _size_bytes(entry))
            is_old = entry != opened and entry.name.startswith(f"{source}-")
            if (is_old or total > self._bound_bytes) and _remove(entry):
                total -= size
                _LOG.info("removed the prepared model %s", entry)


def _key(path: Path, weights: WeightFormat, dialect: str, digests: FileDigests) -> str:
    """Name what would be prepared from a path."""
    try:
        sources = [[file.name, digests.sha256(file)] for file in _source_files(path)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    name = path.resolve().name  # names a model that does not say its own
    parts = [name, sources, weights.value, dialect]
    return f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}-{_code_digest()[:8]}"


def _source_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in _SOURCE_SUFFIXES and p.is_file())
    if not path.is_file():
        with open_checkpoint(path):  # says in its own words what is wrong
            pass
    return [path]


@cache
def _code_digest() -> str:
    """Hash the modules that prepare: a change of theirs must not meet what the old ones wrote."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        if module.name not in _RUNTIME_MODULES:
            digest.update(module.read_bytes())
    return digest.hexdigest()


def _verified(entry: Path, digests: FileDigests) -> Manifest | None:
    """Read an entry's manifest, if every file is as it was written."""
    if not entry.is_dir():
        return None
    try:
        manifest = Manifest.read(entry)
        damaged = [
            name for name, record in manifest.files.items() if not _is_whole(entry / name, record, digests)
        ]
    except (OSError, ValueError) as error:
        _LOG.warning("the prepared model %s is damaged (%s); preparing it again", entry, error)
        return None
    if damaged:
        _LOG.warning("the prepared model %s has changed in %s; preparing it again", entry, ", ".join(damaged))
        return None
    return manifest


def _is_whole(file: Path, record: FileRecord, digests: FileDigests) -> bool:
    """Compare a file with its record; its content is read only if it is new or newer than last time."""
    return file.stat().st_size == record.size_bytes and digests.sha256(file) == record.sha256


def _prepare(entry: Path, path: Path, weights: WeightFormat, dialect: str, report: Progress) -> None:
    """Write an entry into a draft folder and rename it; the caller holds the lock alone."""
    for leftover in entry.parent.glob(f"{_DRAFT_PREFIX}{entry.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that died
    draft = Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{entry.name}-", dir=entry.parent))
    try:
        _write(draft, path, weights, dialect, report)
        if entry.exists():
            shutil.rmtree(entry)
        draft.rename(entry)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(entry.parent).free
            raise EngineError(
                f"no space left in {entry.parent} to prepare {path}: {_size_bytes(draft) / GIB:.2f} GiB were "
                f"written and {free / GIB:.2f} GiB are free; make room or choose another cache folder"
            ) from error
        raise EngineError(f"{path} could not be prepared in {entry.parent}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(draft: Path, path: Path, weights: WeightFormat, dialect: str, report: Progress) -> None:
    from engines.graph import PagedDialect, write_model

    if dialect != "paged":
        raise ValueError(f"unknown dialect {dialect!r}")
    with open_checkpoint(path) as checkpoint:
        model = checkpoint.info
        write_model(
            checkpoint.spec,
            checkpoint,
            draft / GRAPH_FILE,
            weights,
            PagedDialect(),
            lambda done: report("convert", done),
        )
    (draft / TOKENIZER_FILE).write_text(model.vocabulary.tokenizer_json, encoding="utf-8")
    files = {}
    for file in sorted(draft.iterdir()):
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        files[file.name] = FileRecord(file.stat().st_size, digest)
    Manifest(model, weights, dialect, files).write(draft)
    (draft / _USED_FILE).touch()


def _entry_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of prepared models, whole or not, without drafts."""
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if (
                entry.is_dir()
                and (entry / MANIFEST_FILE).exists()
                and not entry.name.startswith(_DRAFT_PREFIX)
            ):
                yield entry


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _last_used(folder: Path) -> float:
    try:
        return (folder / _USED_FILE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(entry: Path) -> int:
    """Remove an entry unless a process uses it; the bytes freed."""
    lock = FileLock(entry.parent / f"{entry.name}.lock")
    if not lock.exclusive(wait=False):
        return 0
    size = _size_bytes(entry)
    # Out of its name first: a half-removed entry must not look like one.
    grave = Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{entry.name}-", dir=entry.parent))
    os.rename(entry, grave)  # noqa: PTH104 - onto an empty folder
    shutil.rmtree(grave, ignore_errors=True)
    lock.discard()
    return size
