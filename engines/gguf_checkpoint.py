"""A model in one GGUF file."""

import hashlib
from collections import Counter
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from engines.api import CheckpointError, FloatArray
from engines.architecture import check_finite, check_tensors
from engines.gguf_config import ROPE_FACTOR_TENSORS, file_name, read_spec
from engines.gguf_file import GgufFile
from engines.gguf_header import GgufTensor
from engines.spec import Family, ModelInfo, ModelSpec, Vocabulary

_CHUNK_BYTES = 1 << 16
"""Stored bytes dequantised at a time, so that temporaries stay in the processor's cache: the demo model
took 0.20 s in pieces of 64 KiB, 0.59 s in pieces of 256 KiB."""


class GgufCheckpoint:
    """A checkpoint (see `engines.checkpoint.Checkpoint`) read from one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            CheckpointError: the file is damaged or its model is not supported.

        """
        self._path = path
        self._file = GgufFile(path)
        try:
            self._spec = read_spec(self._file)
            shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
            named = partial(file_name, self._spec.family)
            self._places = check_tensors(self._spec, path, named, shapes, _is_ignored)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @cached_property
    def revision(self) -> str:
        """Hex SHA-256 of the file."""
        try:
            with self._path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer out of the file's metadata."""
        from engines.vocabulary import vocabulary_from_gguf

        try:
            return vocabulary_from_gguf(self._file.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error

    @cached_property
    def info(self) -> ModelInfo:
        """Everything but the weights."""
        return ModelInfo(
            path=str(self._path),
            revision=self.revision,
            size_bytes=self._file.size_bytes,
            quantization=self._quantization(),
            spec=self._spec,
            vocabulary=self.vocabulary,
        )

    def has(self, name: str) -> bool:
        """Tell whether the model has a tensor of this name."""
        return name in self._places

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._places[name].shape

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Read a tensor, or some of its rows (of a vector: some of its items), into a new array."""
        place = self._places[name]
        stored = self._file.tensors[place.name]
        if len(place.shape) == 1:
            vector: FloatArray = _dequantize(self._file.rows(stored), stored, self._path)[0]
            return vector if rows is None else vector[rows]
        source = self._file.rows(stored)[place.rows(None)]
        order = self._row_order(name, place.shape[0])
        if order is not None:
            source = source[order if rows is None else order[rows]]
        elif rows is not None:
            source = source[rows]
        return _dequantize(source, stored, self._path)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _row_order(self, name: str, num_rows: int) -> NDArray[np.intp] | None:
        """Where the file has each row of Q and K, or None where the order is the same.

        Files of the Llama architecture keep a head's rows as for interleaved rotation, row 2j + s for
        our row s * head_dim / 2 + j: llama.cpp's `permute` in convert_hf_to_gguf.py, undone.
        """
        if self._spec.family is not Family.LLAMA or not name.endswith((".q", ".k")):
            return None
        half = self._spec.head_dim // 2
        return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)

    def _quantization(self) -> str:
        weights: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            weights[tensor.kind.name] += prod(tensor.shape)
        return weights.most_common(1)[0][0]


def _is_ignored(stored: str) -> bool:
    # Read into the spec, or (old files) tables that follow from it.
    return stored in ROPE_FACTOR_TENSORS or stored.endswith(
        ("attn_rot_embd.weight", "attn_rot_embd", "rope_freqs")
    )


def _dequantize(source: NDArray[np.uint8], tensor: GgufTensor, path: Path) -> FloatArray:
    """Turn stored rows into `[rows, shape[-1]]` floats.

    The package works through groups of 16 rows, which for short rows is mostly overhead; blocks are
    independent, so that many rows can go to it as one.
    """
    num_rows, row_bytes = source.shape
    result = np.empty((num_rows, tensor.shape[-1]), np.float32)
    step = max(1, _CHUNK_BYTES // row_bytes)
    with np.errstate(all="ignore"):  # what damaged scales do is seen by `check_finite`
        for first in range(0, num_rows, step):
            chunk = np.ascontiguousarray(source[first : first + step])
            part = result[first : first + step]
            part[:] = dequantize(chunk.reshape(1, -1), tensor.kind).reshape(part.shape)
            check_finite(part, tensor.name, path)
    return result
