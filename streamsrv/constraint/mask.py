"""Masks over the vocabulary: bit i % 32 of word i // 32 says whether token i is allowed."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray

MaskArray: TypeAlias = NDArray[np.uint32]


def num_mask_words(vocab_size: int) -> int:
    """How many words a mask has."""
    return (vocab_size + 31) // 32


def apply_mask(logits: FloatArray, mask: MaskArray) -> None:
    """Set the logits [V] of all tokens that a mask [num_mask_words(V)] does not allow to minus infinity.

    Measured with masks of JSON: 12 to 25 µs for 49,152 tokens, 40 to 130 µs for 262,144.
    """
    banned = np.unpackbits((~mask).view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    np.copyto(logits, np.float32(-np.inf), where=banned)


def allowed_ids(mask: MaskArray, vocab_size: int) -> NDArray[np.int64]:
    """Give the ids that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))
