"""Plans that TensorRT built, kept on disk, so that only the first start pays for it.

A plan is a folder beside the prepared models: the plan itself and a manifest with its size, its SHA-256 and
every part of its key, for people, too. Its name is a hash of the key. It appears under that name by one
rename, complete, and is read by memory map.

When a plan is opened its size is compared with the manifest, and its SHA-256 if the file is new or its
time, size or place on disk has changed since it was last hashed. What does not match is built again.
"""

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from engines.api import EngineError
from engines.digests import FileDigests
from engines.filelock import FileLock
from engines.memory import GIB
from engines.plan_key import PlanKey, PlanTarget

_LOG = logging.getLogger(__name__)

PLANS_FOLDER = "plans"
"""Within the folder of the prepared models."""
PLAN_FILE = "engine.plan"
PLAN_MANIFEST_FILE = "plan.json"
_USED_FILE = "last_used"
"""Empty; its modification time orders the plans by use."""
_DRAFT_PREFIX = "draft-"
_DIGESTS_FOLDER = "digests"
_TIMING_FOLDER = "timing"

Serialized: TypeAlias = bytes | memoryview
"""A plan as the builder gives it."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan on disk, for people."""

    name: str
    title: str
    """What it is for, in a line."""
    key: dict[str, Any]
    size_bytes: int
    last_used: float
    """Seconds since the epoch."""


class Plan:
    """A verified plan in use: it is not removed before it is closed."""

    def __init__(
        self, folder: Path, lock: FileLock, forget: Callable[[str], None], build_s: float | None
    ) -> None:
        self.folder = folder
        """Where it is."""
        self.build_s = build_s
        """How long it took to build just now; None if it was there."""
        self._lock = lock
        self._forget = forget
        with (folder / PLAN_FILE).open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = memoryview(self._map)
        """The plan, mapped; not to be used after `close`."""

    def reject(self, reason: str) -> None:
        """Take the plan off the disk, because the runtime refused it; the next `Plans.open` builds anew.

        Others that have it open keep what they have.
        """
        with contextlib.suppress(OSError):
            # Another process may have built it anew already.
            if (self.folder / PLAN_FILE).stat().st_ino == self._inode:
                _remove(self.folder)
        self._forget(reason)

    def close(self) -> None:
        """Unmap it and let it be removed. Closing twice is allowed."""
        self.data.release()
        self._map.close()
        self._lock.release()


class Plans:
    """The folder of plans."""

    def __init__(self, cache_folder: Path, bound_gib: float = 20.0) -> None:
        """Open the folder; nothing is read or written yet.

        Args:
            cache_folder: the folder of prepared models, within which the plans' folder is.
            bound_gib: size in GiB of both together beyond which the least recently used plans are removed.

        """
        self._cache = cache_folder
        self._folder = cache_folder / PLANS_FOLDER
        self._bound_bytes = int(bound_gib * GIB)
        self._rejected: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """Where the plans are."""
        return self._folder

    def open(self, key: PlanKey, build: Callable[[], Serialized], title: str = "") -> Plan:
        """Take a plan out of the folder, or build it into it.

        Args:
            key: what it depends on.
            build: builds it; called at most once, while no other process builds the same one.
            title: what it is for, in a line for people.

        Raises:
            EngineError: the folder cannot be used, or has no room; or what `build` raises.

        """
        entry = self._folder / key.digest
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            digests = FileDigests(self._folder / _DIGESTS_FOLDER)
            use = FileLock(_use_lock(entry))
            use.shared()
        except OSError as error:
            raise EngineError(f"the cache folder {self._folder} cannot be used: {error}") from error
        build_s: float | None = None
        try:
            if (fault := _fault(entry, key, digests)) is not None:
                with FileLock(entry.with_name(f"{entry.name}.make")) as make:
                    make.exclusive()
                    if _fault(entry, key, digests) is not None:  # nobody else built it meanwhile
                        self._say_why(key, entry, fault)
                        began = time.monotonic()
                        serialized = build()
                        build_s = time.monotonic() - began
                        _make_entry(entry, key, title, serialized, build_s)
                    make.discard()
            plan = Plan(entry, use, lambda reason: self._rejected.update({entry.name: reason}), build_s)
            (entry / _USED_FILE).touch()
            self._evict(entry, key)
        except OSError as error:
            use.release()
            raise _unusable(self._folder, error) from error
        except BaseException:
            use.release()
            raise
        return plan

    def entries(self) -> list[PlanEntry]:
        """List what is there, most recently used first."""
        found = []
        for folder in _entries(self._folder):
            try:
                manifest = _read_manifest(folder)
            except (OSError, ValueError):
                continue
            found.append(
                PlanEntry(
                    name=folder.name,
                    title=str(manifest["title"]),
                    key=manifest["key"],
                    size_bytes=_size_bytes(folder),
                    last_used=_last_used(folder),
                )
            )
        return sorted(found, key=lambda entry: -entry.last_used)

    def clear(self) -> int:
        """Remove every plan that no process uses, and the timing caches; the bytes freed."""
        freed = sum(_remove_unused(folder) for folder in _entries(self._folder))
        for name in (_TIMING_FOLDER, _DIGESTS_FOLDER):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        return freed

    def timing_cache(self, library: str, version: str, target: PlanTarget) -> bytes:
        """Return what earlier builds measured of kernels on a GPU, for the builder; b"" if nothing."""
        try:
            return self._timing_file(library, version, target).read_bytes()
        except OSError:
            return b""

    def keep_timing_cache(self, library: str, version: str, target: PlanTarget, content: Serialized) -> None:
        """Keep what a build measured; without it the next one measures again."""
        file = self._timing_file(library, version, target)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            _write_at_once(file, content)

    def _timing_file(self, library: str, version: str, target: PlanTarget) -> Path:
        gpu = "".join(letter if letter.isalnum() else "-" for letter in target.gpu or "any")
        return self._folder / _TIMING_FOLDER / f"{library}-{version}-{gpu}-sm{target.sm}.cache"

    def _say_why(self, key: PlanKey, entry: Path, fault: str) -> None:
        rejected = self._rejected.pop(entry.name, None)
        if rejected is not None:
            _LOG.warning("the plan was refused by the runtime (%s); building it again", rejected)
        elif fault:
            _LOG.warning("the plan %s is damaged (%s); building it again", entry, fault)
        elif (differences := self._nearest(key)) is not None:
            _LOG.info("building a plan for %s: the one kept differs in %s", key.target.label, differences)
        else:
            _LOG.info("building a plan for %s: none is kept yet", key.target.label)

    def _nearest(self, key: PlanKey) -> str | None:
        """Say in what the most alike plan of the same model differs; None if there is none."""
        parts, best = _flat(key.parts), None
        source = key.model.partition("-")[0]
        for plan in self.entries():
            kept = _flat(plan.key)
            if str(kept.get("model", "")).partition("-")[0] != source:
                continue
            different = [
                f"{name} (kept: {kept.get(name)}, now: {value})"
                for name, value in parts.items()
                if kept.get(name) != value
            ]
            if best is None or len(different) < len(best):
                best = different
        return None if best is None else ", ".join(best)

    def _evict(self, opened: Path, key: PlanKey) -> None:
        """Remove what is of no use any more and, beyond the bound, what was not used for longest.

        Of no use are plans of the same model as other code prepared it. What is in use stays.
        """
        source = key.model.partition("-")[0]
        total = _size_bytes(self._cache)
        for entry in sorted(_entries(self._folder), key=_last_used):
            try:
                model = str(_read_manifest(entry)["key"]["model"])
            except (OSError, ValueError):
                model = ""
            is_old = model != key.model and model.partition("-")[0] == source
            if entry != opened and (is_old or total > self._bound_bytes):
                freed = _remove_unused(entry)
                total -= freed
                if freed:
                    _LOG.info("removed the plan %s", entry)


