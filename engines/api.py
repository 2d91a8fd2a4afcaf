"""The seam between the server and whatever computes logits.

A scheduler sees one notion of memory: `CacheSpec.num_blocks` blocks of `block_size` tokens. A step
is one ragged batch, the new tokens of every sequence laid end to end, prefill and decode mixed. Only
NumPy and dataclasses here, so that each side can be tested without the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.spec import ModelInfo

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]


class StreamsrvError(Exception):
    """Root of every error that streamsrv raises on purpose.

    `reason` is a stable UPPER_SNAKE_CASE name for machines; the message is a sentence for people: what
    was wrong, what is allowed, what to do.
    """

    reason: ClassVar[str] = "INTERNAL"


class EngineError(StreamsrvError):
    """An engine could not be made, or a step failed."""

    reason = "ENGINE_FAILED"


class EngineNotInstalledError(EngineError):
    """The engine's package is not installed; the message says what to install."""

    reason = "ENGINE_NOT_INSTALLED"


class CheckpointError(StreamsrvError):
    """A model path is missing, truncated, foreign or of an unsupported kind; the message names it."""

    reason = "CHECKPOINT_UNUSABLE"


class DeviceLostError(EngineError):
    """The device under the engine has failed: every context on it is lost, and new ones fail, too."""

    reason = "ENGINE_DEVICE_LOST"


class OutOfMemoryError(EngineError):
    """The cache or the weights do not fit; the message has the arithmetic."""

    reason = "ENGINE_OUT_OF_MEMORY"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The key/value cache of one context, as the scheduler sees it."""

    num_blocks: int
    """Blocks that sequences can own, numbered from 0."""
    block_size: int
    """Tokens a block holds."""
    bytes_per_block: int
    """Memory of one block over all layers, in bytes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `num_tokens` tokens of one block, to be copied to another before a step."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens to compute in one step: B sequences, T tokens in all, R rows of logits wanted.

    Sequence b's new tokens are `token_ids[query_begins[b]:query_begins[b + 1]]` (at least one); they
    follow `past_lens[b]` tokens already in the cache. Its blocks are
    `block_ids[block_begins[b]:block_begins[b + 1]]`, in order of position, enough to hold the past and
    the new tokens. A step reads the cache of the past and writes that of the new tokens.
    """

    token_ids: NDArray[np.int64]
    """[T] ids, each in 0 .. vocab_size - 1."""
    past_lens: IntArray
    """[B] tokens already computed, per sequence."""
    query_begins: IntArray
    """[B + 1] offsets into token_ids; first 0, last T."""
    block_ids: IntArray
    """[sum of blocks] block numbers of all sequences, end to end."""
    block_begins: IntArray
    """[B + 1] offsets into block_ids; first 0."""
    logit_rows: NDArray[np.int64]
    """[R] indices into token_ids whose next-token logits are wanted, ascending; R may be 0."""
    full_rows: NDArray[np.bool_] | None = None
    """[R] which of them are wanted in full from an engine that gives candidates; None is all."""
    copies: tuple[BlockCopy, ...] = ()
    """What to copy before anything is computed, in order; only where a block is as long as a sequence."""

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.past_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each row of logits: what an engine gives whose full rows are far away."""

    token_ids: NDArray[np.int64]
    """[R, K] by falling logit; of equal ones the lower id comes first, and before any that is left out."""
    logits: FloatArray
    """[R, K]"""
    logsumexp: FloatArray
    """[R] logarithm of the sum of exp(logit) over the whole vocabulary, right to 2e-5."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed. Owned by the context and overwritten by its next step: read it before."""

    logits: FloatArray
    """[R, vocab_size]. With candidates, only the rows that were wanted in full hold values."""
    candidates: Candidates | None = None
    fetch: Callable[[IntArray], None] | None = None
    """With candidates: copies more rows, given by index, into `logits`; on the context's thread."""


class ExecutionContext(Protocol):
    """One cache and what is needed to take steps on it. Belongs to the thread that created it.

    Creating, stepping and closing happen on one thread, so a context needs no lock.
    """

    @property
    def cache(self) -> CacheSpec:
        """The cache's size."""
        ...

    @property
    def num_candidates(self) -> int:
        """K of the `Candidates` that each step gives; 0 if it gives all rows in full instead."""
        ...

    def step(self, batch: StepBatch) -> StepResult:
        """Compute a batch.

        Raises:
            EngineError: the step failed; the context must be closed and the cache is lost.

        """
        ...

    def close(self) -> None:
        """Free the cache. Closing twice is allowed."""
        ...


class Engine(Protocol):
    """A model made ready to run: weights and compiled graph, shared by the contexts made from it."""

    @property
    def name(self) -> str:
        """The engine's name, as `--engine` takes it."""
        ...

    @property
    def model(self) -> ModelInfo:
        """What the engine was made from."""
        ...

    def create_context(self) -> ExecutionContext:
        """Make a context on the calling thread.

        Raises:
            OutOfMemoryError: the cache does not fit in the memory allowed.

        """
        ...

    def close(self) -> None:
        """Free the weights, after every context is closed. Closing twice is allowed."""
        ...
