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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from engines.api import EngineError
from engines.cache_entries import (
    entry_folders,
    last_used,
    make_lock,
    making_entry,
    note_use,
    remove_entry,
    remove_unused,
    size_bytes,
    use_lock,
)
from engines.digests import FileDigests
from engines.filelock import FileLock
from engines.memory import GIB
from engines.plan_key import PlanKey, PlanTarget

_LOG = logging.getLogger(__name__)

PLANS_FOLDER = "plans"
"""Within the folder of the prepared models."""
PLAN_FILE = "engine.plan"
PLAN_MANIFEST_FILE = "plan.json"
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
                remove_entry(self.folder)
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
            use = FileLock(use_lock(entry))
            use.shared()
        except OSError as error:
            raise EngineError(f"the cache folder {self._folder} cannot be used: {error}") from error
        build_s: float | None = None
        try:
            if (fault := _fault(entry, key, digests)) is not None:
                with FileLock(make_lock(entry)) as make:
                    make.exclusive()
                    if _fault(entry, key, digests) is not None:  # nobody else built it meanwhile
                        self._say_why(key, entry, fault)
                        began = time.monotonic()
                        serialized = build()
                        build_s = time.monotonic() - began
                        _make_entry(entry, key, title, serialized, build_s)
                    make.discard()
            plan = Plan(entry, use, lambda reason: self._rejected.update({entry.name: reason}), build_s)
            note_use(entry)
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
        for folder in entry_folders(self._folder, PLAN_MANIFEST_FILE):
            try:
                manifest = _read_manifest(folder)
            except (OSError, ValueError):
                continue
            found.append(
                PlanEntry(
                    name=folder.name,
                    title=str(manifest["title"]),
                    key=manifest["key"],
                    size_bytes=size_bytes(folder),
                    last_used=last_used(folder),
                )
            )
        return sorted(found, key=lambda entry: -entry.last_used)

    def clear(self) -> int:
        """Remove every plan that no process uses, and the timing caches; the bytes freed."""
        freed = sum(remove_unused(folder) for folder in entry_folders(self._folder, PLAN_MANIFEST_FILE))
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
        total = size_bytes(self._cache)
        for entry in sorted(entry_folders(self._folder, PLAN_MANIFEST_FILE), key=last_used):
            try:
                model = str(_read_manifest(entry)["key"]["model"])
            except (OSError, ValueError):
                model = ""
            is_old = model != key.model and model.partition("-")[0] == source
            if entry != opened and (is_old or total > self._bound_bytes):
                freed = remove_unused(entry)
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
    """Write a plan and what it is."""
    with making_entry(entry) as draft:
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