def _flat(parts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in parts.items():
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _fault(entry: Path, key: PlanKey, digests: FileDigests) -> str | None:
    """Say what is wrong with an entry: None if nothing, "" if there is none."""
    if not entry.is_dir():
        return ""
    try:
        manifest = _read_manifest(entry)
        if manifest["key"] != key.parts:
            return "its manifest is another plan's"
        size, expected = (entry / PLAN_FILE).stat().st_size, manifest["size_bytes"]
        if size != expected:
            return f"{PLAN_FILE} has {size} bytes, not {expected}"
        if digests.sha256(entry / PLAN_FILE) != manifest["sha256"]:
            return f"the content of {PLAN_FILE} has changed"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _read_manifest(entry: Path) -> dict[str, Any]:
    content = json.loads((entry / PLAN_MANIFEST_FILE).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"title", "key", "size_bytes", "sha256"} <= content.keys():
        raise ValueError(f"{PLAN_MANIFEST_FILE} is no manifest of a plan")
    return content


def _make_entry(entry: Path, key: PlanKey, title: str, serialized: Serialized, build_s: float) -> None:
    """Write a plan into a draft folder and give it its name, in place of one that may be there."""
    for leftover in entry.parent.glob(f"{_DRAFT_PREFIX}{entry.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that died
    draft = Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{entry.name}-", dir=entry.parent))
    try:
        with (draft / PLAN_FILE).open("wb") as file:
            file.write(serialized)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "title": title,
            "size_bytes": len(serialized),
            "sha256": hashlib.sha256(serialized).hexdigest(),
            "key": key.parts,
            "profiles": [asdict(profile) for profile in key.shape.profiles],
            "built": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "build_s": round(build_s, 1),
        }
        (draft / PLAN_MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if entry.exists():
            _remove(entry)
        draft.rename(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_at_once(file: Path, content: Serialized) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _unusable(folder: Path, error: OSError) -> EngineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return EngineError(
            f"no space left in {folder} for the plan: {free / GIB:.2f} GiB are free; make room, or choose "
            "another cache folder"
        )
    return EngineError(f"the cache folder {folder} cannot be used: {error}")


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(_DRAFT_PREFIX) and (entry / PLAN_MANIFEST_FILE).exists():
                yield entry


def _size_bytes(folder: Path) -> int:
    """Bytes of the files in a folder and the folders in it."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process removes it just now
                total += (Path(parent) / name).stat().st_size
    return total


def _last_used(entry: Path) -> float:
    try:
        return (entry / _USED_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _use_lock(entry: Path) -> Path:
    """Held shared by who uses an entry, alone by who removes it."""
    return entry.with_name(f"{entry.name}.use")


def _remove(entry: Path) -> None:
    """Remove an entry, out of its name first: a half-removed one must not look whole."""
    grave = Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{entry.name}-", dir=entry.parent))
    entry.replace(grave)  # onto an empty folder
    shutil.rmtree(grave, ignore_errors=True)


def _remove_unused(entry: Path) -> int:
    """Remove an entry unless a process uses it; the bytes freed."""
    with FileLock(_use_lock(entry)) as lock:
        if not lock.exclusive(wait=False) or not entry.exists():
            return 0
        size = _size_bytes(entry)
        _remove(entry)
        lock.discard()
        return size
