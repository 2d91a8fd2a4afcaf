"""What a prepared model holds, as JSON beside it: the model's description and each file's digest."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engines.form import Dialect, GraphForm
from engines.options import Precision, WeightFormat
from engines.spec import (
    Activation,
    Family,
    ModelInfo,
    ModelSpec,
    RopeScaling,
    SlidingWindow,
    Vocabulary,
)

MANIFEST_FILE = "model.json"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was when it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one prepared model."""

    model: ModelInfo
    form: GraphForm
    files: dict[str, FileRecord]
    """By name; every file of the folder but the manifest itself."""

    def write(self, folder: Path) -> None:
        """Write the manifest; the tokenizer is a file of its own."""
        vocabulary = replace(self.model.vocabulary, tokenizer_json="")
        content = asdict(replace(self, model=replace(self.model, vocabulary=vocabulary)))
        content["form"] = {
            "dialect": self.form.dialect.value,
            "weights": self.form.weights.value,
            "activations": self.form.activations.value,
            "num_candidates": self.form.num_candidates,
        }
        content["model"]["spec"]["family"] = self.model.spec.family.value
        content["model"]["spec"]["activation"] = self.model.spec.activation.value
        (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a manifest and its tokenizer.

        Raises:
            OSError: a file is missing or unreadable.
            ValueError: the content is not a manifest.

        """
        try:
            content: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
            model = content["model"]
            spec, vocabulary = model["spec"], model["vocabulary"]
            spec["family"] = Family(spec["family"])
            if spec["rope_scaling"] is not None:
                spec["rope_scaling"] = RopeScaling(**spec["rope_scaling"])
            if spec["rope_factors"] is not None:
                spec["rope_factors"] = tuple(spec["rope_factors"])
            if (window := spec["window"]) is not None:
                spec["window"] = SlidingWindow(**{**window, "layers": tuple(window["layers"])})
            spec["activation"] = Activation(spec["activation"])
            vocabulary["eos_token_ids"] = tuple(vocabulary["eos_token_ids"])
            vocabulary["tokenizer_json"] = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            model["spec"], model["vocabulary"] = ModelSpec(**spec), Vocabulary(**vocabulary)
            form = content["form"]
            return cls(
                model=ModelInfo(**model),
                form=GraphForm(
                    dialect=Dialect(form["dialect"]),
                    weights=WeightFormat(form["weights"]),
                    activations=Precision(form["activations"]),
                    num_candidates=form["num_candidates"],
                ),
                files={name: FileRecord(**record) for name, record in content["files"].items()},
            )
        except UnicodeDecodeError as error:
            raise ValueError(f"{MANIFEST_FILE} or {TOKENIZER_FILE} is not UTF-8: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST_FILE} is no manifest: {error!r}") from error
