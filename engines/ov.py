"""The OpenVINO engine: paged attention on a CPU, prefill and decode mixed in one ragged step."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.api import (
    CacheSpec,
    EngineError,
    EngineNotInstalledError,
    OutOfMemoryError,
    StepBatch,
    StepResult,
)
from engines.cachesize import size_cache
from engines.form import Dialect, GraphForm
from engines.memory import (
    GIB,
    available_bytes,
    drop_mapped_pages,
    return_freed_memory,
    usable_processors,
)
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.preparation import GRAPH_FILE, WEIGHTS_FILE
from engines.prepared import PreparedModel, PreparedModels
from engines.signal_stack import keeping_signal_stack
from engines.spec import ModelInfo, ModelSpec

# oneDNN, in OpenVINO, would keep up to 1,024 products for shapes seen before, half a megabyte for each number
# of tokens, beside those that the plugin keeps itself; without them new shapes took no longer.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
# Importing openvino reports that to its makers, if it finds this package: over the network, unasked, and from
# a process that it forks for it. In a server whose threads run already, such processes crashed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

try:
    import openvino as ov
    from openvino import Type

    from engines.ov_graph import read_graph
except ImportError as error:
    raise EngineNotInstalledError(
        f"the openvino engine needs the package openvino ({error}); "
        "install it with: pip install 'streamsrv[openvino]'"
    ) from error

_LOG = logging.getLogger(__name__)

ENGINE_NAME = "openvino"

_WEIGHTS = (WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FLOAT32)
"""What this engine can hold; the first is what AUTO is."""
_CACHE_TYPES = {
    # The plugin's attention reads bf16 caches only when it computes in bf16, and f16 and f32 ones only
    # when in f32. The first of each row is what AUTO is: two bytes a number cost no accuracy that shows
    # beside int8 weights, and read at twice the speed of f32; u8 was slower than both.
    Precision.BF16: (CacheType.BF16, CacheType.U8),
    Precision.F32: (CacheType.F16, CacheType.F32, CacheType.U8),
}


def open_openvino(
    path: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> "OpenVinoEngine":
    """Prepare a model, or take it out of the cache of prepared ones, and compile it.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineError: the settings exclude each other, or it could not be prepared or compiled.

    """
    if options.weights is WeightFormat.AUTO:
        options = replace(options, weights=_WEIGHTS[0])
    if options.weights not in _WEIGHTS:
        raise EngineError(
            f"the openvino engine does not hold weights as {options.weights.value}; they may be "
            f"{', '.join(form.value for form in _WEIGHTS)}"
        )
    # The plugin gives the thread a signal stack, one for each Core, and frees them in any order.
    with keeping_signal_stack():
        core = ov.Core()
        settings = _settings(core, options)
        store = PreparedModels(options.cache_folder, options.cache_folder_gib)
        prepared = store.open(path, GraphForm(Dialect.PAGED, options.weights), progress)
        try:
            progress("compile", 0.0)
            engine = OpenVinoEngine(core, prepared, options, settings)
            progress("compile", 1.0)
        except BaseException:
            prepared.close()
            raise
    return engine


class OpenVinoEngine:
    """A compiled model; its weights are shared by all contexts."""

    def __init__(
        self, core: ov.Core, prepared: PreparedModel, options: EngineOptions, settings: dict[str, Any]
    ) -> None:
        """Compile a prepared model, with the plugin's settings, and own it.

        Raises:
            EngineError: OpenVINO refuses the model.

        """
        self._prepared = prepared
        self._options = options
        self._contexts: set[OpenVinoContext] = set()
        self._lock = threading.Lock()  # contexts are made on threads of their own
        try:
            activations = getattr(Type, settings["INFERENCE_PRECISION_HINT"])
            model = read_graph(core, prepared.folder / GRAPH_FILE, activations)
            self._compiled: ov.CompiledModel | None = core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not compile {prepared.model.name}: {error}") from error
        del model
        self._pools = _Pools(self._compiled)
        self._warm_up()
        drop_mapped_pages(prepared.folder / WEIGHTS_FILE)
        return_freed_memory()
        processor = core.get_property("CPU", "FULL_DEVICE_NAME")
        _LOG.info("compiled %s for %s with %s", prepared.model.name, processor, settings)

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
        with self._lock:
            if self._compiled is None:
                raise EngineError("the engine is closed")
            promised = sum(context.promised_bytes for context in self._contexts)
            available = max(0, available_bytes() - promised)
            pools, spec = self._pools, self.model.spec
            cache = size_cache(spec, self._options, pools.block_size, pools.bytes_per_block, available)
            context = OpenVinoContext(self._compiled, spec, pools, cache, self._on_closed)
            self._contexts.add(context)
            return context

    def close(self) -> None:
        """Free the weights."""
        self._compiled = None
        self._prepared.close()
        return_freed_memory()

    def _warm_up(self) -> None:
        """Take a step on the smallest cache.

        The first step copies the weights into the order that they are multiplied in. No request should
        wait for that, and the memory left for caches is to be counted after it.
        """
        assert self._compiled is not None
        cache = CacheSpec(1, self._pools.block_size, self._pools.bytes_per_block)
        context = OpenVinoContext(self._compiled, self.model.spec, self._pools, cache, lambda _: None)
        zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        context.step(StepBatch(np.zeros(1, np.int64), zero, one, zero, one, np.zeros(1, np.int64)))
        context.close()

    def _on_closed(self, context: "OpenVinoContext") -> None:
        with self._lock:
            self._contexts.discard(context)


class _Pools:
    """The compiled model's inputs for keys and values, and what a block of them takes."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        # A port, and the type that it gives out, would keep the compiled model alive, weights and all.
        ports = [port for port in compiled.inputs if "_cache." in port.any_name]
        self._types = {port.any_name: _own(port.element_type) for port in ports}
        # [blocks, kv_heads, block_size, head_dim], and for u8 what its scales take: the plugin decides all
        # but the number of blocks.
        self._shapes = {
            port.any_name: [int(size.get_length()) for size in list(port.partial_shape)[1:]] for port in ports
        }
        self.block_size = self._shapes["value_cache.0"][1]  # a u8 key pool has rows for scales below these
        self.bytes_per_block = sum(
            prod(shape) * self._types[name].size for name, shape in self._shapes.items()
        )

    @property
    def names(self) -> Set[str]:
        """The inputs' names."""
        return self._shapes.keys()

    def allocate(self, request: ov.InferRequest, num_blocks: int) -> None:
        """Give a request its pools; the system gives the memory when it is first written."""
        for name, shape in self._shapes.items():
            request.set_tensor(name, ov.Tensor(self._types[name], ov.Shape([num_blocks, *shape])))


