"""A GGUF file's weights in another format, for engines that have faster kernels for it."""

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType

_FILE_TYPES = {
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def copy_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Write `source` anew with its matrices in `kind`, F16 or Q8_0, and its vectors in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        # The first ones are of the file's own layout, which the writer makes; it knows the architecture.
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(_FILE_TYPES[kind]) if name == "general.file_type" else field.contents()
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
