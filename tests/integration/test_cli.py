"""The commands as a user runs them: processes, their output, their exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.scripted import DEFAULT_SCRIPT
from tests.certificates import Authority

TIMEOUT_S = 60


def streamsrv(*arguments: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streamsrv", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        check=False,
    )


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted server as a process, and its address."""
    command = [sys.executable, "-m", "streamsrv", "serve", "--engine", "scripted", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on 127.0.0.1:"), process.stderr and process.stderr.read()
            yield process, line.removeprefix("listening on ").strip()
        finally:
            process.kill()


def test_generate_prints_the_text_and_then_what_was_received() -> None:
    with server() as (_, address):
        done = streamsrv("generate", "--server", address, "Say it.")
        assert (done.returncode, done.stdout) == (0, DEFAULT_SCRIPT + "\n")
        last = done.stderr.splitlines()[-1]
        for part in ("stream ", " tokens, STOP, first after ", " ms, ", " tokens/s, ", " bytes/token"):
            assert part in last


def test_generate_json_prints_one_object_per_chunk() -> None:
    with server() as (_, address):
        done = streamsrv("generate", "--json", "-", "--max-tokens", "5", STREAMSRV_SERVER=address)
        assert done.returncode == 1, "standard input was empty"
        assert "prompt.text: must not be empty" in done.stderr
        done = streamsrv("generate", "--json", "x", "--max-tokens", "5", STREAMSRV_SERVER=address)
        chunks = [json.loads(line) for line in done.stdout.splitlines()]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 5
        assert DEFAULT_SCRIPT.startswith("".join(chunk["text"] for chunk in chunks))
        output_end, stream_end = chunks[-1]["events"][-2:]
        assert output_end["output_end"]["finish_reason"] == "FINISH_REASON_LENGTH"
        assert stream_end["stream_end"]["usage"]["num_completion_tokens"] == 5
        assert len({chunk["stream_id"] for chunk in chunks}) == 1


def test_a_server_with_tls_client_certificates_and_keys_is_called_with_flags(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own, mine = authority.sign("server"), authority.sign("alice", [])
    made = streamsrv("keys", "new", "alice")
    assert made.returncode == 0
    keys, key = tmp_path / "keys", made.stderr.split()[-1]
    keys.write_text(made.stdout)
    assert key not in made.stdout
    secured = ["--tls-cert", str(own.cert), "--tls-key", str(own.key), "--tls-client-ca", str(authority.path)]
    with server(*secured, "--api-keys", str(keys)) as (_, address):
        call = ["--server", address, "--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
        trusting = [*call, "--tls-ca", str(authority.path)]
        done = streamsrv("generate", "x", *trusting, STREAMSRV_API_KEY=key)
        assert (done.returncode, done.stdout) == (0, DEFAULT_SCRIPT + "\n")
        (tmp_path / "key").write_text(key + "\n")
        done = streamsrv("generate", "x", *trusting, "--api-key-file", str(tmp_path / "key"))
        assert (done.returncode, done.stdout) == (0, DEFAULT_SCRIPT + "\n")
        done = streamsrv("generate", "x", *call, "--tls", STREAMSRV_API_KEY=key, SSL_CERT_FILE=authority.path)
        assert (done.returncode, done.stdout) == (0, DEFAULT_SCRIPT + "\n")
        done = streamsrv("generate", "x", *trusting)
        assert done.returncode == 1
        assert "UNAUTHENTICATED: the call has no API key" in last_line(done)
        done = streamsrv("generate", "x", *call, "--tls", STREAMSRV_API_KEY=key)
        assert done.returncode == 1
        assert "UNAVAILABLE" in last_line(done)
        assert len(done.stderr.splitlines()) == 1, "and none of grpc's own"
        done = streamsrv("health", *trusting)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")


def test_health_says_serving() -> None:
    with server() as (_, address):
        done = streamsrv("health", "--server", address)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")


@contextmanager
def reader(address: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A client as a process that has received its first chunk, and that chunk."""
    with subprocess.Popen(
        [sys.executable, "-m", "streamsrv", "generate", "--json", "--server", address, "x", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_sigterm_lets_a_live_stream_finish_and_exits_with_0() -> None:
    with server("--script-step-ms", "5") as (process, address), reader(address) as (client, first):
        process.send_signal(signal.SIGTERM)
        rest, _ = client.communicate(timeout=TIMEOUT_S)
        text = "".join(json.loads(line)["text"] for line in (first + rest).splitlines())
        assert text == DEFAULT_SCRIPT
        assert client.returncode == 0
        assert process.wait(TIMEOUT_S) == 0


def test_a_second_sigterm_ends_now() -> None:
    with (
        server("--script-step-ms", "50", "--drain-grace-s", "3000") as (process, address),
        reader(address, "--ignore-eos") as (client, _),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        for line in process.stderr:
            if "stopping" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 130
        _, error = client.communicate(timeout=TIMEOUT_S)
        assert client.returncode == 1
        assert "Traceback" not in error


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = streamsrv("serve", "--engine", "scripted", "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in last_line(done)


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    for command in (["generate", "x"], ["health"]):
        done = streamsrv(*command, "--server", address)
        assert done.returncode == 1
        assert "UNAVAILABLE" in last_line(done)
        assert "Is a server running there?" in last_line(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["serve", "--engine", "abacus"], "abacus"),
        (["serve", "--max-running", "-3"], "--max-running"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "--listen", "0.0.0.0:0"], "--allow-plaintext"),
        (["serve", "--model", "/slow.gguf", "--tls-cert", "/nope.crt", "--tls-key", "/k"], "/nope.crt"),
        (["serve", "--model", "/slow.gguf", "--api-keys", "/nowhere/keys"], "/nowhere/keys"),
        (["models", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["keys", "new", "two words"], "'two words' is no name for a key"),
        (["generate", "--tls-ca", "/nowhere/ca.pem", "x"], "cannot read /nowhere/ca.pem"),
        (["generate", "--tls-cert", "/a.crt", "x"], "--tls-cert is given without --tls-key"),
        (["generate", "--api-key-file", "/dev/null", "x"], "/dev/null is empty; it must hold the API key"),
        (["health", "--tls-key", "/a.key"], "--tls-key is given without --tls-cert"),
        (["generate", "--server", "nonsense", "x"], "HOST:PORT"),
        (["generate", "--max-tokens", "-1", "x"], "--max-tokens is -1"),
        (["generate", "--seed", "99999999999999999999999", "x"], "--seed is 99999999999999999999999"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(arguments: list[str], said: str) -> None:
    done = streamsrv(*arguments)
    assert done.returncode == 1
    assert said in last_line(done)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("streamsrv: ") == 1


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "picture.gguf"
    foreign.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    for command in ("serve", "models"):
        flag = ["--model"] if command == "serve" else []
        done = streamsrv(command, *flag, str(foreign))
        assert done.returncode == 1
        assert "picture.gguf" in last_line(done)
        assert "Traceback" not in done.stderr


def test_help_names_every_command_and_setting() -> None:
    done = streamsrv("--help")
    assert done.returncode == 0
    for command in ("serve", "generate", "models", "health", "cache", "keys"):
        assert command in done.stdout
    done = streamsrv("serve", "--help")
    for flag in ("--model", "--engine", "--listen", "--kv-cache-gib", "--no-allow-plaintext"):
        assert flag in done.stdout


def test_models_describes_the_demo_model(demo_path: Path) -> None:
    done = streamsrv("models", str(demo_path), "--json")
    facts = json.loads(done.stdout)
    assert (facts["family"], facts["layers"], facts["context"], facts["vocabulary"]) == (
        "llama",
        30,
        8192,
        49152,
    )
    assert facts["parameters"] == 134_515_008
    assert facts["chat_template"] is True
    assert "30" in streamsrv("models", "demo").stdout


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]
