"""What goes wrong when commands are used: a sentence each, and never a traceback."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from streamsrv.bench.processes import listening_process
from streamsrv.cli import run
from tests.certificates import Authority
from tests.integration.test_cli import TIMEOUT_S, streamsrv
from tests.servers import running


async def refused(*arguments: str, **variables: str) -> str:
    """The sentence that a command fails with."""
    done = await asyncio.to_thread(streamsrv, *arguments, **variables)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("streamsrv: ")
    return done.stderr


def in_shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with what a shell does to its streams, such as `>&-`."""
    program = shlex.join([sys.executable, "-m", "streamsrv", *arguments])
    return subprocess.run(
        ["bash", "-c", command.format(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@asynccontextmanager
async def secured(folder: Path, **settings: Any) -> AsyncIterator[tuple[str, Authority]]:
    authority = Authority(folder, "authority")
    pair = authority.sign("server")
    async with running(tls_cert=pair.cert, tls_key=pair.key, **settings) as server:
        yield server.target, authority


@pytest.mark.parametrize("command", ["bench", "admin list"])
async def test_plain_text_to_a_server_with_tls_says_which_flags_speak_it(
    command: str, tmp_path: Path
) -> None:
    async with secured(tmp_path) as (target, _):
        said = await refused(*command.split(), "--server", target)
    assert "If the server there speaks TLS, --tls or --tls-ca FILE does, too" in said


@pytest.mark.parametrize("command", ["generate x"])
async def test_tls_to_a_server_without_it_says_which_flags_to_leave_out(command: str) -> None:
    async with running() as server:
        said = await refused(*command.split(), "--server", server.target, "--tls")
    assert "speaks no TLS: leave out --tls, --tls-ca and --tls-cert" in said


async def test_an_authority_that_is_not_trusted_says_which_flag_names_it(tmp_path: Path) -> None:
    async with secured(tmp_path) as (target, _):
        said = await refused("health", "--server", target, "--tls")
    assert "--tls-ca FILE names the authority that signed its certificate" in said


async def test_a_certificate_of_another_name_says_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    pair = authority.sign("elsewhere", [])
    async with running(tls_cert=pair.cert, tls_key=pair.key) as server:
        said = await refused("health", "--server", server.target, "--tls-ca", str(authority.path))
    assert "Its certificate is not for this name" in said


async def test_a_server_that_asks_for_certificates_says_which_flags_show_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    pair = authority.sign("server")
    async with running(tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.path) as server:
        said = await refused("health", "--server", server.target, "--tls-ca", str(authority.path))
    assert "If it asks for client certificates, --tls-cert and --tls-key show one" in said


async def test_a_server_of_another_kind_says_so() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        said = await refused("generate", "x", "--server", f"127.0.0.1:{port}")
    assert "What is there is no gRPC server" in said


async def test_a_missing_key_says_where_one_is_given(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(streamsrv("keys", "new", "alice").stdout)
    async with running(api_keys=keys) as server:
        for variables in ({}, {"STREAMSRV_API_KEY": "wrong"}):
            said = await refused("bench", "--server", server.target, **variables)
            assert "UNAUTHENTICATED: " in said
            assert said.endswith(". --api-key-file FILE takes a key, as STREAMSRV_API_KEY does\n")


async def test_a_service_that_is_not_there_says_which_address_has_it() -> None:
    async with running() as server:
        said = await refused("admin", "list", "--server", server.target)
    assert "UNIMPLEMENTED: Method not found. --server is to be the server's --admin-listen, which" in said


async def test_a_server_that_is_there_and_does_not_serve_says_so() -> None:
    server, service = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    await service.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    said = await refused("health", "--server", f"127.0.0.1:{port}")
    await server.stop(None)
    assert said.endswith(" says NOT_SERVING: it is there, and answers no requests\n")


async def test_a_time_that_was_too_short_is_named() -> None:
    async with running() as server:
        said = await refused("generate", "x", "--server", server.target, "--timeout", "0.0001")
    assert said.endswith(". The 0.0001 s of --timeout were over\n")


async def test_a_url_is_refused_where_an_address_is_meant() -> None:
    said = await refused("health", "--server", "http://127.0.0.1:50051")
    assert "it must be HOST:PORT alone, without http:// or a path" in said


@pytest.mark.parametrize("command", ["generate x", "bench --json --requests 2"])
async def test_an_output_that_cannot_be_written_is_a_sentence(command: str) -> None:
    async with running() as server:
        arguments = [*command.split(), "--server", server.target]
        done = await asyncio.to_thread(in_shell, "{} >/dev/full", *arguments)
    assert done.returncode == 1
    assert done.stderr == "streamsrv: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("command", ["generate x", "bench --requests 2 --concurrency 1,2"])
async def test_a_reader_that_has_read_enough_ends_a_command_without_a_word(command: str) -> None:
    async with running() as server:
        arguments = [*command.split(), "--server", server.target]
        done = await asyncio.to_thread(in_shell, "{} | head -c 3; exit ${{PIPESTATUS[0]}}", *arguments)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout) == 3


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
async def test_streams_that_are_closed_are_written_to_nowhere(closed: str) -> None:
    async with running() as server:
        for command in (["health"], ["bench", "--requests", "2"]):
            arguments = [*command, "--server", server.target]
            done = await asyncio.to_thread(in_shell, "{} " + closed, *arguments)
            assert (done.returncode, done.stderr) == (0, "")
            assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--max-tokens -1", "--max-tokens is -1; it must be a whole number from 1 to 4294967295"),
        ("--max-tokens 0", "--max-tokens is 0; it must be"),
        ("--min-tokens -1", "--min-tokens is -1; it must be a whole number from 0 to 4294967295"),
        ("--top-k 99999999999", "--top-k is 99999999999; it must be"),
        ("--outputs 0", "--outputs is 0; it must be"),
        ("--logprobs -1 --json", "--logprobs is -1; it must be"),
        ("--max-tokens-per-chunk 0", "--max-tokens-per-chunk is 0; it must be"),
        ("--min-chunk-interval-ms -1", "--min-chunk-interval-ms is -1; it must be"),
        ("--seed -1", "--seed is -1; it must be a whole number from 0 to 18446744073709551615"),
        ("--priority 101", "--priority is 101; it must be a whole number from -100 to 100"),
        ("--resume-window nan", "--resume-window is nan; it must be a number of seconds from 0 to 1000000"),
        ("--system brief", "--system is given without --chat"),
        ("--logprobs 1", "--logprobs is given without --json"),
        ("--model \udcff", "--model is not UTF-8 text (at character 0)"),
        ("--choice a --choice b\udcff", "--choice is not UTF-8 text (at character 1)"),
        ("--stop \udcff", "--stop is not UTF-8 text"),
    ],
)
def test_flags_of_generate_are_refused_by_name(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", *flags.split()]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"streamsrv: {sentence}")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prompt_that_is_no_text_is_refused(locale: str) -> None:
    done = in_shell(rf"printf 'ab\xff' | LC_ALL={locale} {{}}", "generate", "-")
    assert done.returncode == 1
    assert done.stderr.startswith("streamsrv: standard input is not UTF-8 text (at ")
    done = in_shell(rf"LC_ALL={locale} {{}} $'\xff'", "generate")
    assert done.returncode == 1
    assert done.stderr == "streamsrv: PROMPT is not UTF-8 text (at character 0)\n"


@pytest.mark.parametrize("grace", ["nan", "inf", "-1", "3601"])
def test_a_grace_that_is_none_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["admin", "unload", "m", "--grace-s", grace]) == 1
    said = f"streamsrv: --grace-s is {float(grace):g}; it must be a number of seconds from 0 to 3600\n"
    assert capsys.readouterr().err == said


async def test_a_server_that_dies_while_it_answers_is_told_on_a_line_of_its_own() -> None:
    command = ("-m", "streamsrv", "serve", "--engine", "scripted", "--script-step-ms", "20")
    async with listening_process("a server", *command, "--listen", "127.0.0.1:0") as server:
        generate = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamsrv", "generate", "x", "--server", str(server.addresses[0])),
            *("--resume-window", "0", "--ignore-eos"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert generate.stdout is not None
        await generate.stdout.readexactly(1)
        os.kill(server.pid, signal.SIGKILL)
        out, error = await generate.communicate()
    assert generate.returncode == 1
    assert out.endswith(b"\n")
    assert error.startswith(b"streamsrv: UNAVAILABLE: ")
    assert error.endswith(
        b". The server went away while it answered; `streamsrv health` tells when it serves\n"
    )


async def test_an_open_loop_that_cannot_keep_up_says_what_to_do() -> None:
    async with running(max_waiting=10_000, max_waiting_per_caller=10_000) as server:
        flags = ["--rate", "1e6", "--requests", "400", "--max-tokens", "1", "--prompt-tokens", "4"]
        done = await asyncio.to_thread(streamsrv, "bench", "--server", server.target, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "note: the sender did not keep its schedule" in done.stdout
    assert "use more --processes" in done.stdout
