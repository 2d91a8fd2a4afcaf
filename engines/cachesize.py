"""How much memory a key/value cache gets."""

from engines.api import CacheSpec, OutOfMemoryError
from engines.memory import GIB
from engines.options import EngineOptions
from engines.spec import ModelSpec

_SHARE = 0.5
"""Part of the memory left to the process that a cache may take unasked: the rest is for the step's own
buffers, for the server, and for what else runs on the machine."""
_LONGEST_SEQUENCES = 4
_TOKENS = 32_768


def size_cache(
    spec: ModelSpec, options: EngineOptions, block_size: int, bytes_per_block: int, available_bytes: int
) -> CacheSpec:
    """Divide the memory allowed into blocks.

    What is allowed is the setting; without one, as much as four sequences of the greatest length need, or
    32,768 tokens where that is more, but at most half of the memory left,
    or of this engine's share of it.

    Args:
        spec: the model.
        options: the settings.
        block_size: tokens in a block.
        bytes_per_block: their memory over all layers.
        available_bytes: memory left to this process.

    Raises:
        OutOfMemoryError: not one block fits, or the setting is more than there is.

    """
    allowed, given = allowed_bytes(options, available_bytes)
    if options.cache_gib is None:
        context = min(options.max_context or spec.context_length, spec.context_length)
        num_tokens = max(_LONGEST_SEQUENCES * context, _TOKENS)
        allowed = min(allowed, -(-num_tokens // block_size) * bytes_per_block)
    num_blocks = allowed // bytes_per_block
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"{given} does not hold one block: {block_size} tokens take {bytes_per_block} bytes "
            f"({bytes_per_block / GIB:.4f} GiB); allow more memory or take a smaller model"
        )
    return CacheSpec(num_blocks, block_size, bytes_per_block)


def allowed_bytes(options: EngineOptions, available_bytes: int) -> tuple[int, str]:
    """Say how much memory a cache may take, and by what: the setting, else the engine's share of half.

    Raises:
        OutOfMemoryError: the setting is more than the `available_bytes` that are left to this process.

    """
    left = f"{available_bytes / GIB:.2f} GiB of memory are left to this process"
    if options.cache_gib is None:
        share = _SHARE * options.memory_share
        return int(available_bytes * share), f"{left}, and the {share:.0%} of it that are the cache's"
    allowed = int(options.cache_gib * GIB)
    if allowed > available_bytes:
        raise OutOfMemoryError(
            f"a cache of {options.cache_gib:g} GiB was asked for, but only {left}; ask for less or leave "
            "the setting out"
        )
    return allowed, f"the cache's setting of {options.cache_gib:g} GiB"
