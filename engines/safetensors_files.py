"""The weights of a Hugging Face model folder: one safetensors file, or several with an index."""

import hashlib
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import ml_dtypes  # noqa: F401 - gives NumPy the type that safetensors reads BF16 as
import numpy as np
from safetensors import SafetensorError, safe_open

from engines.api import CheckpointError, FloatArray
from engines.architecture import check_finite
from engines.hf_config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUPPORTED_TYPES = ("F32", "F16", "BF16")
"""How tensors may be stored."""


class _Slice(Protocol):
    """What safetensors returns for a tensor that is not read yet; its package has no types."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> Any: ...


class SafetensorsFiles:
    """The safetensors files of a folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises:
            CheckpointError: a file is missing or damaged, or stores a tensor in an unsupported type.

        """
        self._folder = folder
        self._slices: dict[str, _Slice] = {}
        self._weights_by_type: Counter[str] = Counter()
        self.paths = _weight_paths(folder)
        """The files, in order of their names."""
        for path in self.paths:
            self._open(path)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(stored.get_shape()) for name, stored in self._slices.items()
        }
        """Shape of each tensor, by the files' own names."""

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def quantization(self) -> str:
        """The type that most weights are stored in."""
        return self._weights_by_type.most_common(1)[0][0]

    def digest(self) -> str:
        """Hex SHA-256 of the files, one after the other."""
        total = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    while chunk := file.read(1 << 20):
                        total.update(chunk)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        return total.hexdigest()

    def read(self, name: str, rows: slice | None) -> FloatArray:
        """Read a tensor, or some of its rows, as float32.

        Raises:
            CheckpointError: it holds weights that are not finite numbers.

        """
        if not self._slices:
            raise ValueError(f"{self._folder}: the checkpoint is closed")
        stored = self._slices[name]
        # Only plain steps are known to safetensors.
        start, stop, step = (rows or slice(None)).indices(self.shapes[name][0])
        if step != 1:
            raise ValueError("rows must be a slice with a step of 1")
        if stop <= start:
            return np.empty((0, *self.shapes[name][1:]), np.float32)
        weights = np.asarray(stored[start:stop], np.float32)
        check_finite(weights, name, self._folder)
        return weights

    def close(self) -> None:
        """Unmap the files. Closing twice is allowed."""
        self._slices.clear()

    def _open(self, path: Path) -> None:
        try:
            file = cast("Any", safe_open)(path, framework="numpy")
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                if name in self._slices:
                    raise CheckpointError(f"{path}: tensor {name!r} is in another file of the model too")
                stored = cast("_Slice", file.get_slice(name))
                if stored.get_dtype() not in SUPPORTED_TYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is stored as {stored.get_dtype()}; "
                        f"supported are {', '.join(SUPPORTED_TYPES)}"
                    )
                self._slices[name] = stored
                self._weights_by_type[stored.get_dtype()] += prod(stored.get_shape())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing; copy or download the model again") from None
        except (OSError, ValueError) as error:  # ValueError: an impossible name in the index
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: is cut short, or not a safetensors file ({error}); copy or download it again"
            ) from error


def _weight_paths(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE).exists():
        return (folder / SINGLE,)
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; only safetensors are read")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: has no weight_map; copy or download it again")
    for name in placed.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise CheckpointError(f"{index}: names {name!r}, which is no safetensors file in its folder")
    return tuple(folder / name for name in sorted(set(placed.values())))
