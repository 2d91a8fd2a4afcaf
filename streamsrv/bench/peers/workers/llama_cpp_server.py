"""llama.cpp's own HTTP server, as the package xllamacpp has it."""

import importlib
from importlib.metadata import version
from typing import Any


def open_peer(model: str, *, num_threads: int, num_streams: int, num_cells: int) -> "LlamaCppServer":
    """Serve a GGUF file on a free port of this machine."""
    return LlamaCppServer(model, num_threads, num_streams, num_cells)


class LlamaCppServer:
    """A server with a slot for each stream, and the prompts' cache off."""

    def __init__(self, model: str, num_threads: int, num_streams: int, num_cells: int) -> None:
        library: Any = importlib.import_module("xllamacpp")
        params = library.CommonParams()
        params.model.path = model
        params.n_parallel = num_streams
        params.n_ctx = num_streams * num_cells
        params.cpuparams.n_threads = num_threads
        params.cpuparams_batch.n_threads = num_threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        self._server = library.Server(params)
        # As "CPU : AVX2 = 1 | FMA = 1 | ".
        told = [part.split(" = ") for part in library.get_system_info().split(":")[-1].split("|")]
        self._features = " ".join(part[0].strip() for part in told if part[1:] == ["1 "])

    def describe(self) -> dict[str, str]:
        """Name what runs, and where."""
        return {
            "version": version("xllamacpp"),
            "address": self._server.listening_address,
            "features": self._features,
        }
