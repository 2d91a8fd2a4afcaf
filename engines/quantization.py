"""Rounding weights to few bits: integers or short floats, times scales."""

from dataclasses import dataclass
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
"""What the largest number of a block may be rounded to, in levels, of which the best is taken. On a 135M
model that halved the mean square error of the logits that 7 alone gives; more of them gained nothing."""

_EXACT = 1e-6
"""Part of a block's squares that is lost only to the rounding of float32 and of a scale in 16 bits."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of weights in few bits: `values * scales + offsets`."""

    values: NDArray[Any]
    """`[rows, width]`; int4 is int8 in -8 .. 7 here."""
    scales: NDArray[Any] | None = None
    """`[rows, 1]`, for int4 `[rows, width / 32]`; None where the form is a plain one."""
    offsets: NDArray[Any] | None = None
    """`[rows, width / 32]`, for int4 only, and there only if they were asked for."""


def quantize(
    matrix: FloatArray, form: WeightFormat, scale_type: DTypeLike = np.float32, *, with_offsets: bool = False
) -> Rounded:
    """Round rows of a matrix.

    Args:
        matrix: `[rows, width]`.
        form: to what.
        scale_type: of scales and offsets. The values are rounded by the scales as they are kept.
        with_offsets: for int4, whether each block may be centred elsewhere than at zero.

    """
    if form is WeightFormat.INT8:
        return Rounded(*quantize_rows(matrix, scale_type))
    if form is WeightFormat.INT4:
        return (
            quantize_offset_blocks(matrix, scale_type)
            if with_offsets
            else quantize_blocks(matrix, scale_type)
        )
    if form is WeightFormat.FP8:
        scales = _kept(_largest(matrix) / np.float32(_LARGEST_FP8), scale_type)
        return Rounded((matrix / scales.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn), scales)
    return Rounded(matrix.astype(PLAIN_TYPES[form], copy=False))


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


def quantize_blocks(matrix: FloatArray, scale_type: DTypeLike = np.float32) -> Rounded:
    """Round each block of 32 to int4, by the scale that leaves the smallest error among a few.

    For given levels q of weights w the best scale is sum(wq) / sum(q^2), which leaves an error of
    sum(w^2) - sum(wq)^2 / sum(q^2); so of several roundings the one is taken where the last term is largest.

    Args:
        matrix: `[rows, width]`, the width a multiple of 32.
        scale_type: of the scales.

    """
    blocks = matrix.reshape(len(matrix), -1, BLOCK_SIZE)
    largest = np.abs(blocks).max(axis=2)
    largest[largest == 0] = 1
    best_gain = np.full(largest.shape, -1, np.float32)
    best = np.zeros_like(largest)
    levels = np.empty_like(blocks)
    for step in _INT4_STEPS:
        np.multiply(blocks, (np.float32(step) / largest)[:, :, None], out=levels)
        _round(levels, -8, 7)
        dot = np.einsum("rbi,rbi->rb", blocks, levels)
        square = np.maximum(np.einsum("rbi,rbi->rb", levels, levels), 1)
        gain = dot * dot / square
        better = gain > best_gain
        best_gain[better] = gain[better]
        best[better] = (dot / square)[better]
    scales = _kept(best, scale_type)
    np.divide(blocks, scales.astype(np.float32)[:, :, None], out=levels)
    _round(levels, -8, 7)
    return Rounded(levels.astype(np.int8).reshape(matrix.shape), scales)


def quantize_offset_blocks(matrix: FloatArray, scale_type: DTypeLike = np.float32) -> Rounded:
    """Round each block of 32 to int4 about a centre of its own.

    The least of a block becomes level -8, and the largest one of the levels up to 7, whichever leaves the
    smallest error. Blocks that GGUF holds as Q4_0, Q4_1 or Q4_K have sixteen levels or fewer at equal
    distances, and are found again as they were.

    Args:
        matrix: `[rows, width]`, the width a multiple of 32.
        scale_type: of scales and offsets.

    """
    blocks = matrix.reshape(len(matrix), -1, BLOCK_SIZE)
    least = blocks.min(axis=2)
    rest = blocks - least[:, :, None]
    span = rest.max(axis=2)
    square = np.einsum("rbi,rbi->rb", rest, rest)
    best_error = np.full(span.shape, np.inf, np.float32)
    best = np.ones_like(span)
    levels = np.empty_like(rest)
    for num_steps in range(15, 7, -1):
        step = np.where(span == 0, np.float32(1), span / np.float32(num_steps))
        np.divide(rest, step[:, :, None], out=levels)
        levels -= np.rint(levels)
        error = np.einsum("rbi,rbi->rb", levels, levels) * step * step
        better = error < best_error
        best_error[better] = error[better]
        best[better] = step[better]
        if (best_error <= np.float32(_EXACT) * square).all():
            break
    scales = _kept(best, scale_type)
    np.divide(rest, scales.astype(np.float32)[:, :, None], out=levels)
    _round(levels, 0, 15)
    offsets = (least + 8 * scales.astype(np.float32)).astype(scale_type)
    return Rounded((levels - 8).astype(np.int8).reshape(matrix.shape), scales, offsets)


def gains_by_offsets(matrix: FloatArray) -> bool:
    """Whether int4 with offsets leaves less than a quarter of the square error that it has without.

    So it is with weights that had offsets, or a sign of their scale, already. With normally distributed ones
    it is three quarters, which is not worth what offsets cost in a product.
    """

    def error(rounded: Rounded) -> float:
        assert rounded.scales is not None
        blocks = rounded.values.reshape(len(matrix), -1, BLOCK_SIZE) * rounded.scales[:, :, None]
        if rounded.offsets is not None:
            blocks += rounded.offsets[:, :, None]
        return float(np.square(blocks.reshape(matrix.shape) - matrix).sum())

    return error(quantize_offset_blocks(matrix)) < error(quantize_blocks(matrix)) / 4


def _round(levels: FloatArray, least: int, largest: int) -> None:
    """Round in place, and within bounds."""
    np.rint(levels, out=levels)
    np.clip(levels, least, largest, out=levels)


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
