"""onnxruntime-genai's generator over a batch, stepped in process."""

import importlib
import json
import time
from importlib.metadata import version
from typing import Any

_MAX_BATCH = 32
"""What a generator takes; it refuses more."""


def open_peer(model: str, *, num_threads: int, num_streams: int, num_cells: int) -> "OnnxRuntimeLoop":
    """Open a folder with a genai_config.json; a batch's cache is made when it begins."""
    assert num_streams > 0
    assert num_cells > 0
    return OnnxRuntimeLoop(model, num_threads)


class OnnxRuntimeLoop:
    """A generator for each batch: its continuous batching wants a paged cache, which has no CPU kernel."""

    def __init__(self, model: str, num_threads: int) -> None:
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        self._numpy: Any = importlib.import_module("numpy")
        config = self._genai.Config(model)
        options = {"intra_op_num_threads": num_threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = self._genai.Model(config)

    def describe(self) -> dict[str, str]:
        """Name what runs."""
        return {"version": version("onnxruntime-genai"), "features": f"onnxruntime {version('onnxruntime')}"}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Generate `max_tokens` for each prompt, greedily, batch after batch; prompts have one length."""
        began_s = time.perf_counter()
        streams: list[Any] = []
        for first in range(0, len(prompts), _MAX_BATCH):
            streams += self._batch(prompts[first : first + _MAX_BATCH], max_tokens, began_s)
        return streams

    def _batch(self, prompts: list[list[int]], max_tokens: int, began_s: float) -> list[Any]:
        length = len(prompts[0]) + max_tokens
        params = self._genai.GeneratorParams(self._model)
        # Below the least length no end is chosen.
        params.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=length, max_length=length
        )
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(self._numpy.array(prompts, "int32"))
        token_ids: list[list[int]] = [[] for _ in prompts]
        times: list[float] = []
        for _ in range(max_tokens):
            generator.generate_next_token()
            for ids, token_id in zip(token_ids, generator.get_next_tokens(), strict=True):
                ids.append(int(token_id))
            times.append(time.perf_counter() - began_s)
        return [(ids, [(at_s, 1) for at_s in times]) for ids in token_ids]
