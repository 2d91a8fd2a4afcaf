"""The weights of a prepared model: one file beside the ONNX graph, written tensor by tensor."""

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from engines.api import FloatArray
from engines.options import WeightFormat

ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes: a cache line and the widest vector register."""

CHUNK_BYTES = 16 << 20
"""Size of the float32 rows that are read, converted and written at once."""


class WeightSource(Protocol):
    """Where the weights come from, such as a checkpoint."""

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Return a weight, or some of its rows, as float32 `[out, in]` (`[n]` for norms and biases)."""
        ...


class WeightFile:
    """Writes an ONNX model's external data: never more than a few chunks of a matrix in memory."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> Self:
        """Hold the file open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def array(self, name: str, value: NDArray[np.generic]) -> onnx.TensorProto:
        """Write a whole small array."""
        offset = self._start()
        self._file.write(np.ascontiguousarray(value).tobytes())
        return self._tensor(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, offset)

    def matrix(
        self, name: str, source: WeightSource, parts: dict[str, int], width: int, form: WeightFormat
    ) -> tuple[onnx.TensorProto, onnx.TensorProto | None]:
        """Write several weights below one another as one `[N, width]` matrix.

        Args:
            name: the matrix's name in the graph.
            source: where the weights come from.
            parts: each weight's name and its number of rows, top to bottom.
            width: columns that each part must have.
            form: how to hold the numbers.

        Returns:
            The matrix, and for int8 also `[N, 1]` float32 scales: row n is `matrix[n] * scales[n]`.

        """
        num_rows = sum(parts.values())
        scales = np.empty((num_rows, 1), np.float32)
        step = max(1, CHUNK_BYTES // (4 * width))
        offset, row = self._start(), 0
        for part, rows in parts.items():
            for first in range(0, rows, step):
                chunk: NDArray[Any] = source.tensor(part, slice(first, min(first + step, rows)))
                count = min(first + step, rows) - first
                if chunk.shape != (count, width):
                    raise ValueError(f"rows of {part} are {chunk.shape}, expected {(count, width)}")
                if form is WeightFormat.INT8:
                    chunk, scales[row : row + count] = quantize_rows(chunk)
                elif form is WeightFormat.BF16:
                    chunk = chunk.astype(ml_dtypes.bfloat16)
                self._file.write(np.ascontiguousarray(chunk).view(np.uint8).data)
                row += count
        tensor = self._tensor(name, _ONNX_TYPES[form], (num_rows, width), offset)
        if form is not WeightFormat.INT8:
            return tensor, None
        return tensor, self.array(f"{name}_scale", scales)

    def _start(self) -> int:
        """Pad to the alignment and return the position."""
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        return self._file.tell()

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> onnx.TensorProto:
        """Describe what was written since `offset`."""
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = self._file.tell() - offset
        for key, value in {"location": self._name, "offset": str(offset), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=value)
        return tensor


def quantize_rows(matrix: FloatArray) -> tuple[NDArray[np.int8], FloatArray]:
    """Round each row to int8, symmetric about zero.

    Args:
        matrix: `[rows, width]`.

    Returns:
        `[rows, width]` in -127 .. 127 and `[rows, 1]` scales; the product is off by at most half a scale.

    """
    scales = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1  # a row of zeros stays one
    levels = matrix / scales
    np.rint(levels, out=levels)
    return levels.astype(np.int8), scales


_ONNX_TYPES = {
    WeightFormat.INT8: onnx.TensorProto.INT8,
    WeightFormat.BF16: onnx.TensorProto.BFLOAT16,
    WeightFormat.FLOAT32: onnx.TensorProto.FLOAT,
}
