"""The header of a GGUF file: metadata and the table of tensors, every count in it checked.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package supplies the
constants. Its reader is not used: it makes several NumPy views for each string of the vocabulary (1.8 s
for the demo model, against 0.04 s), and it trusts the counts and sizes in the file.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
)

from engines.api import CheckpointError

SUPPORTED_VERSIONS = (2, GGUF_VERSION)
SUPPORTED_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
"""How tensors may be stored."""

MAX_ARRAY_ITEMS = 1 << 22
"""Most items in a metadata array; the largest vocabularies have well under a million tokens or merges."""
MAX_ARRAY_DEPTH = 4
"""How deep arrays may hold arrays."""
MAX_DIMENSIONS = 4
"""Most dimensions of a tensor (GGML_MAX_DIMS)."""

_SCALARS: dict[GGUFValueType, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
    GGUFValueType.BOOL: struct.Struct("<?"),
}
_U32 = _SCALARS[GGUFValueType.UINT32]
_U64 = _SCALARS[GGUFValueType.UINT64]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first: the reverse of the file's order."""
    offset: int
    """From the start of the file, in bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a run of `shape[-1]` weights."""
        block: int
        size: int
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        """Rows in the tensor; a vector is one row."""
        return prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_rows * self.row_bytes


class GgufHeader:
    """A cursor over the header. Every count is checked against what is left of the file before use."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._num_tensors = 0
        self._num_entries = 0

    def read_preamble(self) -> None:
        """Read magic, version and counts."""
        if self._data[:4] != struct.pack("<I", GGUF_MAGIC):
            raise self._error("is not a GGUF file (it does not begin with GGUF); give a GGUF file")
        self._at = 4
        version = self._scalar(_U32)
        if version & 0xFFFF == 0 and version != 0:
            raise self._error("is a big-endian GGUF file; convert it with gguf-convert-endian")
        if version not in SUPPORTED_VERSIONS:
            allowed = " and ".join(map(str, SUPPORTED_VERSIONS))
            raise self._error(f"is GGUF version {version}; supported are versions {allowed}")
        self._num_tensors = self._scalar(_U64)
        self._num_entries = self._scalar(_U64)

    def read_metadata(self) -> dict[str, Any]:
        """Read the key-value pairs that follow the preamble."""
        metadata: dict[str, Any] = {}
        for _ in range(self._num_entries):
            key = self._string()
            if key in metadata:
                raise self._error(f"is damaged: metadata key {key!r} appears twice")
            metadata[key] = self._value(self._value_type())
        return metadata

    def read_tensors(self, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        """Read the table that follows the metadata and place the tensors in the file."""
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"is damaged: general.alignment is {alignment!r}, not a power of two")
        entries: dict[str, GgufTensor] = {}
        for _ in range(self._num_tensors):
            entry = self._tensor()
            if entry.name in entries:
                raise self._error(f"is damaged: tensor {entry.name!r} appears twice")
            entries[entry.name] = entry
        start = -(-self._at // alignment) * alignment
        return {name: self._placed(entry, start, alignment) for name, entry in entries.items()}

    def _tensor(self) -> GgufTensor:
        name = self._string()
        num_dimensions = self._scalar(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"is damaged: tensor {name!r} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(self._scalar(_U64) for _ in range(num_dimensions))[::-1]
        raw = self._scalar(_U32)
        offset = self._scalar(_U64)
        try:
            kind = GGMLQuantizationType(raw)
        except ValueError:
            kind = None
        if kind not in SUPPORTED_TYPES:
            stored = f"an unknown type, {raw}" if kind is None else kind.name
            allowed = ", ".join(supported.name for supported in SUPPORTED_TYPES)
            raise self._error(f"tensor {name!r} is stored as {stored}; supported are {allowed}")
        block = GGML_QUANT_SIZES[kind][0]
        if 0 in shape or shape[-1] % block:
            raise self._error(
                f"is damaged: tensor {name!r} of shape {list(shape)} does not divide into {kind.name} blocks "
                f"of {block}"
            )
        return GgufTensor(name, kind, shape, offset)

    def _placed(self, tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
        end = start + tensor.offset + tensor.num_bytes
        if tensor.offset % alignment:
            raise self._error(f"is damaged: tensor {tensor.name!r} is not aligned to {alignment} bytes")
        if end > self._size:
            raise self._error(
                f"is cut short: tensor {tensor.name!r} ends at byte {end}, the file at {self._size}; "
                "copy or download it again"
            )
        return GgufTensor(tensor.name, tensor.kind, tensor.shape, start + tensor.offset)

    def _value_type(self) -> GGUFValueType:
        raw = self._scalar(_U32)
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise self._error(f"is damaged: metadata of an unknown type, {raw}") from None

    def _value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        if depth == MAX_ARRAY_DEPTH:
            raise self._error(f"is damaged: metadata arrays nested deeper than {MAX_ARRAY_DEPTH}")
        item = self._value_type()
        count = self._scalar(_U64)
        if count > MAX_ARRAY_ITEMS:
            raise self._error(f"is damaged: a metadata array of {count} items, over {MAX_ARRAY_ITEMS}")
        if item is GGUFValueType.STRING:
            return self._strings(count)
        if item is GGUFValueType.ARRAY:
            return [self._value(item, depth + 1) for _ in range(count)]
        layout = _SCALARS[item]
        return [value for (value,) in layout.iter_unpack(self._bytes(count * layout.size))]

    def _scalar(self, layout: struct.Struct) -> Any:
        if self._at + layout.size > self._size:
            raise self._cut()
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _bytes(self, size: int) -> bytes:
        if self._at + size > self._size:
            raise self._cut()
        self._at += size
        return self._data[self._at - size : self._at]

    def _string(self) -> str:
        return self._text(self._bytes(self._scalar(_U64)))

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is 100,000 strings and more: locals, and no call per item but the unpacking.
        data, size, at = self._data, self._size, self._at
        length_at, items = _U64.unpack_from, []
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                if end > size:
                    raise self._cut()
                items.append(data[at + 8 : end].decode())
                at = end
        except struct.error:
            raise self._cut() from None
        except UnicodeDecodeError:
            raise self._error("is damaged: metadata text is not UTF-8") from None
        self._at = at
        return items

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error("is damaged: metadata text is not UTF-8") from None

    def _cut(self) -> CheckpointError:
        return self._error(f"is cut short or damaged: its header goes on beyond its {self._size} bytes")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")
