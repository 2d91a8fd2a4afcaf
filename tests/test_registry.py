"""Engines by name."""

import sys
from pathlib import Path

import pytest

from engines.api import CheckpointError, EngineError, EngineNotInstalledError
from engines.options import EngineOptions
from engines.registry import ENGINE_NAMES, best_engine, inspect_model, open_engine
from tests import tiny
from tests.conftest import TinyPaths


@pytest.mark.parametrize("name", ["auto", "openvino"])
def test_the_best_engine_here_is_openvino(
    name: str, tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> None:
    path = tiny_models[tiny.QWEN2.name].folder
    engine = open_engine(name, path, EngineOptions(cache_folder=tmp_path))
    assert engine.name == "openvino"
    assert engine.model == inspect_model(path)
    engine.close()


@pytest.mark.parametrize("name", ["tensorflow", "", "OpenVINO"])
def test_an_unknown_engine_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(EngineError, match=f"no engine '{name}'; the engines are auto, openvino"):
        open_engine(name, Path("model.gguf"), EngineOptions())
    assert ENGINE_NAMES[:2] == ("auto", "openvino")


def test_a_missing_model_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.gguf: no such file"):
        open_engine("openvino", tmp_path / "missing.gguf", EngineOptions(cache_folder=tmp_path))
    with pytest.raises(CheckpointError, match=r"missing\.gguf: no such file"):
        inspect_model(tmp_path / "missing.gguf")


def test_an_engine_without_its_package_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "engines.ov", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineNotInstalledError, match="needs the package openvino"):
        open_engine("auto", tmp_path / "missing.gguf", EngineOptions())


def test_the_best_engine_with_a_gpu_is_tensorrt_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert best_engine(tmp_path / "elsewhere") == "openvino"
    installed: set[str] = set()
    monkeypatch.setattr("engines.registry.find_spec", lambda name: name if name in installed else None)
    assert best_engine(tmp_path) == "openvino"
    assert "pip install 'streamsrv[tensorrt]'" in caplog.text
    installed |= {"tensorrt_rtx", "pycuda"}
    assert best_engine(tmp_path) == "tensorrt_rtx"
    installed |= {"tensorrt"}
    assert best_engine(tmp_path) == "tensorrt"
