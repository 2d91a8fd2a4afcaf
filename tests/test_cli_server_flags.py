import argparse
import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from streamsrv import __version__
from streamsrv.api_keys import key_line, new_key, parse_api_keys
from streamsrv.auth import ApiKeyInterceptor
from streamsrv.cli import run
from streamsrv.cli.server_flags import add_server_flags, server_of
from streamsrv.errors import SettingsError
from streamsrv.metrics import Metrics
from streamsrv.tls import server_credentials
from streamsrv.v1 import admin_pb2 as pb
from streamsrv.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from streamsrv.watched_files import WatchedFiles
from tests.certificates import Authority
from tests.integration.test_cli import streamsrv

_ALPHA = pb.RepositoryModel(name="alpha", state=pb.MODEL_STATE_READY, path="alpha.toml")
COMMANDS = ["generate", "health", "bench", "admin list", "admin load", "admin unload"]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        run([*command.split(), "--help"])
    section = capsys.readouterr().out.partition("\nthe server:\n")[2].partition("\n\n")[0]
    return " ".join(section.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_that_call_a_server_say_the_same_of_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [help_of(each, capsys) for each in ("generate", command)]
    flags = [re.findall(r"(--[\w-]+) [A-Z]", text) for text in texts]
    assert flags[0] == flags[1]
    assert len(flags[0]) == 6
    ours = [re.sub(r"\(default: .*?\)|--server .*? --timeout", "", text) for text in texts]
    assert ours[0] == ours[1]


@pytest.mark.parametrize("command", ["generate x", *COMMANDS[1:4], "admin load m", "admin unload m"])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--server", ""], "--server is ''; it must be HOST:PORT"),
        (["--server", "nonsense"], "--server is 'nonsense'; it must be HOST:PORT"),
        (["--server", "127.0.0.1:0"], "a server is called at a port from 1 to 65535"),
        (["--timeout", "0"], "--timeout is 0; it must be a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout is nan; it must be"),
        (["--timeout", "1e300"], "and at most 1000000"),
        (["--tls-cert", "mine.pem"], "--tls-cert is given without --tls-key"),
        (["--tls-key", "mine.key"], "--tls-key is given without --tls-cert"),
        (["--tls-ca", "/nowhere/ca.pem"], "cannot read /nowhere/ca.pem"),
        (["--tls-ca", "/dev/null"], "/dev/null holds no certificate in PEM form"),
        (["--api-key-file", "/dev/null"], "/dev/null is empty; it must hold the API key"),
        (["--api-key-file", "/nowhere/key"], "cannot read /nowhere/key"),
    ],
)
def test_all_commands_refuse_the_same(
    command: str, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), *flags]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) == 1
    assert error.startswith("streamsrv: ")
    assert sentence in error


def chosen(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return parser.parse_args(flags)


def test_a_variable_names_the_server_and_a_flag_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSRV_SERVER", "[::1]:7")
    assert server_of(chosen()).target == "[::1]:7"
    assert server_of(chosen("--server", "localhost:8")).target == "localhost:8"
    monkeypatch.setenv("STREAMSRV_SERVER", "")
    assert server_of(chosen()).target == "127.0.0.1:50051"


def test_a_variable_that_names_no_server_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSRV_SERVER", "nonsense")
    with pytest.raises(SettingsError, match=r"^STREAMSRV_SERVER is 'nonsense'; it must be HOST:PORT"):
        server_of(chosen())


def test_a_variable_holds_the_key_and_a_file_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSRV_API_KEY", "from-the-variable")
    assert server_of(chosen()).api_key == "from-the-variable"
    path = tmp_path / "key"
    path.write_text("from-the-file\n")
    server = server_of(chosen("--api-key-file", str(path)))
    assert server.api_key == "from-the-file"
    assert "from-the-file" not in repr(server)


def test_a_key_of_several_words_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSRV_API_KEY", "two words")
    with pytest.raises(SettingsError, match=r"^STREAMSRV_API_KEY is not an API key") as refused:
        server_of(chosen())
    assert "two words" not in str(refused.value)


class Admin(AdminServiceServicer):
    """Has one model, which is what it is."""

    async def ListRepository(self, request: Any, context: Any) -> pb.ListRepositoryResponse:  # noqa: ARG002
        return pb.ListRepositoryResponse(models=[_ALPHA])

    async def LoadModel(self, request: Any, context: Any) -> pb.LoadModelResponse:  # noqa: ARG002
        return pb.LoadModelResponse(model=_ALPHA)

    async def UnloadModel(self, request: Any, context: Any) -> pb.UnloadModelResponse:  # noqa: ARG002
        return pb.UnloadModelResponse(model=_ALPHA, all_finished=True)


@asynccontextmanager
async def admin_over_tls(authority: Authority, keys: Path) -> AsyncIterator[str]:
    watched = WatchedFiles([keys], lambda content: parse_api_keys(content, path=keys))
    server = grpc.aio.server(interceptors=[ApiKeyInterceptor(watched, Metrics(__version__).refused)])
    add_AdminServiceServicer_to_server(Admin(), server)
    credentials = server_credentials(authority.sign("server"), authority.path)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_an_admin_service_behind_tls_client_certificates_and_keys_is_called_with_flags(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path, "authority")
    mine = authority.sign("alice", [])
    key, keys, key_file = new_key(), tmp_path / "keys", tmp_path / "key"
    keys.write_text(key_line("alice", key) + "\n")
    key_file.write_text(key)
    async with admin_over_tls(authority, keys) as address:
        call = ["--server", address, "--tls-ca", str(authority.path)]
        call += ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
        for action in (["list"], ["load", "alpha"], ["unload", "alpha"]):
            command = ("admin", *action, *call, "--api-key-file", str(key_file))
            done = await asyncio.to_thread(streamsrv, *command)
            assert (done.returncode, done.stdout.split()) == (0, ["alpha", "READY", "alpha.toml"]), done
        done = await asyncio.to_thread(streamsrv, "admin", "list", *call)
        assert done.returncode == 1
        assert "UNAUTHENTICATED: the call has no API key" in done.stderr
