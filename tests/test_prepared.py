"""The cache of prepared models: what is reused, rebuilt, removed and refused."""

import errno
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.api import CheckpointError, EngineError
from engines.digests import FileDigests
from engines.filelock import FileLock
from engines.form import Dialect, GraphForm
from engines.manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest
from engines.options import Precision, WeightFormat
from engines.preparation import GRAPH_FILE
from engines.prepared import PreparedModels
from engines.weightfile import WeightFile
from tests import tiny
from tests.conftest import TinyPaths

INT8 = GraphForm(Dialect.PAGED, WeightFormat.INT8)
BF16 = GraphForm(Dialect.PAGED, WeightFormat.BF16)
WEIGHTS_FILE = "model.weights"


@pytest.fixture
def gguf(tiny_models: dict[str, TinyPaths], tmp_path: Path) -> Path:
    """A model file that the test may change, old enough for its hash to be remembered."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_models[tiny.LLAMA_TIED.name].gguf, path)
    age(path)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every folder that is prepared."""
    from engines import preparation, prepared

    folders: list[Path] = []

    def note(entry: Path, *args: Any) -> None:
        folders.append(entry)
        preparation.make_entry(entry, *args)

    monkeypatch.setattr(prepared, "make_entry", note)
    return folders


def age(path: Path, seconds: float = 100.0) -> None:
    """Date a file back, as a copied file of the same content would not be."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def prepare(cache: Path, path: Path, form: GraphForm = INT8, bound_gib: float = 1.0) -> Path:
    """Open a model and close it; its folder."""
    model = PreparedModels(cache, bound_gib).open(path, form)
    model.close()
    return model.folder


def test_a_second_opening_reads_no_checkpoint(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PreparedModels(cache).open(gguf, INT8)
    first.close()

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("engines.preparation.open_checkpoint", refuse)
    monkeypatch.setattr("engines.prepared.open_checkpoint", refuse)
    second = PreparedModels(cache).open(gguf, INT8)
    second.close()
    assert second.model == first.model
    assert second.folder == first.folder


def test_the_manifest_keeps_everything_about_each_family(
    tiny_models: dict[str, TinyPaths], cache: Path
) -> None:
    from engines.checkpoint import open_checkpoint

    for paths in tiny_models.values():
        for path in (paths.folder, paths.gguf):
            with open_checkpoint(path) as checkpoint:
                expected = checkpoint.info
            folder = prepare(cache, path)
            assert PreparedModels(cache).open(path, INT8).model == expected
            assert Manifest.read(folder).model == expected


def test_the_files_are_complete(gguf: Path, cache: Path) -> None:
    folder = prepare(cache, gguf)
    names = {file.name for file in folder.iterdir()}
    assert names == {GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE, MANIFEST_FILE, "last_used"}
    assert set(Manifest.read(folder).files) == {GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE}


def test_another_content_or_weight_format_is_another_entry(
    gguf: Path, cache: Path, made: list[Path], tiny_models: dict[str, TinyPaths]
) -> None:
    first = prepare(cache, gguf)
    assert prepare(cache, gguf, BF16) != first
    shutil.copyfile(tiny_models[tiny.QWEN2.name].gguf, gguf)
    assert prepare(cache, gguf) != first
    assert len(made) == 3


def test_every_part_of_the_form_counts_and_is_written_down(gguf: Path, cache: Path) -> None:
    linear = GraphForm(Dialect.LINEAR, WeightFormat.INT8)
    forms = [
        INT8,
        linear,
        replace(linear, weights=WeightFormat.INT4),
        replace(linear, activations=Precision.F16),
        replace(linear, num_candidates=5),
        replace(linear, num_candidates=6),
    ]
    folders = [prepare(cache, gguf, form) for form in forms]
    assert len(set(folders)) == len(forms)
    assert [Manifest.read(folder).form for folder in folders] == forms
    assert all(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    "form", [GraphForm(Dialect.LINEAR, WeightFormat.INT4), GraphForm(Dialect.PAGED, WeightFormat.INT4)]
)
def test_a_form_that_the_model_cannot_have_leaves_nothing(
    form: GraphForm, tmp_path: Path, cache: Path
) -> None:
    model = replace(tiny.LLAMA_TIED, hidden_size=48, num_heads=3, num_kv_heads=1)
    path = tiny.write_gguf(model, tmp_path / "narrow.gguf")
    with pytest.raises(EngineError, match="int4"):
        prepare(cache, path, form)
    assert PreparedModels(cache).entries() == []
    assert not list(cache.glob("draft-*"))


def test_a_copy_elsewhere_uses_the_same_entry_under_its_own_path(
    gguf: Path, cache: Path, made: list[Path]
) -> None:
    prepare(cache, gguf)
    copy = gguf.parent / "elsewhere" / gguf.name
    copy.parent.mkdir()
    shutil.copyfile(gguf, copy)
    model = PreparedModels(cache).open(copy, INT8)
    model.close()
    assert model.model.path == str(copy)
    assert len(made) == 1


def test_every_file_of_a_folder_that_matters_counts(
    tiny_models: dict[str, TinyPaths], tmp_path: Path, cache: Path, made: list[Path]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models[tiny.LLAMA_TIED.name].folder, folder)
    prepare(cache, folder)
    (folder / "README.md").write_text("changes nothing")
    prepare(cache, folder)
    assert len(made) == 1
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    prepare(cache, folder)
    assert len(made) == 2


def test_a_change_of_the_code_that_prepares_replaces_the_entry(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = prepare(cache, gguf)
    other = prepare(cache, gguf, BF16)
    monkeypatch.setattr("engines.prepared._code_digest", lambda: "0123456789")
    new = prepare(cache, gguf)
    assert new.exists()
    assert not old.exists()
    assert other.exists()


def test_every_module_that_prepares_is_part_of_the_code_that_counts(
    tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> None:
    from engines.prepared import _RUNTIME_MODULES, _RUNTIME_PREFIXES

    script = """
