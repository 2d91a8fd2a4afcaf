"""The plans on disk: what is reused, rebuilt, refused and removed."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.api import EngineError
from engines.plan_key import PlanKey, PlanShape, PlanTarget
from engines.plans import PLAN_FILE, PLAN_MANIFEST_FILE, Plans

SHAPE = PlanShape(max_batch=16, max_piece=128, max_len=256, max_logit_rows=16, decode_batches=(1, 8, 16))
L4 = PlanTarget((8, 9), "NVIDIA L4", 13000)
KEY = PlanKey("source-code", "linear-f16-f16-k256", "tensorrt", "11.4.0", L4, SHAPE, ("attention=mask",))
CONTENT = b"plan" * 5000


def content_of(plans: Plans, key: PlanKey, build: Callable[[], bytes] = lambda: CONTENT) -> bytes:
    plan = plans.open(key, build)
    try:
        return bytes(plan.data)
    finally:
        plan.close()


def refuse() -> bytes:
    raise AssertionError("it was built again")


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for file in folder.iterdir():
        os.utime(file, (then, then))


def test_profile_0_is_prefill_and_one_follows_for_each_range_of_decode_batches() -> None:
    prefill, alone, few, many = SHAPE.profiles
    assert (prefill.batch, prefill.tokens, prefill.logit_rows) == ((1, 1, 1), (1, 128, 128), (1, 1, 16))
    assert [profile.batch for profile in (alone, few, many)] == [(1, 1, 1), (2, 8, 8), (9, 16, 16)]
    assert {profile.tokens for profile in (alone, few, many)} == {(1, 1, 1)}
    assert [profile.logit_rows for profile in (alone, few, many)] == [(1, 1, 1), (1, 8, 8), (1, 16, 16)]


@pytest.mark.parametrize("batch", range(1, 17))
def test_every_decode_batch_has_a_profile_that_holds_it(batch: int) -> None:
    index = SHAPE.profile_of(batch, 1)
    assert index > 0
    assert SHAPE.profiles[index].holds(batch, 1, 1)
    assert SHAPE.profiles[index].holds(batch, 1, batch)


def test_a_run_of_several_tokens_takes_the_prefill_profile() -> None:
    assert SHAPE.profile_of(1, 2) == 0
    assert SHAPE.profiles[0].holds(1, 128, 16)
    assert not SHAPE.profiles[0].holds(1, 129, 1)
    assert not SHAPE.profiles[0].holds(2, 2, 1)


def test_a_second_opening_builds_nothing_and_maps_the_same_bytes(tmp_path: Path) -> None:
    first = Plans(tmp_path).open(KEY, lambda: CONTENT)
    assert first.build_s is not None
    first.close()
    second = Plans(tmp_path).open(KEY, refuse)
    assert bytes(second.data) == CONTENT
    assert second.build_s is None
    second.close()
    second.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, model="other-code"),
        replace(KEY, form="linear-int8-f16-k256"),
        replace(KEY, library="tensorrt_rtx"),
        replace(KEY, version="11.4.1"),
        replace(KEY, target=replace(L4, gpu="NVIDIA L40S")),
        replace(KEY, target=replace(L4, compute_capability=(9, 0))),
        replace(KEY, target=replace(L4, driver=13010)),
        replace(KEY, shape=replace(SHAPE, max_len=512)),
        replace(KEY, shape=replace(SHAPE, decode_batches=(8, 16))),
        replace(KEY, flags=("attention=lengths",)),
    ],
)
def test_every_part_of_the_key_makes_another_plan(tmp_path: Path, other: PlanKey) -> None:
    plans = Plans(tmp_path)
    content_of(plans, KEY)
    assert content_of(plans, other, lambda: b"another") == b"another"
    assert content_of(plans, KEY, refuse) == CONTENT


def test_the_manifest_says_in_full_what_the_plan_is_for(tmp_path: Path) -> None:
    plan = Plans(tmp_path).open(KEY, lambda: CONTENT, "a plan of a model")
    manifest = json.loads((plan.folder / PLAN_MANIFEST_FILE).read_text())
    plan.close()
    assert [entry.title for entry in Plans(tmp_path).entries()] == ["a plan of a model"]
    assert manifest["key"] == KEY.parts
    assert manifest["key"]["target"]["gpu"] == "NVIDIA L4"
    assert manifest["size_bytes"] == len(CONTENT)
    assert manifest["profiles"][1]["batch"] == [1, 1, 1]


def shorten(plan: Path) -> None:
    with (plan / PLAN_FILE).open("r+b") as file:
        file.truncate(100)


def change_a_byte(plan: Path) -> None:
    with (plan / PLAN_FILE).open("r+b") as file:
        file.seek(7000)
        file.write(b"!")


def lose_the_plan(plan: Path) -> None:
    (plan / PLAN_FILE).unlink()


def spoil_the_manifest(plan: Path) -> None:
    (plan / PLAN_MANIFEST_FILE).write_bytes(b"\xff{")


def swap_the_manifest(plan: Path) -> None:
    manifest = json.loads((plan / PLAN_MANIFEST_FILE).read_text())
    manifest["key"]["version"] = "10.0"
    (plan / PLAN_MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shorten, "has 100 bytes, not 20000"),
        (change_a_byte, "content of engine.plan has changed"),
        (lose_the_plan, "No such file"),
        (spoil_the_manifest, "decode"),
        (swap_the_manifest, "another plan's"),
    ],
)
def test_a_damaged_plan_is_built_again_with_a_line_that_says_why(
    tmp_path: Path, damage: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    plans = Plans(tmp_path)
    content_of(plans, KEY)
    damage(plans.folder / KEY.digest)
    assert content_of(plans, KEY) == CONTENT
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert words in warning
    assert content_of(plans, KEY, refuse) == CONTENT


def test_a_plan_that_the_runtime_refuses_is_built_again_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans = Plans(tmp_path)
    plan = plans.open(KEY, lambda: CONTENT)
    plan.reject("made by another version")
    assert bytes(plan.data) == CONTENT  # until it is closed
    plan.close()
    assert content_of(plans, KEY, lambda: b"anew") == b"anew"
    assert "refused by the runtime (made by another version)" in caplog.text


def test_rejecting_an_old_plan_leaves_the_one_that_was_built_meanwhile(tmp_path: Path) -> None:
    plans = Plans(tmp_path)
    old = plans.open(KEY, lambda: CONTENT)
    plans.open(KEY, refuse).reject("unfit")
    content_of(Plans(tmp_path), KEY, lambda: b"anew")
    old.reject("unfit")
    old.close()
    assert content_of(Plans(tmp_path), KEY, refuse) == b"anew"


def test_a_line_says_in_what_the_plan_that_is_kept_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plans = Plans(tmp_path)
    content_of(plans, KEY)
    content_of(plans, replace(KEY, version="11.5.0"))
    assert "differs in version (kept: 11.4.0, now: 11.5.0)" in caplog.text


def test_nothing_is_left_of_a_build_that_fails(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise EngineError("no kernel")

    plans = Plans(tmp_path)
    with pytest.raises(EngineError, match="no kernel"):
        plans.open(KEY, fail)
    assert plans.entries() == []
    assert content_of(plans, KEY) == CONTENT


def test_nothing_is_left_of_a_build_that_is_stopped(tmp_path: Path) -> None:
    def stop() -> bytes:
        raise KeyboardInterrupt

    plans = Plans(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        plans.open(KEY, stop)
    assert [path for path in plans.folder.iterdir() if path.is_dir()] == []


def test_a_full_disk_is_an_error_with_the_room_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    plans = Plans(tmp_path)
    with pytest.raises(EngineError, match=r"no space left in .*GiB are free; make room"):
        plans.open(KEY, lambda: CONTENT)
    monkeypatch.undo()
    assert [path for path in plans.folder.iterdir() if path.is_dir()] == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    with pytest.raises(EngineError, match="cannot be used"):
        Plans(tmp_path).open(KEY, lambda: CONTENT)


def test_what_a_dead_builder_left_is_removed(tmp_path: Path) -> None:
    plans = Plans(tmp_path)
    leftover = plans.folder / f"draft-{KEY.digest}-dead"
    leftover.mkdir(parents=True)
    content_of(plans, KEY)
    assert not leftover.exists()


def keys(number: int) -> list[PlanKey]:
    return [replace(KEY, shape=replace(SHAPE, max_len=256 * (n + 1))) for n in range(number)]


def test_beyond_the_bound_the_plan_not_used_for_longest_goes(tmp_path: Path) -> None:
    first, second, third = keys(3)
    big = bytes(1_000_000)
    plans = Plans(tmp_path, bound_gib=2_500_000 / 2**30)
    for number, key in enumerate((first, second)):
        content_of(plans, key, lambda: big)
        age(plans.folder / key.digest, 100.0 - number)
    content_of(plans, first, refuse)
    content_of(plans, third, lambda: big)
    assert {entry.name for entry in plans.entries()} == {first.digest, third.digest}


def test_prepared_models_count_towards_the_bound(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.weights").write_bytes(bytes(2_000_000))
    first, second = keys(2)
    plans = Plans(tmp_path, bound_gib=3_500_000 / 2**30)
    content_of(plans, first, lambda: bytes(1_000_000))
    content_of(plans, second, lambda: bytes(1_000_000))
    assert [entry.name for entry in plans.entries()] == [second.digest]
    assert model.exists()


def test_a_plan_in_use_is_not_removed(tmp_path: Path) -> None:
    first, second = keys(2)
    plans = Plans(tmp_path, bound_gib=0.0)
    used = plans.open(first, lambda: CONTENT)
    content_of(plans, second)
    assert plans.clear() > 0
    assert [entry.name for entry in plans.entries()] == [first.digest]
    assert bytes(used.data) == CONTENT
    used.close()
    plans.clear()
    assert plans.entries() == []


def test_plans_of_what_older_code_prepared_are_removed(tmp_path: Path) -> None:
    plans = Plans(tmp_path)
    content_of(plans, replace(KEY, model="source-older"))
    content_of(plans, replace(KEY, model="unrelated-older"))
    content_of(plans, KEY)
    assert {entry.key["model"] for entry in plans.entries()} == {"source-code", "unrelated-older"}


def test_a_timing_cache_is_kept_for_one_version_and_one_gpu(tmp_path: Path) -> None:
    plans = Plans(tmp_path)
    assert plans.timing_cache("tensorrt", "11.4.0", L4) == b""
    plans.keep_timing_cache("tensorrt", "11.4.0", L4, b"times")
    assert plans.timing_cache("tensorrt", "11.4.0", L4) == b"times"
    assert plans.timing_cache("tensorrt", "11.5.0", L4) == b""
    assert plans.timing_cache("tensorrt", "11.4.0", replace(L4, gpu="NVIDIA A2")) == b""
    plans.clear()
    assert plans.timing_cache("tensorrt", "11.4.0", L4) == b""


def _open_slowly(folder: Path, ready: Any, results: Any) -> None:
    def build() -> bytes:
        results.put("built")
        time.sleep(0.2)
        return CONTENT

    ready.wait()
    results.put(content_of(Plans(folder), KEY, build) == CONTENT)


def test_processes_that_need_the_same_plan_build_it_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_open_slowly, args=(tmp_path, ready, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join()
    assert sorted(answers, key=str) == [True, True, "built"]


def test_a_plan_survives_its_folder_while_it_is_mapped(tmp_path: Path) -> None:
    plan = Plans(tmp_path).open(KEY, lambda: CONTENT)
    shutil.rmtree(tmp_path)
    assert bytes(plan.data) == CONTENT
    plan.close()