class OpenVinoContext:
    """One infer request and the pools of keys and values that it reads and writes."""

    num_candidates = 0

    def __init__(
        self,
        compiled: ov.CompiledModel,
        spec: ModelSpec,
        pools: _Pools,
        cache: CacheSpec,
        on_closed: Callable[["OpenVinoContext"], None],
    ) -> None:
        """Allocate the cache; `on_closed` hears when it is free again."""
        self._spec = spec
        self._cache = cache
        self._used = np.zeros(cache.num_blocks, np.bool_)
        self._on_closed = on_closed
        self._size = _StepSize(cache.block_size)
        try:
            self._request: ov.InferRequest | None = compiled.create_infer_request()
            # One more block, after the others, is for the padding of a step.
            pools.allocate(self._request, cache.num_blocks + 1)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"a cache of {cache.num_blocks} blocks of {cache.bytes_per_block} bytes, "
                f"{cache.num_blocks * cache.bytes_per_block / GIB:.2f} GiB, could not be allocated: {error}"
            ) from error
        self._inputs = {
            port.any_name: _Input(self._request, index, _own(port.element_type))
            for index, port in enumerate(compiled.inputs)
            if port.any_name not in pools.names
        }

    @property
    def cache(self) -> CacheSpec:
        """The cache's size."""
        return self._cache

    @property
    def promised_bytes(self) -> int:
        """Memory of blocks never used so far: the system gives it when they are first written."""
        num_unused = self._cache.num_blocks - int(np.count_nonzero(self._used))
        return num_unused * self._cache.bytes_per_block

    def step(self, batch: StepBatch) -> StepResult:
        """Compute a batch.

        Raises:
            EngineError: the batch makes no sense, or the step failed.

        """
        if self._request is None:
            raise EngineError("the context is closed")
        self._check(batch)
        self._used[batch.block_ids] = True
        num_rows = len(batch.logit_rows)
        batch = _padded(batch, self._size.of(batch.num_tokens), self._cache.num_blocks)
        begins, past = batch.query_begins, batch.past_lens
        lengths = begins[1:] - begins[:-1]
        if batch.num_tokens == batch.num_sequences:  # one token each
            positions = past
        else:
            positions = np.repeat(past - begins[:-1], lengths) + np.arange(batch.num_tokens, dtype=np.int32)
        inputs = self._inputs
        try:
            inputs["input_ids"].set(batch.token_ids[:, None])
            inputs["position_ids"].set(positions[:, None])
            inputs["past_lens"].set(past)
            inputs["subsequence_begins"].set(begins)
            inputs["block_indices"].set(batch.block_ids)
            inputs["block_indices_begins"].set(batch.block_begins)
            inputs["max_context_len"].set(np.asarray((past + lengths).max()))
            inputs["logit_rows"].set(batch.logit_rows)
            self._request.infer(share_outputs=True)  # other Python threads run meanwhile
            return StepResult(self._request.get_output_tensor(0).data[:num_rows])
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed in a step of {batch.num_tokens} tokens: {error}") from error

    def close(self) -> None:
        """Free the cache."""
        if self._request is None:
            return
        self._request = None
        self._inputs = {}
        return_freed_memory()
        self._on_closed(self)

    def _check(self, batch: StepBatch) -> None:
        """Refuse what would make the plugin read or write outside of its tables."""
        lengths = batch.query_begins[1:] - batch.query_begins[:-1]
        contexts = batch.past_lens + lengths
        if not batch.num_sequences or lengths.min() < 1 or batch.query_begins[-1] != batch.num_tokens:
            raise EngineError("a step needs sequences, and each of them new tokens")
        longest = int(contexts.max())
        if longest > self._spec.context_length or batch.past_lens.min() < 0:
            raise EngineError(
                f"a sequence of {longest} tokens does not fit in the context of {self._spec.context_length}"
            )
        for what, ids, bound in (
            ("token id", batch.token_ids.view(np.uint64), self._spec.vocab_size),
            ("block", batch.block_ids.view(np.uint32), self._cache.num_blocks),
            ("logit row", batch.logit_rows.view(np.uint64), batch.num_tokens),
        ):
            if ids.max(initial=0) >= bound:  # unsigned: a negative number is a huge one
                raise EngineError(f"a {what} of the step is not in 0 .. {bound - 1}")
        num_blocks = batch.block_begins[1:] - batch.block_begins[:-1]
        if (num_blocks * self._cache.block_size < contexts).any():
            raise EngineError("a sequence has fewer blocks than its tokens need")


