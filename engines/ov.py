"""The OpenVINO engine: paged attention on a CPU, prefill and decode mixed in one ragged step."""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.api import (
    CacheSpec,
    EngineError,
    EngineNotInstalledError,
    IntArray,
    OutOfMemoryError,
    StepBatch,
    StepResult,
)
from engines.memory import GIB, available_bytes, usable_processors
from engines.options import CacheType, EngineOptions, Precision
from engines.prepared import GRAPH_FILE, PreparedModel, PreparedModels
from engines.spec import ModelInfo

try:
    import openvino as ov
    from openvino import Type
    from openvino import opset13 as ops
    from openvino.frontend.onnx import ConversionExtension
except ImportError as error:
    raise EngineNotInstalledError(
        f"the openvino engine needs the package openvino ({error}); "
        "install it with: pip install 'streamsrv[openvino]'"
    ) from error

_LOG = logging.getLogger(__name__)

ENGINE_NAME = "openvino"

_DEFAULT_MEMORY_SHARE = 0.5
_DEFAULT_LONGEST_SEQUENCES = 4
_DEFAULT_TOKENS = 32_768

_CACHE_TYPES = {CacheType.U8: "u8", CacheType.BF16: "bf16", CacheType.F16: "f16", CacheType.F32: "f32"}


