"""How to make a model run: the settings that every engine understands."""

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class WeightFormat(Enum):
    """How an engine holds the weight matrices; norms and biases are as precise as the activations."""

    AUTO = "auto"
    """The engine's choice: the fastest that stays close to the checkpoint."""
    INT8 = "int8"
    """8-bit integers with one float scale per output channel, on onnxruntime per 32 inputs of it."""
    INT4 = "int4"
    """4-bit integers with one float scale per 32 inputs of an output channel, and an offset where the
    checkpoint's own blocks have one. The output projection is int8: it loses most by four bits."""
    FP8 = "fp8"
    """8-bit floats (E4M3) with one float scale per output channel."""
    F16 = "f16"
    BF16 = "bf16"
    FLOAT32 = "float32"
    """Exactly the checkpoint's values."""


class Precision(Enum):
    """In what an engine computes the activations."""

    AUTO = "auto"
    """The fastest that the processor has in hardware."""
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    """float32 throughout; with float32 weights and an f32 cache the exact mode that tests compare."""


class CacheType(Enum):
    """In what an engine keeps keys and values."""

    AUTO = "auto"
    """The engine's choice, by speed and accuracy."""
    U8 = "u8"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine, valid by construction.

    Raises:
        ValueError: a number is out of its range; the message names the field.

    """

    weights: WeightFormat = WeightFormat.AUTO
    precision: Precision = Precision.AUTO
    cache_type: CacheType = CacheType.AUTO
    activation_group: int = 32
    """Values of an activation that share a scale where they are rounded to 8 bits, before int8 weights. More
    are faster and less exact. Engines that choose for themselves ignore it."""
    num_threads: int | None = None
    """Threads that compute; None is as many as the processors this process may use."""
    cache_gib: float | None = None
    """Memory of each context's key/value cache in GiB; None derives it from the memory this process may
    use and from what the model can need."""
    max_context: int | None = None
    """Most tokens of one sequence; None is the model's own context length, which it can only lower."""
    max_batch: int = 64
    """Most sequences in one step. Engines that reserve a row of the cache for each plan by it."""
    max_step_tokens: int = 320
    """Most tokens in one step. Engines that are compiled for the sizes of steps plan by it."""
    num_contexts: int = 1
    """Contexts that will be made: memory is divided among them."""
    memory_share: float = 1.0
    """Part of the memory at hand that this engine's contexts may count on, where others run beside it."""
    device: int = 0
    """Which GPU, by its number in CUDA, where the engine uses one."""
    cuda_graphs: bool = False
    """Record a step's launches once for each batch size and replay them, where the engine uses a GPU."""
    cache_folder: Path | None = None
    """Where prepared models are kept; None is the user's cache folder."""
    cache_folder_gib: float = 20.0
    """Size that the prepared models may reach before the least recently used are removed."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("max_batch", "max_step_tokens", "num_contexts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.activation_group not in range(32, 257, 32):
            raise ValueError(
                f"activation_group is {self.activation_group}; it must be a multiple of 32, 256 at most"
            )
        if self.device < 0:
            raise ValueError(f"device is {self.device}; it must be 0 or above")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at least 1")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError(f"max_context is {self.max_context}; it must be at least 1 token")
        if self.cache_gib is not None and not (math.isfinite(self.cache_gib) and self.cache_gib > 0):
            raise ValueError(f"cache_gib is {self.cache_gib}; it must be a number above 0")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share is {self.memory_share}; it must be above 0 and at most 1")
        if not (math.isfinite(self.cache_folder_gib) and self.cache_folder_gib >= 0):
            raise ValueError(f"cache_folder_gib is {self.cache_folder_gib}; it must be 0 or above")
