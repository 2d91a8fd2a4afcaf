"""A folder of models: what is in it, and how each of them is to be served."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamsrv.config import Settings, check_model_settings, settings_of_model
from streamsrv.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the folder."""

    name: str
    path: Path
    """Its GGUF file or Hugging Face folder, or the TOML file with its settings."""


class ModelsFolder:
    """The models of a folder, read anew whenever they are asked for: files may come and go.

    NAME.gguf is a model, a folder NAME with a config.json is one, and so is NAME.toml with settings for it,
    which is about NAME.gguf or the folder NAME beside it unless it says another `model`.
    """

    def __init__(self, settings: Settings) -> None:
        """`settings` are the server's; their `models` is the folder."""
        assert settings.models is not None
        self.path = settings.models.expanduser()
        self._settings = settings

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names to load at the start, by the alphabet.

        Raises:
            SettingsError: the folder is unusable or empty, or a name is not in it.

        """
        names = tuple(self.entries())
        load = self._settings.load
        if load is None:
            if not names and self._settings.admin_listen is None:
                raise SettingsError(
                    f"there is no model in {self.path}: put GGUF files, Hugging Face folders, or NAME.toml "
                    "files with settings there"
                )
            return names
        wanted = {name.strip() for name in load.split(",")} - {""}
        if unknown := sorted(wanted - set(names)):
            raise SettingsError(
                f"--load names {', '.join(unknown)}; in {self.path} there are: {', '.join(names) or 'none'}"
            )
        return tuple(sorted(wanted))

    @property
    def default(self) -> str:
        """The model of requests that name none: the one set, else the first by name; empty where none is.

        Raises:
            SettingsError: the one set is not in the folder.

        """
        names, default = tuple(self.entries()), self._settings.default_model
        if default is not None:
            if default not in names:
                raise SettingsError(
                    f"--default-model is {default}; in {self.path} there are: {', '.join(names) or 'none'}"
                )
            return default
        return next(iter(self.wanted or names), "")

    def entries(self) -> dict[str, ModelEntry]:
        """List the models by name, in the order of the alphabet.

        Raises:
            SettingsError: it cannot be read, or two models have one name.

        """
        found: dict[str, ModelEntry] = {}
        try:
            paths = sorted(path for path in self.path.iterdir() if not path.name.startswith("."))
            kinds = [(path, kind) for path in paths if (kind := _kind(path)) is not None]
        except OSError as error:
            raise SettingsError(f"cannot read the folder of models {self.path}: {error.strerror}") from None
        # Files with settings last: they take the place of what they are about.
        for path, kind in sorted(kinds, key=lambda item: item[1] == "toml"):
            name = path.name if kind == "folder" else path.stem
            if kind != "toml" and name in found:
                raise SettingsError(
                    f"{found[name].path} and {path} would both be the model {name!r}: rename one of them"
                )
            found[name] = ModelEntry(name, path)
        return dict(sorted(found.items()))

    def settings(self, entry: ModelEntry, num_models: int) -> Settings:
        """Compose a model's settings; without one of its own, its memory is that of one among `num_models`.

        Raises:
            SettingsError: its file cannot be read, or a setting is wrong.

        """
        own: dict[str, Any] = {"model": str(entry.path)}
        if entry.path.suffix == ".toml":
            own = _read(entry.path)
            check_model_settings(own, entry.path)
            if own.get("engine", self._settings.engine) != "scripted" and own.get("model") != "demo":
                own["model"] = str(self._model_path(entry, own.get("model")))
        settings = settings_of_model(self._settings, own, entry.path)
        if settings.memory_share is None:
            settings = settings.model_copy(update={"memory_share": 1 / num_models})
        return settings

    def _model_path(self, entry: ModelEntry, given: object) -> Path:
        if given is not None:
            # An absolute path stays as it is.
            return self.path / Path(str(given)).expanduser()
        for path in (self.path / f"{entry.name}.gguf", self.path / entry.name):
            if path.exists():
                return path
        raise SettingsError(
            f"{entry.path} names no model, and beside it there is neither {entry.name}.gguf nor a folder "
            f'{entry.name}: say where it is, as in model = "/models/some.gguf"'
        )


def _kind(path: Path) -> str | None:
    if path.suffix in (".gguf", ".toml") and path.is_file():
        return path.suffix[1:]
    return "folder" if (path / "config.json").is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
