"""openvino-genai's continuous batching, stepped in process."""

import importlib
import time
from importlib.metadata import version
from typing import Any

_MAX_STEP_TOKENS = 320
"""As many as ours."""
_BLOCK_SIZE = 32
"""Cells in a block of the CPU plugin's cache."""


def open_peer(model: str, *, num_threads: int, num_streams: int, num_cells: int) -> "OpenVinoLoop":
    """Open a folder with a model and the GGUF file that its tokenizer comes from, or a GGUF file alone."""
    return OpenVinoLoop(model, num_threads, num_streams, num_cells)


class OpenVinoLoop:
    """A pipeline with as much cache as the streams need, so that none has to wait."""

    def __init__(self, model: str, num_threads: int, num_streams: int, num_cells: int) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        config = self._genai.SchedulerConfig()
        config.max_num_batched_tokens = _MAX_STEP_TOKENS
        config.dynamic_split_fuse = True
        config.max_num_seqs = num_streams
        config.enable_prefix_caching = False
        config.num_kv_blocks = num_streams * (num_cells // _BLOCK_SIZE + 2)
        settings = {"INFERENCE_NUM_THREADS": num_threads}
        if model.endswith(".gguf"):  # all else by its own defaults
            self._pipeline = self._genai.ContinuousBatchingPipeline(model, config, "CPU", settings)
        else:
            tokenizer = self._genai.Tokenizer(f"{model}/tokenizer.gguf")
            exact = {"KV_CACHE_PRECISION": "f16", "INFERENCE_PRECISION_HINT": "f32"}
            self._pipeline = self._genai.ContinuousBatchingPipeline(
                model, tokenizer, config, "CPU", **settings, **exact
            )
        self._next_id = 0

    def describe(self) -> dict[str, str]:
        """Name what runs."""
        return {"version": version("openvino-genai")}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Generate `max_tokens` for each prompt, greedily."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        tensors = [self._openvino.Tensor([prompt]) for prompt in prompts]
        token_ids: list[list[int]] = [[] for _ in prompts]
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        began_s = time.perf_counter()
        handles = []
        for tensor in tensors:
            handles.append(self._pipeline.add_request(self._next_id, tensor, config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            at_s = time.perf_counter() - began_s
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        token_ids[i] += output.generated_ids
                        arrivals[i].append((at_s, len(output.generated_ids)))
        return list(zip(token_ids, arrivals, strict=True))
