"""`streamsrv serve --models` and `streamsrv admin` as a user runs them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamsrv.cli import run
from tests.integration.test_cli import TIMEOUT_S, streamsrv


def last_word(process: subprocess.Popen[str], begin: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(begin), line
    return line.removeprefix(begin).strip()


def test_models_are_listed_loaded_and_unloaded_with_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMSRV_API_KEY", raising=False)
    for name in ("alpha", "bravo"):
        (tmp_path / f"{name}.toml").write_text(f'engine = "scripted"\nscript_text = "I am {name}."\n')
    command = [sys.executable, "-m", "streamsrv", "serve", "--listen", "127.0.0.1:0", "--load", "alpha"]
    command += ["--models", str(tmp_path), "--admin-listen", "127.0.0.1:0"]

    def said(*arguments: str, code: int = 0) -> str:
        assert run(arguments) == code
        out, error = capsys.readouterr()
        return error if code else out

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = last_word(process, "listening on ")
            admin = ("--server", last_word(process, "admin on "))
            assert said("admin", "load", "bravo", *admin).split()[:2] == ["bravo", "READY"]
            assert said("generate", "x", "--model", "bravo", "--server", address) == "I am bravo.\n"
            unloaded = said("admin", "unload", "alpha", "--grace-s", "1", *admin)
            assert unloaded.split()[:2] == ["alpha", "UNLOADED"]
            listed = [json.loads(line) for line in said("admin", "list", "--json", *admin).splitlines()]
            states = [(model["name"], model["state"]) for model in listed]
            assert states == [("alpha", "UNLOADED"), ("bravo", "READY")]
            assert "NOT_FOUND: no model 'nope' here; in the folder: " in said(
                "admin", "load", "nope", *admin, code=1
            )
            # Requests are answered there, and nothing else.
            assert "UNIMPLEMENTED" in said("admin", "list", "--server", address, code=1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def test_a_folder_with_a_broken_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    done = streamsrv("serve", "--listen", "127.0.0.1:0", "--models", str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("streamsrv: the model 'broken' cannot be loaded: ")
    assert "broken.gguf" in last
    assert "Traceback" not in done.stderr