class _StepSize:
    """How many tokens a step computes: those of its batch and, at times, some more.

    Two at least: the plugin multiplies a single row by another kernel, which rounds differently. So a
    sequence's logits are the same whoever else is in the step, or nobody.

    A step of another size than the one before prepares every product anew: 3 ms for 30 layers, as much as 10
    more tokens take (AVX-512, 2 cores). So a smaller batch is padded to the last size until those tokens have
    cost about as much as a change: never much more than the better of changing always and never.
    """

    _MOST_PADDING = 10

    def __init__(self, block_size: int) -> None:
        """The padding of a step fits in a block of `block_size` tokens."""
        self._most = min(self._MOST_PADDING, block_size)
        self._size = 0
        self._padding = 0

    def of(self, num_tokens: int) -> int:
        """Choose the size of the next step."""
        num_tokens = max(2, num_tokens)
        missing = self._size - num_tokens
        self._padding += missing
        if missing < 0 or self._padding > self._most:
            self._size, self._padding = num_tokens, 0
        elif missing == 0:
            self._padding = 0  # it was worth keeping
        return self._size


def _padded(batch: StepBatch, size: int, spare_block: int) -> StepBatch:
    """Let a step compute `size` tokens and two rows of logits at least."""
    rows, num_missing = batch.logit_rows, size - batch.num_tokens
    if len(rows) == 1:
        rows = np.repeat(rows, 2)
    if not num_missing:
        return batch if rows is batch.logit_rows else replace(batch, logit_rows=rows)
    return StepBatch(
        token_ids=np.append(batch.token_ids, np.zeros(num_missing, batch.token_ids.dtype)),
        past_lens=np.append(batch.past_lens, np.int32(0)),
        query_begins=np.append(batch.query_begins, np.int32(size)),
        block_ids=np.append(batch.block_ids, np.int32(spare_block)),
        block_begins=np.append(batch.block_begins, np.int32(len(batch.block_ids) + 1)),
        logit_rows=rows,
    )


