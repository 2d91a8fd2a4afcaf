"""Models made ready for an engine, kept on disk, so that only the first start pays for it.

A prepared model is a folder: the graph, its weights, the tokenizer and a manifest with each file's
size and SHA-256. Its name has two hashes: of what it was made from (the content of the model's files, the
form of the graph) and of the code that prepares. It appears under that name by one rename,
complete.

When a model is opened, each file's size is compared with the manifest, and its SHA-256 if the file is
new or its time, size or place on disk has changed since it was last hashed; so is what it was made from.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import platformdirs

from engines.api import CheckpointError, EngineError
from engines.cache_entries import (
    entry_folders,
    last_used,
    make_lock,
    note_use,
    remove_unused,
    size_bytes,
    use_lock,
)
from engines.checkpoint import open_checkpoint
from engines.digests import FileDigests
from engines.filelock import FileLock
from engines.form import GraphForm
from engines.manifest import MANIFEST_FILE, FileRecord, Manifest
from engines.memory import GIB
from engines.preparation import Progress, make_entry
from engines.spec import ModelInfo

_LOG = logging.getLogger(__name__)

_DIGESTS_FOLDER = "digests"
_SOURCE_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
"""Files of a Hugging Face folder that can make a difference."""
_RUNTIME_MODULES = {
    "api",
    "cachesize",
    "demo_model",
    "digests",
    "filelock",
    "linear",
    "linear_memory",
    "memory",
    "ov",
    "ov_graph",
    "prepared",
    "registry",
    "scripted",
    "signal_stack",
}
_RUNTIME_PREFIXES = ("cuda", "ort", "plan", "trt")
"""Modules that have no part in what is prepared, by their names and by what their names begin with."""


@dataclass(frozen=True, slots=True)
class PreparedEntry:
    """A prepared model on disk, for people."""

    key: str
    name: str
    path: str
    """The model that it was made from."""
    form: GraphForm
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

    @property
    def folder(self) -> Path:
        """Where the models are."""
        return self._folder

    def open(self, path: Path, form: GraphForm, progress: Progress | None = None) -> PreparedModel:
        """Take a model out of the folder, or prepare it into it.

        Args:
            path: the checkpoint.
            form: what the graph is to be like.
            progress: called with a phase's name and the fraction done.

        Raises:
            CheckpointError: the path holds no supported model.
            EngineError: the model has no graph of that form, or the folder cannot be used or has no room.

        """
        report = progress or (lambda _phase, _done: None)
        folder, is_temporary = self._writable_folder()
        use: FileLock | None = None

        def release() -> None:
            if use is not None:
                use.release()
            if is_temporary:
                shutil.rmtree(folder, ignore_errors=True)

        try:
            report("read", 0.0)
            digests = FileDigests(folder / _DIGESTS_FOLDER)
            entry = folder / _key(path, form, digests)
            report("read", 1.0)
            use = FileLock(use_lock(entry))
            use.shared()
            manifest = _verified(entry, digests)
            if manifest is None:
                # Others may be using a damaged model: what is made takes its name, not its place on disk.
                with FileLock(make_lock(entry)) as make:
                    make.exclusive()
                    if _verified(entry, digests, warn=False) is None:  # nobody else made it meanwhile
                        make_entry(entry, path, form, report)
                    make.discard()
                manifest = Manifest.read(entry)
            note_use(entry)
            self._evict(entry)
        except (OSError, ValueError) as error:
            release()
            raise EngineError(f"the cache folder {folder} cannot be used: {error}") from error
        except BaseException:
            release()
            raise
        return PreparedModel(entry, replace(manifest.model, path=str(path)), release)

    def entries(self) -> list[PreparedEntry]:
        """List what is there, most recently used first."""
        found = []
        for folder in entry_folders(self._folder, MANIFEST_FILE):
            try:
                manifest = Manifest.read(folder)
            except (OSError, ValueError):
                continue
            found.append(
                PreparedEntry(
                    key=folder.name,
                    name=manifest.model.name,
                    path=manifest.model.path,
                    form=manifest.form,
                    size_bytes=size_bytes(folder),
                    last_used=last_used(folder),
                )
            )
        return sorted(found, key=lambda entry: -entry.last_used)

    def clear(self) -> int:
        """Remove every model that no process uses, and return the bytes freed."""
        freed = sum(remove_unused(folder) for folder in entry_folders(self._folder, MANIFEST_FILE))
        shutil.rmtree(self._folder / _DIGESTS_FOLDER, ignore_errors=True)
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

    def _evict(self, opened: Path) -> None:
        """Remove what is of no use any more and, beyond the bound, what was not used for longest.

        Of no use is what other code made of the model just opened. What is in use stays.
        """
        source = opened.name.partition("-")[0]
        total = 0
        for entry in sorted(entry_folders(opened.parent, MANIFEST_FILE), key=last_used, reverse=True):
            total += (size := size_bytes(entry))
            is_old = entry != opened and entry.name.startswith(f"{source}-")
            if (is_old or total > self._bound_bytes) and remove_unused(entry):
                total -= size
                _LOG.info("removed the prepared model %s", entry)


def _key(path: Path, form: GraphForm, digests: FileDigests) -> str:
    """Name what would be prepared from a path."""
    try:
        sources = [[file.name, digests.sha256(file)] for file in _source_files(path)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    name = path.resolve().name  # names a model that does not say its own
    parts = [name, sources, form.label]
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
        if module.stem not in _RUNTIME_MODULES and not module.stem.startswith(_RUNTIME_PREFIXES):
            digest.update(module.read_bytes())
    return digest.hexdigest()


def _verified(entry: Path, digests: FileDigests, *, warn: bool = True) -> Manifest | None:
    """Read an entry's manifest, if every file is as it was written."""
    if not entry.is_dir():
        return None
    try:
        manifest = Manifest.read(entry)
        damaged = [
            name for name, record in manifest.files.items() if not _is_whole(entry / name, record, digests)
        ]
        fault = f"changed in {', '.join(damaged)}" if damaged else None
    except (OSError, ValueError) as error:
        fault = str(error)
    if fault is None:
        return manifest
    if warn:
        _LOG.warning("the prepared model %s is damaged (%s); preparing it again", entry, fault)
    return None


def _is_whole(file: Path, record: FileRecord, digests: FileDigests) -> bool:
    return file.stat().st_size == record.size_bytes and digests.sha256(file) == record.sha256
