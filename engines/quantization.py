"""Rounding weights to few bits: integers or short floats, times scales. Zero is always zero."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines.api import FloatArray
from engines.options import WeightFormat

BLOCK_SIZE = 32
"""Inputs that share a scale in int4."""

_LARGEST_FP8 = 448
"""Of E4M3 without infinities."""

_INT4_STEPS = (6.6, 7.0, 7.4, 7.8, 8.2)
"""What the largest number of a block may be rounded from, in levels, of which the best is taken."""


def quantize(
    matrix: FloatArray, form: WeightFormat, scale_type: DTypeLike = np.float32
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Round rows of a matrix.

    Args:
        matrix: `[rows, width]`.
        form: to what.
        scale_type: of the scales. The numbers are rounded by the scales as they are kept.

    Returns:
        `[rows, width]` numbers, int8 in -8 .. 7 for int4, and what they are to be multiplied by: `[rows, 1]`,
        for int4 `[rows, width / 32]`, or nothing where the form is a plain one.

    """
    if form is WeightFormat.INT8:
        return quantize_rows(matrix, scale_type)
    if form is WeightFormat.INT4:
        return quantize_blocks(matrix, scale_type)
    if form is WeightFormat.FP8:
        scales = _kept(_largest(matrix) / np.float32(_LARGEST_FP8), scale_type)
        return (matrix / scales.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn), scales
    return matrix.astype(PLAIN_TYPES[form], copy=False), None


PLAIN_TYPES: dict[WeightFormat, DTypeLike] = {
    WeightFormat.F16: np.float16,
    WeightFormat.BF16: ml_dtypes.bfloat16,
    WeightFormat.FLOAT32: np.float32,
}
"""The forms without scales."""


def quantize_rows(
    matrix: FloatArray, scale_type: DTypeLike = np.float32
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Round each row to int8, symmetric about zero.

    Args:
        matrix: `[rows, width]`.
        scale_type: of the scales.

    Returns:
        `[rows, width]` in -127 .. 127 and `[rows, 1]` scales; the product is off by at most half a scale.

    """
    scales = _kept(_largest(matrix) / np.float32(127), scale_type)
    levels = matrix / scales.astype(np.float32)
    np.rint(levels, out=levels)
    np.clip(levels, -127, 127, out=levels)  # a scale may be kept a little smaller than it was
    return levels.astype(np.int8), scales


def quantize_blocks(
    matrix: FloatArray, scale_type: DTypeLike = np.float32
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Round each block of 32 to int4, by the scale that leaves the smallest error among a few.

    For given levels q of weights w the best scale is sum(wq) / sum(q^2), which leaves an error of
    sum(w^2) - sum(wq)^2 / sum(q^2); so of several roundings the one is taken where the last term is largest.

    Args:
        matrix: `[rows, width]`, the width a multiple of 32.
        scale_type: of the scales.

    Returns:
        `[rows, width]` in -8 .. 7 and `[rows, width / 32]` scales.

    """
    blocks = matrix.reshape(len(matrix), -1, BLOCK_SIZE)
    largest = np.abs(blocks).max(axis=2)
    largest[largest == 0] = 1
    best_gain = np.full(largest.shape, -1, np.float32)
    best = np.zeros_like(largest)
    levels = np.empty_like(blocks)
    for step in _INT4_STEPS:
        np.multiply(blocks, (np.float32(step) / largest)[:, :, None], out=levels)
        np.rint(levels, out=levels)
        np.clip(levels, -8, 7, out=levels)
        dot = np.einsum("rbi,rbi->rb", blocks, levels)
        square = np.maximum(np.einsum("rbi,rbi->rb", levels, levels), 1)
        gain = dot * dot / square
        better = gain > best_gain
        best_gain[better] = gain[better]
        best[better] = (dot / square)[better]
    scales = _kept(best, scale_type)
    np.divide(blocks, scales.astype(np.float32)[:, :, None], out=levels)
    np.rint(levels, out=levels)
    np.clip(levels, -8, 7, out=levels)
    return levels.astype(np.int8).reshape(matrix.shape), scales


def pack_int4(levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Put an even number of levels in -8 .. 7 two to a byte, the first in the low half, as ONNX does."""
    halves = levels.reshape(-1).view(np.uint8) & np.uint8(0x0F)
    return halves[::2] | halves[1::2] << np.uint8(4)


def _largest(matrix: FloatArray) -> FloatArray:
    """Each row's largest absolute value, `[rows, 1]`."""
    largest: FloatArray = np.abs(matrix).max(axis=1, keepdims=True)
    return largest


def _kept(scales: FloatArray, kind: DTypeLike) -> NDArray[Any]:
    """Round scales to a type, none of them to zero or where it has few bits; a row of zeros stays one."""
    smallest = np.float32(2.0**-14 if kind == np.float16 else 2.0**-126)  # normal numbers
    return np.where(scales == 0, np.float32(1), np.maximum(scales, smallest)).astype(kind)