class _Input:
    """One of the request's inputs, in memory of its own that is kept while its shape stays."""

    def __init__(self, request: ov.InferRequest, index: int, kind: Type) -> None:
        self._request = request
        self._index = index
        self._kind = kind
        self._values: NDArray[Any] | None = None

    def set(self, values: NDArray[Any]) -> None:
        """Copy values in: cheaper for the few that they are than to bind a new tensor at each step."""
        if self._values is None or self._values.shape != values.shape:
            tensor = ov.Tensor(self._kind, ov.Shape(values.shape))
            self._request.set_input_tensor(self._index, tensor)
            self._values = tensor.data
        self._values[...] = values


def _settings(core: ov.Core, options: EngineOptions) -> dict[str, Any]:
    """Choose the plugin's settings.

    Raises:
        EngineError: the cache type does not go with the precision.

    """
    precision, cache_type = options.precision, options.cache_type
    if precision is Precision.F16:
        raise EngineError("the openvino engine does not compute in f16 on a CPU; it may be bf16 or f32")
    if precision is Precision.AUTO:
        # int8 products run on the same units in either precision, unless there are matrix units for bf16;
        # f32 then costs nothing beside them, and is closer to the checkpoint.
        has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        fits = options.weights not in (WeightFormat.AUTO, WeightFormat.INT8) or _has_matrix_units()
        precision = Precision.BF16 if has_bf16 and fits else Precision.F32
        if cache_type not in (CacheType.AUTO, *_CACHE_TYPES[precision]):
            precision = Precision.F32 if precision is Precision.BF16 else Precision.BF16
    allowed = _CACHE_TYPES[precision]
    if cache_type is CacheType.AUTO:
        exact = options.precision is Precision.F32 and options.weights is WeightFormat.FLOAT32
        cache_type = CacheType.F32 if exact else allowed[0]
    if cache_type not in allowed:
        raise EngineError(
            f"the openvino engine keeps no {cache_type.value} cache when it computes in {precision.value}; "
            f"then it may be {', '.join(kind.value for kind in allowed)}"
        )
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision.value,
        "KV_CACHE_PRECISION": cache_type.value,
        "INFERENCE_NUM_THREADS": options.num_threads or usable_processors(),
        # What is kept for each number of tokens that a step had: at 200, resident memory stayed flat from the
        # 400th of 1,600 random mixes on; by default it grew by 500 MB in 3,000, at the same speed.
        "CPU_RUNTIME_CACHE_CAPACITY": 200,
        # A pinned thread waits for its processor while the server's loop has it; the others wait for it.
        "ENABLE_CPU_PINNING": False,
    }
    # Before int8 weights the plugin rounds activations to 8 bits; asked for f32, it does not.
    is_rounded = options.precision is not Precision.F32
    settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = options.activation_group if is_rounded else 0
    return settings


def _has_matrix_units() -> bool:
    """Whether the processor has AMX for bf16, which OpenVINO's list of capabilities does not tell."""
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _own(kind: Type) -> Type:
    """Return OpenVINO's own object for a type, in place of a port's."""
    own: Type = getattr(Type, kind.get_type_name())
    return own
