"""What a folder of models holds, and how its models are to be served."""

from pathlib import Path
from typing import Any

import pytest

from engines.options import CacheType
from streamsrv.config import Settings
from streamsrv.errors import SettingsError
from streamsrv.models_folder import ModelsFolder


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("STREAMSRV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with a model of each kind, and with what is none."""
    (tmp_path / "bravo.gguf").touch()
    (tmp_path / "delta.v1").mkdir()
    (tmp_path / "delta.v1" / "config.json").touch()
    (tmp_path / "charlie.gguf").touch()
    (tmp_path / "charlie.toml").write_text('workers = 2\nkv_cache_type = "u8"\n')
    (tmp_path / "alpha.toml").write_text('engine = "scripted"\nscript_text = "x"\n')
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.gguf").touch()
    (tmp_path / "cache").mkdir()
    return tmp_path


def folder(path: Path, **settings: Any) -> ModelsFolder:
    return ModelsFolder(Settings(models=path, **settings))


def test_each_file_folder_and_toml_file_is_a_model(path: Path) -> None:
    entries = folder(path).entries()
    assert list(entries) == ["alpha", "bravo", "charlie", "delta.v1"]
    assert entries["charlie"].path.name == "charlie.toml", "which is about the file beside it"


def test_a_model_has_the_settings_of_its_file_and_else_those_of_the_server(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSRV_MODELS", str(path))
    models = folder(path, threads=3, workers=1, admin_listen="127.0.0.1:0")
    settings = models.settings(models.entries()["charlie"], 4)
    assert settings.model == str(path / "charlie.gguf")
    assert (settings.workers, settings.threads) == (2, 3)
    assert settings.engine_options.cache_type is CacheType.U8
    assert models.settings(models.entries()["delta.v1"], 4).model == str(path / "delta.v1")


def test_memory_is_shared_equally_unless_a_model_says_its_share(path: Path) -> None:
    (path / "charlie.toml").write_text("memory_share = 0.75")
    models = folder(path)
    assert models.settings(models.entries()["bravo"], 4).engine_options.memory_share == 0.25
    assert models.settings(models.entries()["charlie"], 4).engine_options.memory_share == 0.75
    assert Settings().engine_options.memory_share == 1


def test_a_toml_file_can_name_a_model_elsewhere(path: Path) -> None:
    (path / "fast.toml").write_text('model = "bravo.gguf"')
    (path / "far.toml").write_text('model = "/models/far.gguf"')
    models = folder(path)
    assert models.settings(models.entries()["fast"], 1).model == str(path / "bravo.gguf")
    assert models.settings(models.entries()["far"], 1).model == "/models/far.gguf"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no model, and beside it there is neither x.gguf nor a folder x"),
        ("a b", "is not valid TOML"),
        ('listen = "127.0.0.1:1"', "unknown setting 'listen'"),
        ('model = "a.gguf"\nworkers = 0', "--workers"),
        ('model = "a.gguf"\nmax_running = 700', "x.toml: --max-step-tokens is 320"),
    ],
)
def test_a_wrong_file_of_settings_is_refused_with_the_reason(path: Path, text: str, said: str) -> None:
    (path / "x.toml").write_text(text)
    models = folder(path)
    with pytest.raises(SettingsError) as caught:
        models.settings(models.entries()["x"], 1)
    assert said in str(caught.value)


def test_two_models_of_one_name_are_refused(path: Path) -> None:
    (path / "bravo").mkdir()
    (path / "bravo" / "config.json").touch()
    with pytest.raises(SettingsError, match="would both be the model 'bravo'"):
        folder(path).entries()


def test_all_models_are_wanted_or_those_that_are_named(path: Path) -> None:
    assert folder(path).wanted == ("alpha", "bravo", "charlie", "delta.v1")
    assert folder(path, load="charlie, bravo").wanted == ("bravo", "charlie")
    assert folder(path, load="").wanted == ()
    with pytest.raises(SettingsError, match=r"--load names nope; in .* there are: alpha, bravo"):
        _ = folder(path, load="alpha,nope").wanted


def test_the_default_is_the_one_named_or_the_first_to_be_loaded(path: Path) -> None:
    assert folder(path).default == "alpha"
    assert folder(path, load="charlie,bravo").default == "bravo"
    assert folder(path, load="").default == "alpha"
    assert folder(path, default_model="delta.v1").default == "delta.v1"
    with pytest.raises(SettingsError, match="--default-model is nope"):
        _ = folder(path, default_model="nope").default


def test_an_empty_folder_is_refused_unless_models_can_be_loaded_later(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no model in"):
        _ = folder(tmp_path).wanted
    assert folder(tmp_path, admin_listen="127.0.0.1:0").wanted == ()
    with pytest.raises(SettingsError, match="cannot read the folder of models"):
        folder(tmp_path / "nope").entries()
