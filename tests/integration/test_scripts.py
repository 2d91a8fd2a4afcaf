"""The scripts as a user runs them."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_cli import server

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 90

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv" / ".streamsrv-setup").exists(), reason="not run from scripts/test: set up with it"
)


def run(
    script: str, *arguments: str, root: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "scripts" / script, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **variables},
        check=False,
    )


def test_smoke_streams_an_answer_of_the_demo_model(demo_path: Path, tmp_path: Path) -> None:
    assert demo_path.exists()
    done = run("smoke", STREAMSRV_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr.splitlines()[-1]


def test_smoke_uses_a_running_server() -> None:
    with server() as (_, address):
        done = run("smoke", "--server", address, "Say it.")
    assert done.returncode == 0
    assert done.stdout.startswith("A stream is a log")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--server", "127.0.0.1:1"], "did not arrive"),
        (["--server"], "needs HOST:PORT"),
        (["--fast"], "unknown flag --fast"),
        (["two", "prompts"], "one PROMPT"),
    ],
)
def test_smoke_fails_with_a_sentence(arguments: list[str], said: str) -> None:
    done = run("smoke", *arguments)
    assert done.returncode != 0
    assert said in done.stderr.splitlines()[-1]


def test_smoke_says_why_its_server_did_not_start() -> None:
    done = run("smoke", STREAMSRV_THREADS="none")
    assert done.returncode != 0
    assert "STREAMSRV_THREADS" in done.stderr
    assert "did not start" in done.stderr.splitlines()[-1]


def test_a_second_setup_does_nothing() -> None:
    done = run("setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_interpreter_that_setup_is_given_is_not_taken_for_the_environments() -> None:
    done = run("gen_proto", "--check", PYTHON="python-without-our-packages")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def fake_python(folder: Path, script: str) -> str:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac', "Python 3.9.2 is too old"),
        ('case "$2" in *venv*) exit 1;; *) exit 0;; esac', "no venv module"),
        (None, "is not on the PATH"),
    ],
)
def test_setup_says_what_the_machine_lacks(tmp_path: Path, script: str | None, said: str) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts" / "setup")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = "python-that-is-missing" if script is None else fake_python(tmp_path, script)
    done = run("setup", root=tmp_path, PYTHON=python)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / ".venv").exists()
