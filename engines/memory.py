"""What this process may use of the machine: memory and processors, its container's limits included."""

import contextlib
import ctypes
import math
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page in 63 bits."""


def usable_processors(root: Path = _ROOT) -> int:
    """Count the processors that this process may keep busy: its affinity, cut by its cgroups' quotas."""
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cgroups(root, "cpu") if (quota := _processor_quota(folder)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process can still take: the least that the host, its cgroups and rlimits leave."""
    rooms = [_kilobytes(root / "proc/meminfo", "MemAvailable")]
    rooms += [room for folder in _cgroups(root, "memory") if (room := _memory_room(folder)) is not None]
    for kind, taken in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            rooms.append(soft - _kilobytes(root / "proc/self/status", taken))
    return max(0, min(rooms))


def return_freed_memory() -> None:
    """Ask the C library's allocator to give freed pages back to the system, where it can."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def drop_mapped_pages(path: Path, root: Path = _ROOT) -> None:
    """Let go of the resident pages of a file that is mapped read-only; they come back when they are read."""
    name = str(path.resolve())
    with contextlib.suppress(OSError, AttributeError):  # a saving, not a need
        madvise = ctypes.CDLL(None).madvise
        for line in (root / "proc/self/maps").read_text().splitlines():
            span, rights, _offset, _device, _inode, *names = line.split(maxsplit=5)
            if names == [name] and "w" not in rights:
                begin, end = (int(address, 16) for address in span.split("-"))
                madvise(
                    ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED)
                )


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it, version 1 or 2.

    Inside a container the path in /proc is often the host's and not mounted; then only its ends that
    exist here, down to the mount itself, count.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base = mount
        elif controller in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        folder = base if ".." in path.split("/") else base / path.lstrip("/")  # ..: outside of our view
        while True:
            if folder.is_dir():
                yield folder
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _memory_room(folder: Path) -> int | None:
    """What a cgroup's limit leaves, with the page cache that it could drop; None where it has no limit."""
    for limit_name, usage_name, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        return limit - usage + int(_field(folder / "memory.stat", reclaimable) or 0)
    return None


def _processor_quota(folder: Path) -> float | None:
    """Processors' worth of time that a cgroup may use; None where it has no quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _number(path: Path) -> int | None:
    """Read a file that holds one number; None where it is missing or says something else."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _kilobytes(path: Path, name: str) -> int:
    """Read a size, in bytes, out of a file of lines such as `VmSize:   123 kB`."""
    return int(_field(path, f"{name}:") or 0) << 10


def _field(path: Path, name: str) -> str | None:
    """Read the second word of the line that begins with `name`; None where there is none."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return words[1]
    except OSError:
        pass
    return None
