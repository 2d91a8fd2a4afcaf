"""Opening a model's weights, whatever file format they are in."""

import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from engines.api import CheckpointError, FloatArray
from engines.spec import ModelInfo, ModelSpec, Vocabulary


class Checkpoint(Protocol):
    """A model's weights on disk, memory-mapped, read as float32 a few rows at a time.

    Tensors go by the names in `engines.tensors`. What opening checks (every tensor of the model is
    there, in the right shape and whole) later reads can rely on. Arrays that were handed out stay
    valid after closing.
    """

    @property
    def spec(self) -> ModelSpec:
        """The model's shape; known as soon as the checkpoint is open."""
        ...

    @property
    def revision(self) -> str:
        """Hex SHA-256 of the weight files. The first use reads them all."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, converted on first use.

        Raises:
            CheckpointError: the tokenizer is missing or of an unsupported kind.

        """
        ...

    @property
    def info(self) -> ModelInfo:
        """Everything but the weights: spec, revision and vocabulary together.

        Raises:
            CheckpointError: as `vocabulary`.

        """
        ...

    def has(self, name: str) -> bool:
        """Tell whether the model has a tensor of this name."""
        ...

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor: `(out_features, in_features)`, or `(n,)`.

        Raises:
            KeyError: the model has no such tensor.

        """
        ...

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Read a tensor, or some of its rows, into a new float32 array; only those rows are dequantised.

        Args:
            name: of the tensor.
            rows: a slice of its first dimension, with a step of 1.

        Raises:
            KeyError: the model has no such tensor.
            CheckpointError: it holds weights that are not finite numbers.

        """
        ...

    def close(self) -> None:
        """Unmap the files. Closing twice is allowed; reading a closed checkpoint is a ValueError."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or a folder in the form of a Hugging Face repository.

    Raises:
        CheckpointError: the path is missing, damaged or of an unsupported kind; the message names it.

    """
    # The formats' modules import their libraries, which a caller that only wants the protocol needs not.
    from engines.gguf_checkpoint import GgufCheckpoint
    from engines.hf_checkpoint import HfCheckpoint

    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file or folder; give a GGUF file or a Hugging Face model folder"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise CheckpointError(f"{path}: cannot be opened: {error}") from error
    if stat.S_ISDIR(mode):
        return HfCheckpoint(path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is neither a file nor a folder")
    if path.name.endswith((".safetensors", ".json")):
        raise CheckpointError(
            f"{path}: is one file of a Hugging Face model; give the folder that holds it, {path.parent}"
        )
    return GgufCheckpoint(path)
