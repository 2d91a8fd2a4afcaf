"""The weights of a prepared model: one file beside the ONNX graph, written tensor by tensor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from engines.api import FloatArray
from engines.options import WeightFormat
from engines.quantization import gains_by_offsets, pack_int4, quantize

ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes: a cache line and the widest vector register."""

CHUNK_BYTES = 16 << 20
"""Size of the float32 rows that are read, converted and written at once."""

_SAMPLE_ROWS = 256
"""Rows of a matrix that tell whether it gains by offsets."""


class WeightSource(Protocol):
    """Where the weights come from, such as a checkpoint."""

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Return a weight, or some of its rows, as float32 `[out, in]` (`[n]` for norms and biases)."""
        ...


class WeightFile:
    """Writes an ONNX model's external data, with little of it in memory at a time."""

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

    def array(
        self,
        name: str,
        value: NDArray[np.generic],
        kind: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> onnx.TensorProto:
        """Write a whole array.

        Args:
            name: its name in the graph.
            value: the bytes to write, in order.
            kind: what they are in ONNX, if that is not the array's own type: two int4 to a byte.
            shape: its shape in ONNX, if that is not the array's own.

        """
        offset = self._start()
        self._file.write(np.ascontiguousarray(value).view(np.uint8).data)
        own = onnx.helper.np_dtype_to_tensor_dtype(value.dtype) if kind is None else kind
        return self._tensor(name, own, value.shape if shape is None else shape, offset)

    def chunks(self, name: str, chunks: Iterable[NDArray[Any]]) -> onnx.TensorProto:
        """Write an array that comes in chunks, at least one, along its first axis."""
        offset, num_rows = self._start(), 0
        for chunk in chunks:
            self._file.write(np.ascontiguousarray(chunk).view(np.uint8).data)
            num_rows += len(chunk)
        kind = onnx.helper.np_dtype_to_tensor_dtype(chunk.dtype)
        return self._tensor(name, kind, (num_rows, *chunk.shape[1:]), offset)

    def rows(
        self, name: str, source: WeightSource, parts: Mapping[str, int], width: int, form: WeightFormat
    ) -> list[onnx.TensorProto]:
        """Write several weights below one another as one `[N, width]` matrix, chunk by chunk.

        Args:
            name: the matrix's name in the graph.
            source: where the weights come from.
            parts: each weight's name and its number of rows, top to bottom.
            width: columns that each part must have.
            form: how to hold the numbers; not int4.

        Returns:
            The matrix, and for int8 and fp8 `[N, 1]` float32 scales: row n is `matrix[n] * scales[n]`.

        """
        shape = (sum(parts.values()), width)
        kept_scales = []
        offset, kind = self._start(), 0
        for chunk in read_rows(source, parts, width):
            rounded = quantize(chunk, form)
            kind = onnx.helper.np_dtype_to_tensor_dtype(rounded.values.dtype)
            self._file.write(np.ascontiguousarray(rounded.values).view(np.uint8).data)
            if rounded.scales is not None:
                kept_scales.append(rounded.scales)
        tensor = self._tensor(name, kind, shape, offset)
        if not kept_scales:
            return [tensor]
        return [tensor, self.array(f"{name}_scale", np.concatenate(kept_scales))]

    def columns(
        self,
        name: str,
        source: WeightSource,
        parts: Mapping[str, int],
        width: int,
        form: WeightFormat,
        scale_type: DTypeLike,
    ) -> list[onnx.TensorProto]:
        """Write several weights beside one another as one `[width, N]` matrix, each a column's neighbours.

        The matrix is held in memory, in its stored type (int4 a byte each) and once more as it is written.

        Args:
            name: the matrix's name in the graph.
            source: where the weights come from.
            parts: each weight's name and its number of rows, which become columns.
            width: columns that each part must have, which become rows.
            form: how to hold the numbers.
            scale_type: of the scales.

        Returns:
            The matrix; if the form has scales, those: `[N]`, for int4 `[width / 32, N]`; and for int4 offsets
            of that shape, if the first weights gain by them.

        """
        num_columns = sum(parts.values())
        matrix: NDArray[Any] | None = None
        others: dict[str, list[NDArray[Any]]] = {"scale": [], "offset": []}
        column, with_offsets = 0, False
        for chunk in read_rows(source, parts, width):
            if matrix is None and form is WeightFormat.INT4:
                with_offsets = gains_by_offsets(chunk[:_SAMPLE_ROWS])
            rounded = quantize(chunk, form, scale_type, with_offsets=with_offsets)
            if matrix is None:
                matrix = np.empty((width, num_columns), rounded.values.dtype)
            matrix[:, column : column + len(chunk)] = rounded.values.T
            column += len(chunk)
            for kind, array in (("scale", rounded.scales), ("offset", rounded.offsets)):
                if array is not None:
                    others[kind].append(array)
        assert matrix is not None, "a matrix has parts"
        is_int4 = form is WeightFormat.INT4
        if is_int4:
            tensors = [self.array(name, pack_int4(matrix), onnx.TensorProto.INT4, matrix.shape)]
        else:
            tensors = [self.array(name, matrix)]
        for kind, arrays in others.items():
            if arrays:
                whole = np.concatenate(arrays)
                tensors.append(self.array(f"{name}_{kind}", whole.T if is_int4 else whole[:, 0]))
        return tensors

    def _start(self) -> int:
        """Pad to the alignment and return the position."""
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        return self._file.tell()

    def _tensor(self, name: str, kind: int, shape: Sequence[int], offset: int) -> onnx.TensorProto:
        """Describe what was written since `offset`."""
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = self._file.tell() - offset
        for key, value in {"location": self._name, "offset": str(offset), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=value)
        return tensor


def read_rows(source: WeightSource, parts: Mapping[str, int], width: int) -> Iterator[FloatArray]:
    """Read several weights top to bottom, in chunks of at most `CHUNK_BYTES`.

    Raises:
        ValueError: a part has another shape; the message names it.

    """
    step = max(1, CHUNK_BYTES // (4 * width))
    for part, rows in parts.items():
        for first in range(0, rows, step):
            count = min(step, rows - first)
            chunk = source.tensor(part, slice(first, first + count))
            if chunk.shape != (count, width):
                raise ValueError(f"rows of {part} are {chunk.shape}, expected {(count, width)}")
            yield chunk
