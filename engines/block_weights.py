"""Matrices in blocks of few bits, laid out as ONNX Runtime's MatMulNBits reads them.

A row of weights, which makes one output, is cut into blocks of 32 inputs. A weight is
`scale * (level - zero)`, with a scale and an integer zero of its block's own.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from engines.graph_builder import GraphBuilder
from engines.quantization import (
    BLOCK_SIZE,
    gains_by_offsets,
    pack_int4,
    quantize_blocks,
    quantize_offset_blocks,
)
from engines.weightfile import read_rows

__all__ = ["BLOCK_SIZE", "hold_int4", "hold_int8"]

_INT4_ZERO = 8
"""The zero of an int4 block that has none of its own."""
_INT8_ZERO = 128


def hold_int8(graph: GraphBuilder, name: str, parts: dict[str, int], width: int) -> list[str]:
    """Hold stacked weights in int8, once under their name, chunk by chunk.

    Blocks that GGUF holds as Q8_0 stay what they were.

    Args:
        graph: who holds them.
        name: what to call the matrix.
        parts: each weight's name in the checkpoint and its number of rows, top to bottom.
        width: columns of each, a multiple of 32.

    Returns:
        The names of the levels, uint8 `[N, width / 32, 32]` about a zero of 128, and of the scales
        `[N, width / 32]`.

    """
    scale_name = f"{name}_scale"
    if not graph.holds(name):
        scales: list[FloatArray] = []

        def levels() -> Iterator[NDArray[np.uint8]]:
            for chunk in read_rows(graph.source, parts, width):
                blocks = chunk.reshape(len(chunk), -1, BLOCK_SIZE)
                scale = np.abs(blocks).max(axis=2) / np.float32(127)
                scale[scale == 0] = 1  # a block of zeros stays one
                scales.append(scale)
                level = np.rint(blocks / scale[:, :, None])
                np.clip(level, -127, 127, out=level)  # the scale of tiny numbers has few bits
                yield (level + _INT8_ZERO).astype(np.uint8)

        graph.hold(graph.file.chunks(name, levels()))
        graph.hold(graph.file.array(scale_name, np.concatenate(scales)))
    return [name, scale_name]


def hold_int4(graph: GraphBuilder, name: str, parts: dict[str, int], width: int) -> list[str]:
    """Hold stacked weights in int4, chunk by chunk.

    The levels are those that `engines.quantization` chooses. An offset of a block is mostly taken up by its
    zero. What remains, at most half a scale, weighs the sum of the block's inputs: with these sums behind the
    inputs, it is a column of weights like any other, and its own rounding to int4 is 1/16 of half a scale. So
    blocks that GGUF holds as Q4_0, Q4_1 or Q4_K stay nearly what they were, at the cost of 1/32 more columns.

    Args:
        graph: who holds them.
        name: what to call the matrix.
        parts: each weight's name in the checkpoint and its number of rows, top to bottom.
        width: columns of each, a multiple of 32.

    Returns:
        The names of the levels, two to a byte, `[N, blocks, 16]`, and of the scales `[N, blocks]`, where
        `blocks` is `width / 32`; if the first weights gain by offsets, also of the zeros, two to a byte,
        `[N, half of blocks]`. Then behind the columns of the inputs come `width / 32` of the blocks' sums.

    """
    scales: list[FloatArray] = []
    zeros: list[NDArray[np.uint8]] = []

    def levels() -> Iterator[NDArray[np.uint8]]:
        with_offsets: bool | None = None
        for chunk in read_rows(graph.source, parts, width):
            if with_offsets is None:
                with_offsets = gains_by_offsets(chunk)
            if with_offsets:
                level, scale, zero = _offset_blocks(chunk)
                zeros.append(zero)
            else:
                rounded = quantize_blocks(chunk)
                assert rounded.scales is not None
                level, scale = rounded.values, rounded.scales
            scales.append(scale)
            yield pack_int4(level + np.int8(_INT4_ZERO)).reshape(len(chunk), -1, BLOCK_SIZE // 2)

    names = [graph.hold(graph.file.chunks(name, levels()))]
    names.append(graph.hold(graph.file.array(f"{name}_scale", np.concatenate(scales))))
    if zeros:
        names.append(graph.hold(graph.file.array(f"{name}_zero", np.concatenate(zeros))))
    return names


def _offset_blocks(chunk: FloatArray) -> tuple[NDArray[np.int8], FloatArray, NDArray[np.uint8]]:
    """Round rows to levels in -8 .. 7, scales and packed zeros, with the columns of the blocks' sums."""
    rounded = quantize_offset_blocks(chunk)
    scales, offsets = rounded.scales, rounded.offsets
    assert scales is not None
    assert offsets is not None
    zeros = np.clip(np.rint(_INT4_ZERO - offsets / scales), 0, 15)
    rest = offsets + (zeros - _INT4_ZERO) * scales
    missing = -rest.shape[1] % BLOCK_SIZE
    sums = quantize_blocks(np.pad(rest, ((0, 0), (0, missing))))
    assert sums.scales is not None
    zeros = np.pad(zeros, ((0, 0), (0, sums.scales.shape[1])), constant_values=_INT4_ZERO)
    zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
    return (
        np.concatenate([rounded.values, sums.values], axis=1),
        np.concatenate([scales, sums.scales], axis=1),
        pack_int4(zeros.astype(np.int8)).reshape(len(chunk), -1),
    )
