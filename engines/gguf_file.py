"""A GGUF file, memory-mapped: its metadata, and the bytes of its tensors."""

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.api import CheckpointError
from engines.gguf_header import GgufHeader, GgufTensor


class GgufFile:
    """An open GGUF file. Opening reads the header and checks that every tensor lies within the file."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Raises:
            CheckpointError: the file is not a whole GGUF file of a supported version.

        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = file.seek(0, 2)
                if self.size_bytes == 0:
                    raise CheckpointError(f"{path}: is empty; copy or download it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            header = GgufHeader(path, self._map)
            header.read_preamble()
            self.metadata: dict[str, Any] = header.read_metadata()
            """Values by key, as plain Python ones: int, float, bool, str, or a list of them."""
            self.tensors: dict[str, GgufTensor] = header.read_tensors(self.metadata)
            """By the file's own names, in the file's order."""
        except BaseException:
            self.close()
            raise

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """View a tensor's stored bytes as `[num_rows, row_bytes]`, without copying.

        Drop the view before closing: a mapped file cannot be unmapped under it.
        """
        flat = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(tensor.num_rows, tensor.row_bytes)

    def close(self) -> None:
        """Unmap the file. Closing twice is allowed."""
        # While an error is on its way up, its traceback may hold a view: the map then goes with that.
        with suppress(BufferError):
            self._map.close()
