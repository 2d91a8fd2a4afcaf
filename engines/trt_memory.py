"""How a context's device memory is divided, worked out before any of it is taken."""

from dataclasses import dataclass

from engines.api import CacheSpec, OutOfMemoryError
from engines.memory import GIB
from engines.options import EngineOptions
from engines.trt_interface import Interface

ALIGNMENT = 256
"""Of every tensor's address, as TensorRT's documentation asks."""
SCRATCH_ALIGNMENT = 512
"""Of scratch memory: the documentation says 256, but runtimes have been seen to refuse less than this."""
_RESERVE_BYTES = 512 << 20
"""Left free on the GPU: for kernels, which CUDA loads when they are first used, for recorded launches, and
for what else uses the GPU. Assumed, not measured."""


def aligned(num_bytes: int) -> int:
    """Round up to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where in one piece of memory a run's inputs are, all of them 64-bit integers."""

    num_rows: int
    """Most rows of a run, and of its logits."""
    num_tokens: int
    """Most tokens of a run."""
    num_cells: int
    """Cells of a row of the cache."""

    @property
    def offsets(self) -> dict[str, int]:
        """Where each input begins, in bytes. `cache_positions`, which never changes, is the last."""
        sizes = {
            "write_indices": self.num_rows,
            "logit_rows": self.num_rows,
            "input_ids": self.num_tokens,
            "position_ids": self.num_tokens,
            "cache_positions": self.num_cells,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += aligned(size * 8)
        return offsets

    @property
    def run_bytes(self) -> int:
        """What is copied for each run."""
        return self.offsets["cache_positions"]

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.run_bytes + aligned(self.num_cells * 8)


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """What the outputs of a run take."""

    vocab_size: int
    num_candidates: int

    def logits_bytes(self, num_rows: int) -> int:
        """Give the size of a run's logits."""
        return aligned(num_rows * self.vocab_size * 4)

    def candidate_offsets(self, num_rows: int) -> tuple[int, int, int, int]:
        """Say where a run's candidates are: ids, logits, logsumexp, and the end."""
        logits = aligned(num_rows * self.num_candidates * 8)
        logsumexp = logits + aligned(num_rows * self.num_candidates * 4)
        return 0, logits, logsumexp, logsumexp + aligned(num_rows * 4)


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """What one context takes of the device."""

    scratch_bytes: int
    inputs: InputLayout
    outputs: OutputLayout
    num_output_rows: int
    """Rows of logits that are kept until the next step."""
    cache: CacheSpec

    @property
    def candidates_bytes(self) -> int:
        """Memory of all rows' candidates, however they are divided among runs."""
        return self.num_output_rows * self.outputs.candidate_offsets(1)[3]

    @property
    def logits_bytes(self) -> int:
        """Memory of all rows' logits, however they are divided among runs."""
        return self.num_output_rows * self.outputs.logits_bytes(1)


def plan_memory(
    interface: Interface,
    options: EngineOptions,
    *,
    scratch_bytes: int,
    free_bytes: int,
    num_left: int,
    is_padded: bool,
) -> ContextMemory:
    """Divide what is free of the device.

    A context gets its share of it, less a reserve. From that goes what does not depend on the number of rows,
    and the rest is for the cache: as many rows as fit, at most one for each sequence of the greatest batch,
    and a spare one.

    Args:
        interface: what the engine's tensors are.
        options: the settings.
        scratch_bytes: what TensorRT needs for what it computes on the way.
        free_bytes: memory of the device that nobody uses, the weights being loaded.
        num_left: contexts that are still to be made, this one included.
        is_padded: whether decode runs are padded to the next of few sizes.

    Raises:
        OutOfMemoryError: not one row fits, or the setting is more than there is.

    """
    shape = interface.shape
    rows = max(shape.max_batch, shape.max_logit_rows)
    inputs = InputLayout(rows, max(shape.max_batch, shape.max_piece), shape.max_len)
    outputs = OutputLayout(interface.spec.vocab_size, interface.form.num_candidates)
    # A padded run has up to twice the rows, and others follow it.
    num_output_rows = 2 * rows if is_padded else rows
    bytes_per_row = len(interface.cache_names) * interface.row_bytes
    empty = CacheSpec(0, shape.max_len, bytes_per_row)
    memory = ContextMemory(scratch_bytes + SCRATCH_ALIGNMENT, inputs, outputs, num_output_rows, empty)

    fixed = memory.scratch_bytes + inputs.num_bytes + memory.candidates_bytes + memory.logits_bytes
    share = int(max(free_bytes - _RESERVE_BYTES, 0) * options.memory_share) // num_left
    room = share - fixed
    arithmetic = (
        f"{_mib(free_bytes)} of the GPU are free with the weights loaded; less {_mib(_RESERVE_BYTES)} in "
        + (f"reserve, each of {num_left} contexts has {_mib(share)}; " if num_left > 1 else "reserve, ")
        + f"less {_mib(memory.scratch_bytes)} of scratch memory, "
        f"{_mib(memory.candidates_bytes + memory.logits_bytes)} for {num_output_rows} rows of logits and "
        f"{_mib(inputs.num_bytes)} for inputs, {_mib(max(room, 0))} are left"
    )
    if options.cache_gib is not None:
        allowed = int(options.cache_gib * GIB)
        if allowed > room:
            raise OutOfMemoryError(
                f"a cache of {options.cache_gib:g} GiB for each context was asked for, but {arithmetic}; ask "
                "for less or leave the setting out"
            )
        arithmetic = f"the cache's setting of {options.cache_gib:g} GiB"
    else:
        allowed = room
    num_blocks = min(allowed // bytes_per_row - 1, options.max_batch)
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"{arithmetic}, and the least cache takes {_mib(2 * bytes_per_row)}: one row and a spare one of "
            f"{shape.max_len} tokens, {_mib(bytes_per_row)} each; allow fewer tokens in a sequence, a "
            "smaller batch or fewer contexts, free memory of the GPU, or take a smaller model"
        )
    cache = CacheSpec(num_blocks, shape.max_len, bytes_per_row)
    return ContextMemory(memory.scratch_bytes, inputs, outputs, num_output_rows, cache)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