def open_openvino(
    path: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> "OpenVinoEngine":
    """Prepare a model, or take it out of the cache of prepared ones, and compile it.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineError: it could not be prepared or compiled.

    """
    store = PreparedModels(options.cache_folder, options.cache_folder_gib)
    prepared = store.open(path, options.weights, "paged", progress)
    try:
        progress("compile", 0.0)
        engine = OpenVinoEngine(prepared, options)
        progress("compile", 1.0)
    except BaseException:
        prepared.close()
        raise
    return engine


class OpenVinoEngine:
    """A compiled model; its weights are shared by all contexts."""

    def __init__(self, prepared: PreparedModel, options: EngineOptions) -> None:
        self._prepared = prepared
        self._options = options
        core = ov.Core()
        config = _configuration(core, options)
        try:
            model = _read_graph(core, prepared.folder / GRAPH_FILE)
            self._compiled: ov.CompiledModel | None = core.compile_model(model, "CPU", config)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not compile {prepared.model.name}: {error}") from error
        _LOG.info("compiled %s with %s", prepared.model.name, config)

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    @property
    def model(self) -> ModelInfo:
        """What the engine was made from."""
        return self._prepared.model

    def create_context(self) -> "OpenVinoContext":
        """Make a context on the calling thread.

        Raises:
            OutOfMemoryError: the cache does not fit in the memory allowed.

        """
        if self._compiled is None:
            raise EngineError("the engine is closed")
        return OpenVinoContext(self._compiled, self.model, self._options)

    def close(self) -> None:
        """Free the weights."""
        self._compiled = None
        self._prepared.close()
        _return_freed_memory()


class OpenVinoContext:
    """One infer request and the pools of keys and values that it reads and writes."""

    def __init__(self, compiled: ov.CompiledModel, model: ModelInfo, options: EngineOptions) -> None:
        self._spec = model.spec
        pools = [port for port in compiled.inputs if "_cache." in port.any_name]
        # [blocks, kv_heads, block_size, head_dim and, for u8, its scale]: the plugin's choice but the first.
        shapes = {
            port.any_name: [int(d.get_length()) for d in list(port.partial_shape)[1:]] for port in pools
        }
        block_size = shapes[pools[0].any_name][1]
        bytes_per_block = sum(int(np.prod(shapes[port.any_name])) * port.element_type.size for port in pools)
        num_blocks = _num_blocks(block_size, bytes_per_block, model, options)
        self._cache = CacheSpec(num_blocks, block_size, bytes_per_block)
        try:
            self._request: ov.InferRequest | None = compiled.create_infer_request()
            for port in pools:
                shape = ov.Shape([num_blocks, *shapes[port.any_name]])
                self._request.set_tensor(port.any_name, ov.Tensor(port.element_type, shape))
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"a cache of {num_blocks} blocks of {bytes_per_block} bytes, "
                f"{num_blocks * bytes_per_block / GIB:.2f} GiB, could not be allocated: {error}"
            ) from error
        self._held: dict[str, NDArray[np.generic]] = {}

    @property
    def cache(self) -> CacheSpec:
        """The cache's size."""
        return self._cache

    def step(self, batch: StepBatch) -> StepResult:
        """Compute a batch.

        Raises:
            EngineError: the batch makes no sense, or the step failed.

        """
        if self._request is None:
            raise EngineError("the context is closed")
        lengths = np.diff(batch.query_begins)
        contexts = batch.past_lens + lengths
        self._check(batch, lengths, contexts)
        positions = np.arange(batch.num_tokens, dtype=np.int64)
        positions -= np.repeat(batch.query_begins[:-1] - batch.past_lens, lengths)
        # The arrays are shared with OpenVINO, not copied: they must live until the next step.
        self._held = {
            "input_ids": batch.token_ids.reshape(-1, 1),
            "position_ids": positions.reshape(-1, 1),
            "past_lens": batch.past_lens,
            "subsequence_begins": batch.query_begins,
            "block_indices": batch.block_ids,
            "block_indices_begins": batch.block_begins,
            "max_context_len": contexts.max(initial=0, keepdims=True).reshape(()).astype(np.int32),
            "logit_rows": batch.logit_rows,
        }
        try:
            for name, array in self._held.items():
                self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
            self._request.infer()
            logits = self._request.get_output_tensor(0).data
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed in a step of {batch.num_tokens} tokens: {error}") from error
        return StepResult(logits)

    def close(self) -> None:
        """Free the cache."""
        if self._request is None:
            return
        self._request = None
        self._held = {}
        _return_freed_memory()

    def _check(self, batch: StepBatch, lengths: IntArray, contexts: IntArray) -> None:
        """Refuse what would read or write outside of the tables: a few microseconds."""
        longest = int(contexts.max(initial=0))
        if lengths.min(initial=1) < 1 or longest > self._spec.context_length:
            raise EngineError(
                f"a sequence of {longest} tokens, or one without new tokens; the model's context is "
                f"{self._spec.context_length}"
            )
        for what, ids, bound in (
            ("token id", batch.token_ids, self._spec.vocab_size),
            ("block", batch.block_ids, self._cache.num_blocks),
            ("logit row", batch.logit_rows, batch.num_tokens),
        ):
            if ids.size and (ids.min() < 0 or ids.max() >= bound):
                raise EngineError(f"a {what} is outside of 0 .. {bound - 1}")
        if (np.diff(batch.block_begins) * self._cache.block_size < contexts).any():
            raise EngineError("a sequence has fewer blocks than its tokens need")


def _configuration(core: ov.Core, options: EngineOptions) -> dict[str, object]:
    """Choose the plugin's settings."""
    native = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = options.precision
    if precision is Precision.AUTO:
        precision = Precision.BF16 if native else Precision.F32
    cache = options.cache_type
    if cache is CacheType.AUTO:
        cache = CacheType.BF16 if precision is Precision.BF16 else CacheType.F32
    config: dict[str, object] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": options.num_threads or usable_processors(),
        "INFERENCE_PRECISION_HINT": precision.value,
        "KV_CACHE_PRECISION": _CACHE_TYPES[cache],
    }
    return config


