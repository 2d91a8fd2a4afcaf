"""What the process may use, read from made-up /proc and /sys trees, and the cache's share of it."""

import mmap
import os
import resource
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engines.api import OutOfMemoryError
from engines.cachesize import size_cache
from engines.checkpoint import open_checkpoint
from engines.linear_memory import size_rows
from engines.memory import GIB, available_bytes, drop_mapped_pages, usable_processors
from engines.options import EngineOptions
from engines.spec import ModelSpec
from tests import tiny
from tests.conftest import TinyPaths

UNLIMITED_V1 = "9223372036854771712\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 8 GiB free, in no cgroup."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {8 << 20} kB\n")
    write(tmp_path, "proc/self/status", "Name:\tpython\nVmSize:\t1048576 kB\nVmData:\t524288 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(root: Path, path: str, content: str | int) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n" if isinstance(content, int) else content)


def test_without_limits_it_is_what_the_host_has_left(root: Path) -> None:
    assert available_bytes(root) == 8 * GIB


def test_a_version_2_group_leaves_its_limit_less_its_use_but_for_the_page_cache(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    write(root, "sys/fs/cgroup/app/memory.max", 4 * GIB)
    write(root, "sys/fs/cgroup/app/memory.current", 3 * GIB)
    write(root, "sys/fs/cgroup/app/memory.stat", f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n")
    assert available_bytes(root) == 3 * GIB


def test_a_version_1_group_counts_likewise(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpuset:/\n4:memory:/docker/abc\n")
    folder = "sys/fs/cgroup/memory/docker/abc"
    write(root, f"{folder}/memory.limit_in_bytes", 2 * GIB)
    write(root, f"{folder}/memory.usage_in_bytes", GIB)
    write(root, f"{folder}/memory.stat", "total_inactive_file 1024\n")
    assert available_bytes(root) == GIB + 1024


def test_a_group_above_can_be_the_tighter_one(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/app\n")
    for folder, limit in (("pod", 2 * GIB), ("pod/app", 5 * GIB)):
        write(root, f"sys/fs/cgroup/{folder}/memory.max", limit)
        write(root, f"sys/fs/cgroup/{folder}/memory.current", GIB)
    assert available_bytes(root) == GIB


def test_a_containers_own_group_at_the_mount_counts_where_its_path_is_the_hosts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/system.slice/docker-abc.scope\n")
    write(root, "sys/fs/cgroup/memory.max", 3 * GIB)
    write(root, "sys/fs/cgroup/memory.current", GIB)
    assert available_bytes(root) == 2 * GIB


@pytest.mark.parametrize("path", ["/../..", "/../escaped"])
def test_a_group_outside_of_the_mount_is_not_followed(path: str, root: Path) -> None:
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(root, "sys/fs/cgroup/cgroup.procs", "1\n")
    write(root, "sys/fs/escaped/memory.max", 1)
    write(root, "sys/fs/escaped/memory.current", 0)
    assert available_bytes(root) == 8 * GIB


@pytest.mark.parametrize("limit", ["max\n", UNLIMITED_V1])
def test_a_group_without_a_limit_does_not_count(limit: str, root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\n")
    write(root, "sys/fs/cgroup/a/memory.max", limit)
    write(root, "sys/fs/cgroup/a/memory.current", GIB)
    write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", limit)
    write(root, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", GIB)
    assert available_bytes(root) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", GIB)
    write(root, "sys/fs/cgroup/memory.current", 2 * GIB)
    assert available_bytes(root) == 0


@pytest.mark.parametrize(("kind", "used"), [(resource.RLIMIT_AS, GIB), (resource.RLIMIT_DATA, GIB // 2)])
def test_the_processs_own_limit_counts(
    kind: int, used: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(
        "engines.memory.resource.getrlimit",
        lambda asked: (3 * GIB, 3 * GIB) if asked == kind else real(asked),
    )
    assert available_bytes(root) == 3 * GIB - used


def test_without_proc_there_is_nothing_known_and_one_processor(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
    assert 1 <= usable_processors(tmp_path) <= len(os.sched_getaffinity(0))


def test_on_this_machine_memory_and_processors_are_found() -> None:
    assert available_bytes() > 1 << 20
    assert usable_processors() >= 1


@pytest.fixture
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.memory.os.sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_processors")
class TestProcessors:
    def test_without_a_quota_it_is_the_affinity(self, root: Path) -> None:
        assert usable_processors(root) == 8

    @pytest.mark.parametrize(("quota", "expected"), [("200000", 2), ("150000", 2), ("50000", 1), ("max", 8)])
    def test_a_version_2_quota_is_rounded_up(self, quota: str, expected: int, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/app\n")
        write(root, "sys/fs/cgroup/app/cpu.max", f"{quota} 100000\n")
        assert usable_processors(root) == expected

    @pytest.mark.parametrize(("quota", "expected"), [(300_000, 3), (-1, 8), (0, 8)])
    def test_a_version_1_quota_counts_likewise(self, quota: int, expected: int, root: Path) -> None:
        write(root, "proc/self/cgroup", "3:cpu,cpuacct:/a\n")
        write(root, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", quota)
        write(root, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100_000)
        assert usable_processors(root) == expected

    def test_a_quota_above_the_affinity_changes_nothing(self, root: Path) -> None:
        write(root, "sys/fs/cgroup/cpu.max", "6400000 100000\n")
        assert usable_processors(root) == 8


@pytest.fixture
def spec(tiny_models: dict[str, TinyPaths]) -> ModelSpec:
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        return checkpoint.spec


def test_by_default_a_cache_holds_four_of_the_longest_sequences(spec: ModelSpec) -> None:
    long = replace(spec, context_length=100_001)
    cache = size_cache(long, EngineOptions(), 32, 1000, 100 * GIB)
    assert cache.num_blocks == -(-400_004 // 32)
    assert (cache.block_size, cache.bytes_per_block) == (32, 1000)


def test_a_shorter_context_asks_for_a_smaller_cache(spec: ModelSpec) -> None:
    long = replace(spec, context_length=100_000)
    cache = size_cache(long, EngineOptions(max_context=10_000), 32, 1000, 100 * GIB)
    assert cache.num_tokens == 40_000
    assert size_cache(long, EngineOptions(max_context=10**9), 32, 1000, 100 * GIB).num_tokens == 400_000


def test_by_default_a_short_context_still_leaves_room_for_many_sequences(spec: ModelSpec) -> None:
    assert size_cache(spec, EngineOptions(), 32, 1000, 100 * GIB).num_tokens == 32_768


def test_by_default_a_cache_takes_no_more_than_half_of_the_memory_left(spec: ModelSpec) -> None:
    assert size_cache(spec, EngineOptions(), 32, 1 << 20, 200 << 20).num_blocks == 100


def test_models_that_share_the_memory_take_no_more_than_their_shares(spec: ModelSpec) -> None:
    shared = EngineOptions(memory_share=0.25)
    assert size_cache(spec, shared, 32, 1 << 20, 200 << 20).num_blocks == 25
    assert size_rows(replace(shared, max_batch=64), 32, 1 << 20, 200 << 20).num_blocks == 24


def test_the_setting_decides_where_it_fits(spec: ModelSpec) -> None:
    assert size_cache(spec, EngineOptions(cache_gib=1.5), 32, 1 << 20, 2 * GIB).num_blocks == 1536


def test_a_setting_beyond_the_memory_left_is_refused_with_both_numbers(spec: ModelSpec) -> None:
    with pytest.raises(OutOfMemoryError, match=r"3 GiB was asked for, but only 2\.00 GiB"):
        size_cache(spec, EngineOptions(cache_gib=3), 32, 1 << 20, 2 * GIB)


def test_no_room_for_a_block_is_refused_with_the_arithmetic(spec: ModelSpec) -> None:
    with pytest.raises(OutOfMemoryError, match=r"0\.00 GiB .* 32 tokens take 1048576 bytes"):
        size_cache(spec, EngineOptions(), 32, 1 << 20, 1 << 20)


def test_the_pages_of_a_mapped_file_are_let_go_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    size = 32 << 20
    path.write_bytes(b"w" * size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[::4096].count(b"w") == size // 4096
        before = psutil.Process().memory_info().rss
        drop_mapped_pages(path)
        assert psutil.Process().memory_info().rss < before - size // 2
        assert mapped[::4096].count(b"w") == size // 4096


def test_a_file_mapped_for_writing_keeps_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 8192)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[5000] = ord("x")
        drop_mapped_pages(path)
        assert mapped[5000] == ord("x")