import sys
from pathlib import Path
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import WeightFormat
for path in sys.argv[2:]:
    with open_checkpoint(Path(path)) as checkpoint:
        checkpoint.info
        form = GraphForm(Dialect.LINEAR, WeightFormat.INT4)
        write_model(checkpoint.spec, checkpoint, Path(sys.argv[1]), form)
print(*sys.modules)
"""
    paths = tiny_models[tiny.LLAMA_TIED.name]
    command = [sys.executable, "-c", script, str(tmp_path / "model.onnx"), str(paths.gguf), str(paths.folder)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    preparing = {name.removeprefix("engines.") for name in loaded.split() if name.startswith("engines.")}
    assert {"graph", "linear_graph", "weightfile", "gguf_vocabulary", "hf_vocabulary"} <= preparing
    assert preparing & _RUNTIME_MODULES <= {"api"}  # types and errors
    assert not [name for name in preparing if name.startswith(_RUNTIME_PREFIXES)]


def truncate(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, alter, remove])
@pytest.mark.parametrize("name", [GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE])
def test_a_damaged_entry_is_rebuilt_with_a_line_in_the_log(
    damage: Callable[[Path], None], name: str, gguf: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = prepare(cache, gguf)
    whole = (folder / name).read_bytes()
    for file in folder.iterdir():
        age(file)
    prepare(cache, gguf)  # remembers the hashes
    damage(folder / name)
    with caplog.at_level(logging.WARNING):
        assert prepare(cache, gguf) == folder
    assert [
        record.message for record in caplog.records if "damaged" in record.message and name in record.message
    ]
    assert (folder / name).read_bytes() == whole


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 5}', '{"model": {"spec": {}}}', "\xff"])
def test_a_damaged_manifest_is_rebuilt(content: str, gguf: Path, cache: Path, made: list[Path]) -> None:
    folder = prepare(cache, gguf)
    (folder / MANIFEST_FILE).write_text(content, encoding="latin-1")
    prepare(cache, gguf)
    assert len(made) == 2
    Manifest.read(folder)


def test_a_damaged_entry_in_use_is_rebuilt_beside_its_user(gguf: Path, cache: Path) -> None:
    user = PreparedModels(cache).open(gguf, INT8)
    with (user.folder / WEIGHTS_FILE).open("rb") as held:
        truncate(user.folder / GRAPH_FILE)
        assert prepare(cache, gguf) == user.folder
        assert os.fstat(held.fileno()).st_ino != (user.folder / WEIGHTS_FILE).stat().st_ino
        assert len(held.read()) == (user.folder / WEIGHTS_FILE).stat().st_size
    user.close()


def test_what_a_killed_process_left_is_cleaned_up(gguf: Path, cache: Path) -> None:
    folder = prepare(cache, gguf)
    shutil.rmtree(folder)
    leftover = cache / f"draft-{folder.name}-abc"
    leftover.mkdir()
    (leftover / WEIGHTS_FILE).write_bytes(b"half")
    prepare(cache, gguf)
    assert not list(cache.glob("draft-*"))


def _prepare_in_process(cache: Path, path: Path, barrier: Any, results: Any) -> None:
    phases = []
    barrier.wait()
    model = PreparedModels(cache).open(path, INT8, lambda phase, _done: phases.append(phase))
    results.put((str(model.folder), "convert" in phases, (model.folder / WEIGHTS_FILE).stat().st_size))
    model.close()


def test_of_processes_that_start_together_one_prepares_and_all_use_it(gguf: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_prepare_in_process, args=(cache, gguf, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len({folder for folder, _, _ in outcomes}) == 1
    assert sum(made for _, made, _ in outcomes) == 1
    assert len({size for _, _, size in outcomes}) == 1


def test_beyond_the_bound_the_least_recently_used_go_first(
    tiny_models: dict[str, TinyPaths], cache: Path
) -> None:
    paths = [tiny_models[model.name].gguf for model in (tiny.LLAMA_TIED, tiny.QWEN2, tiny.QWEN3)]
    folders = [prepare(cache, path) for path in paths]
    for age_s, folder in zip((300, 200, 100), folders, strict=True):
        age(folder / "last_used", age_s)
    prepare(cache, paths[0])  # used again: now the second is the oldest
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    bound = (sizes[0] + sizes[2] + 100) / (1 << 30)
    prepare(cache, paths[2], bound_gib=bound)
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_neither_what_was_just_opened_nor_what_is_in_use_is_removed(
    tiny_models: dict[str, TinyPaths], cache: Path
) -> None:
    used = PreparedModels(cache, 0).open(tiny_models[tiny.QWEN2.name].gguf, INT8)
    opened = PreparedModels(cache, 0).open(tiny_models[tiny.QWEN3.name].gguf, INT8)
    assert used.folder.exists()
    assert opened.folder.exists()
    used.close()
    opened.close()
    last = prepare(cache, tiny_models[tiny.LLAMA_TIED.name].gguf, bound_gib=0)
    assert [used.folder.exists(), opened.folder.exists(), last.exists()] == [False, False, True]


def test_entries_are_listed_by_use(tiny_models: dict[str, TinyPaths], cache: Path) -> None:
    assert PreparedModels(cache).entries() == []
    for age_s, model in ((50, tiny.QWEN2), (90, tiny.QWEN3)):
        age(prepare(cache, tiny_models[model.name].gguf) / "last_used", age_s)
    first, second = PreparedModels(cache).entries()
    assert (first.name, second.name) == (tiny.QWEN2.name, tiny.QWEN3.name)
    assert first.path == str(tiny_models[tiny.QWEN2.name].gguf)
    assert first.form == INT8
    assert first.size_bytes > 10_000
    assert 40 < time.time() - first.last_used < 80


def test_clearing_leaves_what_is_in_use(tiny_models: dict[str, TinyPaths], cache: Path) -> None:
    store = PreparedModels(cache)
    used = store.open(tiny_models[tiny.QWEN2.name].gguf, INT8)
    unused = prepare(cache, tiny_models[tiny.QWEN3.name].gguf)
    size = sum(file.stat().st_size for file in unused.iterdir())
    assert store.clear() == size
    assert [entry.name for entry in store.entries()] == [tiny.QWEN2.name]
    used.close()
    store.clear()
    assert list(cache.iterdir()) == []


def test_closing_twice_is_allowed(gguf: Path, cache: Path) -> None:
    model = PreparedModels(cache).open(gguf, INT8)
    model.close()
    model.close()


@pytest.mark.parametrize("name", ["missing.gguf", "model.safetensors"])
def test_a_path_without_a_model_is_refused_and_leaves_nothing(name: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        prepare(cache, tmp_path / name)
    assert not [file for file in cache.rglob("*") if file.is_file() and file.suffix != ".json"]


def test_a_foreign_file_is_refused_and_leaves_no_entry(tmp_path: Path, cache: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match=r"foreign\.gguf"):
        prepare(cache, foreign)
    assert PreparedModels(cache).entries() == []
    assert not list(cache.glob("draft-*"))


def test_a_chosen_folder_that_cannot_be_made_is_an_error(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match="file/cache cannot be written: Not a directory; choose another"):
        prepare(tmp_path / "file" / "cache", gguf)


def test_without_a_writable_default_folder_a_temporary_one_serves(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("engines.prepared.platformdirs.user_cache_path", lambda _: tmp_path / "file" / "x")
    with caplog.at_level(logging.WARNING):
        model = PreparedModels().open(gguf, INT8)
    assert "cannot be written" in caplog.text
    assert (model.folder / GRAPH_FILE).exists()
    model.close()
    assert not model.folder.parent.exists()


def test_too_little_space_is_refused_before_writing_with_the_numbers(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(gguf.parent)._replace(free=1000)
    monkeypatch.setattr("engines.preparation.shutil.disk_usage", lambda _: usage)
    with pytest.raises(EngineError, match=r"no space left .* 0\.00 GiB is needed and 0\.00 GiB are free"):
        prepare(cache, gguf)
    assert not list(cache.glob("draft-*"))


def test_a_disk_that_fills_up_leaves_no_partial_entry(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightFile, "rows", fill)
    with pytest.raises(EngineError, match=r"no space left in .* make room, or choose another cache folder"):
        prepare(cache, gguf)
    assert PreparedModels(cache).entries() == []
    assert not list(cache.glob("draft-*"))
    monkeypatch.undo()
    prepare(cache, gguf)


class TestFileDigests:
    def test_an_unchanged_file_is_not_read_again(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digests = FileDigests(tmp_path / "digests")
        first = digests.sha256(gguf)
        monkeypatch.setattr("engines.digests.hashlib.file_digest", None)
        assert digests.sha256(gguf) == first

    @pytest.mark.parametrize("change", ["size", "time", "place"])
    def test_a_changed_file_is_read_again(self, change: str, gguf: Path, tmp_path: Path) -> None:
        digests = FileDigests(tmp_path / "digests")
        first = digests.sha256(gguf)
        stat = gguf.stat()
        if change == "size":
            gguf.write_bytes(gguf.read_bytes() + b"x")
            os.utime(gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        elif change == "time":
            alter(gguf)
        else:
            other = tmp_path / "other"
            other.write_bytes(gguf.read_bytes())
            alter(other)
            os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            other.replace(gguf)
        assert digests.sha256(gguf) != first

    def test_a_file_changed_just_now_is_not_remembered(self, gguf: Path, tmp_path: Path) -> None:
        gguf.touch()
        FileDigests(tmp_path / "digests").sha256(gguf)
        assert not list(tmp_path.glob("digests/*"))

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 1}', "\xff"])
    def test_a_damaged_note_is_ignored(self, content: str, gguf: Path, tmp_path: Path) -> None:
        digests = FileDigests(tmp_path / "digests")
        first = digests.sha256(gguf)
        (note,) = tmp_path.glob("digests/*")
        note.write_text(content, encoding="latin-1")
        assert digests.sha256(gguf) == first

    def test_where_nothing_can_be_remembered_it_hashes(self, gguf: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        assert len(FileDigests(tmp_path / "file" / "digests").sha256(gguf)) == 64


class TestFileLock:
    def test_users_share_it_and_keep_others_from_having_it_alone(self, tmp_path: Path) -> None:
        one, two, three = (FileLock(tmp_path / "lock") for _ in range(3))
        one.shared()
        two.shared()
        assert not three.exclusive(wait=False)
        one.release()
        two.release()
        assert three.exclusive(wait=False)
        three.release()
        three.release()

    def test_a_lock_on_a_discarded_file_is_taken_on_the_new_one(self, tmp_path: Path) -> None:
        import threading

        path = tmp_path / "lock"
        first, waiting, third = FileLock(path), FileLock(path), FileLock(path)
        first.exclusive()
        thread = threading.Thread(target=waiting.exclusive)
        thread.start()
        while not _waits_for_flock(path):
            time.sleep(0.001)
        first.discard()
        thread.join()
        assert path.exists()
        assert not third.exclusive(wait=False)
        waiting.release()


def _waits_for_flock(path: Path) -> bool:
    """Whether somebody is queued for a lock on the file."""
    inode = f":{path.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())
