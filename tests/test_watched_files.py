import logging
import shutil
from pathlib import Path

import pytest

from streamsrv.errors import SettingsError
from streamsrv.watched_files import WatchedFiles


def parse(*contents: bytes) -> bytes:
    if b"bad" in contents:
        raise SettingsError("a file is bad")
    return b"+".join(contents)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_files_that_cannot_be_used_at_first_are_refused(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*other: No such file"):
        WatchedFiles([file, file.parent / "other"], parse)
    file.write_bytes(b"bad")
    with pytest.raises(SettingsError, match="a file is bad"):
        WatchedFiles([file], parse)


def test_a_change_of_any_file_is_seen(file: Path) -> None:
    other = file.parent / "other"
    other.write_bytes(b"1")
    files = WatchedFiles([file, other], parse)
    assert files.current() == b"old+1"
    other.write_bytes(b"2")
    assert files.current() == b"old+2"
    file.write_bytes(b"new")
    assert files.current() == b"new+2"


def test_a_replaced_file_and_a_link_that_is_turned_are_seen(file: Path) -> None:
    link = file.parent / "link"
    link.symlink_to(file)
    files = WatchedFiles([link], parse)
    new = file.parent / "new"
    new.write_bytes(b"new")
    new.replace(file)
    assert files.current() == b"new"
    newer = file.parent / "newer"
    newer.write_bytes(b"newer")
    turned = file.parent / "turned"
    turned.symlink_to(newer)
    turned.replace(link)
    assert files.current() == b"newer"


def test_a_change_is_seen_that_leaves_size_and_time_as_they_were(file: Path) -> None:
    old = file.parent / "old"
    shutil.copy2(file, old)
    files = WatchedFiles([file], parse)
    file.write_bytes(b"new")
    shutil.copystat(old, file)
    assert files.current() == b"new"


def test_a_file_that_looks_unchanged_is_read_until_its_time_is_two_seconds_old(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock's tick hides a second change; this one stands still."""
    changed_ns = now_ns = 1_000_000_000_000
    monkeypatch.setattr("streamsrv.watched_files._signature", lambda _: (changed_ns, 0, 3, 1))
    files = WatchedFiles([file], parse, lambda: now_ns)
    file.write_bytes(b"new")
    now_ns = changed_ns + 1_999_999_999
    assert files.current() == b"new"
    now_ns = changed_ns + 2_000_000_001
    files.current()
    file.write_bytes(b"not")
    assert files.current() == b"new"


def test_what_has_not_changed_is_parsed_once(file: Path) -> None:
    num_parsed = 0

    def count(content: bytes) -> bytes:
        nonlocal num_parsed
        num_parsed += 1
        return content

    files = WatchedFiles([file], count)
    first = files.current()
    file.write_bytes(b"old")
    assert files.current() is first
    assert num_parsed == 1


def test_a_wrong_or_missing_file_leaves_the_value_and_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = WatchedFiles([file], parse)
    file.write_bytes(b"bad")
    for _ in range(3):
        assert files.current() == b"old"
    assert errors(caplog) == ["a file is bad; what it said before stays in force"]
    file.unlink()
    for _ in range(3):
        assert files.current() == b"old"
    assert len(errors(caplog)) == 2
    assert "cannot read" in errors(caplog)[1]
    file.write_bytes(b"bad")
    assert files.current() == b"old"
    assert len(errors(caplog)) == 3
    file.write_bytes(b"new")
    assert files.current() == b"new"
    assert len(errors(caplog)) == 3
