"""The ONNX Runtime engine: a row of the cache for each sequence, on a CPU."""

import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from engines.api import (
    CacheSpec,
    EngineError,
    EngineNotInstalledError,
    FloatArray,
    OutOfMemoryError,
    StepBatch,
    StepResult,
)
from engines.form import Dialect, GraphForm
from engines.linear import Move, Rows, Run
from engines.linear_memory import row_length, size_rows
from engines.memory import GIB, available_bytes, drop_mapped_pages, return_freed_memory, usable_processors
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.ort_forms import RUN_INPUTS, RunInputs
from engines.preparation import GRAPH_FILE, WEIGHTS_FILE
from engines.prepared import PreparedModel, PreparedModels
from engines.spec import ModelInfo, ModelSpec

try:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as _ort_errors
except ImportError as error:
    raise EngineNotInstalledError(
        f"the onnxruntime engine needs the package onnxruntime ({error}); "
        "install it with: pip install 'streamsrv[onnxruntime]'"
    ) from error

_LOG = logging.getLogger(__name__)

ENGINE_NAME = "onnxruntime"

_FAULTS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(_ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""What ONNX Runtime raises: a class for each of its status codes, with no root of their own."""

_WEIGHTS = (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FLOAT32)
_SPIN_US = 30
"""How long its threads wait awake for the next node, in microseconds. By default they do so for 20 ms, on
processors that the server's loop and other contexts need. At 30 the fastest steps of one token took 0.7 to
0.8 of the time that they took without any; more only cost processor time, and on a busy machine made steps
longer."""
_MAX_PIECE = 512
"""Most tokens of a sequence in one run: attention's scores take 4 bytes for each head, token and cell."""
_MAX_BINDINGS = 8
"""Ranges of rows whose addresses stay bound. From one step to the next the range is most often the same; a
new one takes 0.3 ms on a model of 30 layers, beside 0.04 ms for a step's other work in Python."""


def open_onnxruntime(
    path: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> "OnnxRuntimeEngine":
    """Prepare a model, or take it out of the cache of prepared ones, and load it.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineError: the engine does not have what the settings ask for, or the model could not be prepared
            or loaded.

    """
    form = _form(options)
    store = PreparedModels(options.cache_folder, options.cache_folder_gib)
    prepared = store.open(path, form, progress)
    try:
        progress("compile", 0.0)
        engine = OnnxRuntimeEngine(prepared, form, options)
        progress("compile", 1.0)
    except BaseException:
        prepared.close()
        raise
    return engine


class OnnxRuntimeEngine:
    """A loaded model; its weights and its threads are shared by all contexts."""

    def __init__(self, prepared: PreparedModel, form: GraphForm, options: EngineOptions) -> None:
        """Load a prepared model and own it.

        Raises:
            EngineError: ONNX Runtime refuses the model.

        """
        self._prepared = prepared
        self._options = options
        self._inputs = RUN_INPUTS[form.dialect]
        spec = prepared.model.spec
        self._max_len = row_length(spec, options)
        self._model = replace(prepared.model, spec=replace(spec, context_length=self._max_len))
        self._contexts: set[OnnxRuntimeContext] = set()
        self._lock = threading.Lock()  # contexts are made on threads of their own
        num_threads = options.num_threads or usable_processors()
        try:
            self._session: ort.InferenceSession | None = ort.InferenceSession(
                str(prepared.folder / GRAPH_FILE),
                _session_options(num_threads),
                providers=["CPUExecutionProvider"],
            )
        except _FAULTS as error:
            raise EngineError(f"ONNX Runtime could not load {prepared.model.name}: {error}") from error
        drop_mapped_pages(prepared.folder / WEIGHTS_FILE)
        return_freed_memory()
        _LOG.info("loaded %s as %s for %d threads", prepared.model.name, form.label, num_threads)

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    @property
    def model(self) -> ModelInfo:
        """What the engine was made from; its context is no longer than a row."""
        return self._model

    def create_context(self) -> "OnnxRuntimeContext":
        """Make a context on the calling thread.

        Raises:
            OutOfMemoryError: the cache does not fit in the memory allowed.

        """
        with self._lock:
            if self._session is None:
                raise EngineError("the engine is closed")
            promised = sum(context.promised_bytes for context in self._contexts)
            available = max(0, available_bytes() - promised)
            bytes_per_row = self._max_len * _bytes_per_cell(self._model.spec)
            cache = size_rows(self._options, self._max_len, bytes_per_row, available)
            context = OnnxRuntimeContext(
                self._session, self._model.spec, cache, self._inputs, self._on_closed
            )
            self._contexts.add(context)
            return context

    def close(self) -> None:
        """Free the weights."""
        self._session = None
        self._prepared.close()
        return_freed_memory()

    def _on_closed(self, context: "OnnxRuntimeContext") -> None:
        with self._lock:
            self._contexts.discard(context)


class OnnxRuntimeContext:
    """The rows of a cache, and the addresses of ranges of them bound to a session."""

    num_candidates = 0
    """Full logits are here already."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec,
        cache: CacheSpec,
        inputs: RunInputs,
        on_closed: Callable[["OnnxRuntimeContext"], None],
    ) -> None:
        """Allocate the cache; `on_closed` hears when it is free again."""
        self._session: ort.InferenceSession | None = session
        self._spec = spec
        self._cache = cache
        self._inputs = inputs
        self._on_closed = on_closed
        num_rows = cache.num_blocks + 1
        try:
            self._rows = Rows(
                cache.num_blocks,
                cache.block_size,
                vocab_size=spec.vocab_size,
                max_piece=_MAX_PIECE,
                max_logit_rows=max(_MAX_PIECE, num_rows),
                max_batch=num_rows,
            )
            self._written = np.zeros(num_rows, np.int64)
            """Cells of each row that the system has given memory for."""
            self._caches = _allocate(spec, num_rows, cache.block_size)
            self._logits = np.empty((num_rows, spec.vocab_size), np.float32)
            self._apart = np.empty((num_rows, spec.vocab_size), np.float32)
            """Logits of runs whose rows are not wanted, or not one after the other."""
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise OutOfMemoryError(
                f"a cache of {num_rows} rows of {cache.bytes_per_block} bytes, "
                f"{num_rows * cache.bytes_per_block / GIB:.2f} GiB, could not be allocated: {error}"
            ) from error
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        """By first row and number of rows; the one used last at the end."""
        self._constant = inputs.constant(cache.block_size)

    @property
    def cache(self) -> CacheSpec:
        """The cache's size."""
        return self._cache

    @property
    def promised_bytes(self) -> int:
        """Memory of cells never written so far: the system gives it when they are."""
        num_cells = self._written.size * self._cache.block_size - int(self._written.sum())
        return num_cells * _bytes_per_cell(self._spec)

    def step(self, batch: StepBatch) -> StepResult:
        """Compute a batch.

        Raises:
            EngineError: the batch makes no sense, or the step failed.

        """
        if self._session is None:
            raise EngineError("the context is closed")
        plan = self._rows.plan(batch)
        num_results = len(batch.logit_rows)
        logits = self._logits[:num_results]
        if len(logits) < num_results:  # such as for the logits of a prompt's tokens; not kept
            logits = np.empty((num_results, self._spec.vocab_size), np.float32)
        for move in plan.moves:
            self._move(move)
        try:
            for run in plan.runs:
                self._run(self._session, run, logits)
        except _FAULTS as error:
            raise EngineError(
                f"ONNX Runtime failed in a step of {batch.num_tokens} tokens: {error}"
            ) from error
        return StepResult(logits)

    def close(self) -> None:
        """Free the cache."""
        if self._session is None:
            return
        self._session = None
        self._bindings = {}
        self._caches = {}
        self._logits = self._apart = self._logits[:0].copy()
        return_freed_memory()
        self._on_closed(self)

    def _move(self, move: Move) -> None:
        for cache in self._caches.values():
            cache[move.target, :, : move.num_cells] = cache[move.source, :, : move.num_cells]
        self._written[move.target] = max(self._written[move.target], move.num_cells)

    def _run(self, session: ort.InferenceSession, run: Run, logits: FloatArray) -> None:
        written = self._written[run.first_row : run.first_row + run.num_rows]
        np.maximum(written, run.write_indices + run.token_ids.shape[1], out=written)
        binding = self._binding(session, run.first_row, run.num_rows)
        for name, value in self._inputs.of(run).items():
            binding.bind_cpu_input(name, value)
        count, results = len(run.logit_rows), run.results
        in_place = len(results) == count == results[-1] - results[0] + 1
        target = logits[results[0] : results[0] + count] if in_place else self._apart[:count]
        binding.bind_output("logits", "cpu", 0, np.float32, target.shape, target.ctypes.data)
        session.run_with_iobinding(binding)  # other Python threads run meanwhile
        if not in_place:
            logits[results] = target[: len(results)]

    def _binding(self, session: ort.InferenceSession, first_row: int, num_rows: int) -> ort.IOBinding:
        """Bind a range of rows as a run's cache and as what it makes of it: it is then written in place."""
        key = first_row, num_rows
        binding = self._bindings.pop(key, None)
        if binding is None:
            if len(self._bindings) == _MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            binding = session.io_binding()
            for name, value in self._constant.items():
                binding.bind_cpu_input(name, value)
            for name, cache in self._caches.items():
                rows = cache[first_row : first_row + num_rows]
                place = "cpu", 0, np.float32, rows.shape, rows.ctypes.data
                binding.bind_input(name, *place)
                binding.bind_output(f"new_{name}", *place)
        self._bindings[key] = binding
        return binding


def _bytes_per_cell(spec: ModelSpec) -> int:
    """Memory of one token's keys and values over all layers, in float32."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4


def _allocate(spec: ModelSpec, num_rows: int, max_len: int) -> dict[str, FloatArray]:
    """Make each layer's caches `[num_rows, kv_heads, max_len, head_dim]`, by the graph's names for them.

    They are mapped, so that the system gives their memory page by page as cells are written, and has it
    back when the last of them is forgotten. NumPy would ask for huge pages, and so take whole rows.

    Raises:
        OSError: the system has not so much address space for this process.

    """
    shape = num_rows, spec.num_kv_heads, max_len, spec.head_dim
    names = [f"{kind}_cache.{layer}" for layer in range(spec.num_layers) for kind in ("key", "value")]
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, len(names) * count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return {
        name: np.frombuffer(memory, np.float32, count, index * count * 4).reshape(shape)
        for index, name in enumerate(names)
    }


def _form(options: EngineOptions) -> GraphForm:
    """Choose the graph's form.

    Raises:
        EngineError: the engine does not have what the settings ask for.

    """
    weights = WeightFormat.INT8 if options.weights is WeightFormat.AUTO else options.weights
    for what, asked, allowed in (
        ("hold weights as", weights, _WEIGHTS),
        ("compute in", options.precision, (Precision.AUTO, Precision.F32)),
        ("keep keys and values as", options.cache_type, (CacheType.AUTO, CacheType.F32)),
    ):
        if asked not in allowed:
            names = ", ".join(kind.value for kind in allowed)
            raise EngineError(f"the {ENGINE_NAME} engine does not {what} {asked.value}; choose of {names}")
    # The fast form rounds activations to 8 bits before weights of few bits. Asked for f32, that is not done.
    dialect = Dialect.LINEAR if options.precision is Precision.F32 else Dialect.GROUPED
    return GraphForm(dialect, weights, Precision.F32)


def _session_options(num_threads: int) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = num_threads
    settings.log_severity_level = 3  # errors; they are raised, too
    # A pattern would be kept for each combination of shapes, and steps have many.
    settings.enable_mem_pattern = False
    settings.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    return settings