def _num_blocks(block_size: int, bytes_per_block: int, model: ModelInfo, options: EngineOptions) -> int:
    """Divide the memory allowed into blocks.

    Without a setting it is half of what the process can still take, but no more than four sequences of
    the greatest length need, or 32,768 tokens where that is more.

    Raises:
        OutOfMemoryError: not one block fits, or what was asked for is more than there is.

    """
    available = available_bytes()
    context = min(options.max_context or model.spec.context_length, model.spec.context_length)
    if options.cache_gib is not None:
        allowed = int(options.cache_gib * GIB)
        origin = f"the setting of {options.cache_gib:g} GiB"
    else:
        tokens = max(_DEFAULT_LONGEST_SEQUENCES * context, _DEFAULT_TOKENS)
        needed = -(-tokens // block_size) * bytes_per_block
        allowed = min(needed, int(available * _DEFAULT_MEMORY_SHARE))
        origin = f"half of the {available / GIB:.2f} GiB of memory left to this process"
    num_blocks = allowed // bytes_per_block
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"{origin} leaves {allowed} bytes for the cache, and one block of {block_size} tokens takes "
            f"{bytes_per_block} bytes; allow more memory or take a smaller model"
        )
    if allowed > available:
        raise OutOfMemoryError(
            f"{origin} is more than the {available / GIB:.2f} GiB of memory left to this process; lower the "
            "cache's memory or leave it unset"
        )
    return num_blocks


def _read_graph(core: ov.Core, path: Path) -> ov.Model:
    """Read the ONNX graph and turn the nodes of our own domain into OpenVINO's."""
    core.add_extension(ConversionExtension("Linear", "streamsrv", _convert_linear))
    core.add_extension(ConversionExtension("PagedAttention", "streamsrv", _convert_attention))
    model = core.read_model(path)
    for parameter in model.get_parameters():
        if "_cache." in parameter.get_friendly_name():
            parameter.set_element_type(Type.dynamic)  # the plugin sets type and layout when compiling
            parameter.set_partial_shape(ov.PartialShape([-1, -1, -1, -1]))
    model.validate_nodes_and_infer_types()
    return model


def _convert_linear(node: ov.frontend.NodeContext) -> list[ov.Output]:
    """Multiply by stored weights; in this form the plugin keeps int8 weights compressed."""
    weights = node.get_input(1)
    if weights.get_element_type() != Type.f32:
        weights = ops.convert(weights, Type.f32).output(0)
    if node.get_input_size() == 3:
        weights = ops.multiply(weights, node.get_input(2)).output(0)
    return list(ops.matmul(node.get_input(0), weights, False, True).outputs())


def _convert_attention(node: ov.frontend.NodeContext) -> list[ov.Output]:
    """Make the plugin's paged attention out of ours; what is not used are empty constants."""
    try:
        from openvino.op import _PagedAttentionExtension
    except ImportError as error:
        raise EngineError(
            f"OpenVINO {ov.__version__} has no paged attention under its known name; "
            "install a version that streamsrv supports: pip install 'streamsrv[openvino]'"
        ) from error

    def constant(value: object, kind: type[np.generic]) -> ov.Output:
        return ops.constant(np.array(value, kind)).output(0)

    def empty(kind: type[np.generic], rank: int = 1) -> ov.Output:
        return ops.constant(np.zeros((0,) * rank, kind)).output(0)

    arguments = [node.get_input(i) for i in range(9)]
    arguments += [
        constant(node.get_attribute("scale"), np.float32),
        constant(0, np.int32),  # sliding window: none
        empty(np.float32),  # ALiBi slopes
        node.get_input(9),
        empty(np.int32),  # score aggregation window
        empty(np.int32),  # rotated block indices
        empty(np.int32),  # rotation deltas
        empty(np.float32),  # rotation table
        empty(np.float32),  # sparse attention: threshold
        constant(0, np.int32),  # its block size
        constant(0, np.int32),  # its stride
        empty(np.float32, 4),  # sinks
        constant(0, np.int32),  # adaptive eviction: start size
        empty(np.int32),  # its evictable sizes
        empty(np.int32),  # its block indices
        empty(np.int32),  # their begins
        empty(np.int32),  # token type ids
        empty(np.uint8),
        empty(np.int32),
    ]
    attention = _PagedAttentionExtension(arguments)
    heads, width = node.get_attribute("num_kv_heads"), node.get_attribute("head_dim")
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = heads
    info["k_head_size"] = info["v_head_size"] = width
    return list(attention.outputs()[:1])


def _return_freed_memory() -> None:
    """Ask the allocator to give freed pages back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
