"""Rounding weights to few bits: the errors, the ends of the ranges, and blocks that are found again."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from engines.api import FloatArray
from engines.options import WeightFormat
from engines.quantization import (
    BLOCK_SIZE,
    Rounded,
    gains_by_offsets,
    pack_int4,
    quantize,
    quantize_blocks,
    quantize_offset_blocks,
    quantize_rows,
)

SCALE_TYPES: tuple[DTypeLike, ...] = (np.float32, np.float16, ml_dtypes.bfloat16)
ROUNDED_FORMS = (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8)


def normal(rows: int = 64, width: int = 256) -> FloatArray:
    return np.random.default_rng(7).normal(size=(rows, width)).astype(np.float32)


def restored(rounded: Rounded) -> FloatArray:
    """Multiply the levels out."""
    values, scales = rounded.values.astype(np.float32), rounded.scales
    assert scales is not None
    blocks = values.reshape(len(values), scales.shape[1], -1) * scales.astype(np.float32)[:, :, None]
    if rounded.offsets is not None:
        blocks += rounded.offsets.astype(np.float32)[:, :, None]
    return blocks.reshape(values.shape)


def error(rounded: Rounded, matrix: FloatArray) -> float:
    """Square error as a part of the squares."""
    return float(np.square(restored(rounded) - matrix).sum() / np.square(matrix).sum())


@pytest.mark.parametrize("form", ROUNDED_FORMS)
def test_a_row_of_zeros_stays_one(form: WeightFormat) -> None:
    for with_offsets in (False, True):
        rounded = quantize(np.zeros((2, 64), np.float32), form, np.float16, with_offsets=with_offsets)
        assert not restored(rounded).any()
        assert rounded.scales is not None
        assert (rounded.scales == 1).all()


def test_int8_reaches_both_ends_and_keeps_tiny_rows() -> None:
    matrix = np.array([[1.27, -1.27, 0.635, 0.0], [1e-30, -5e-31, 0.0, 0.0]], np.float32)
    levels, scales = quantize_rows(matrix)
    np.testing.assert_array_equal(levels, [[127, -127, 64, 0], [127, -64, 0, 0]])
    np.testing.assert_allclose(scales[:, 0], [0.01, 1e-30 / 127], rtol=1e-6)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize(
    ("form", "bound"), [(WeightFormat.INT8, 1e-4), (WeightFormat.INT4, 8e-3), (WeightFormat.FP8, 8e-4)]
)
def test_the_error_is_that_of_the_bits_whatever_the_scales_are_kept_in(
    form: WeightFormat, bound: float, scale_type: DTypeLike
) -> None:
    matrix = normal()
    rounded = quantize(matrix, form, scale_type)
    assert rounded.scales is not None
    assert rounded.scales.dtype == scale_type
    assert np.isfinite(restored(rounded)).all()
    assert bound / 4 < error(rounded, matrix) < bound


@pytest.mark.parametrize("form", ROUNDED_FORMS)
def test_a_scale_below_the_least_of_its_type_does_not_vanish(form: WeightFormat) -> None:
    matrix = normal() * np.float32(1e-7)
    rounded = quantize(matrix, form, np.float16)
    assert rounded.scales is not None
    assert (rounded.scales > 0).all()
    assert np.abs(restored(rounded) - matrix).max() <= 2**-14  # the least step that a scale can have


def test_int4_with_the_best_scale_is_better_than_with_the_one_that_reaches_the_largest() -> None:
    matrix = normal()
    blocks = matrix.reshape(len(matrix), -1, BLOCK_SIZE)
    scales = np.abs(blocks).max(axis=2) / np.float32(7)
    levels = np.rint(blocks / scales[:, :, None]).astype(np.int8).reshape(matrix.shape)
    assert error(quantize_blocks(matrix), matrix) < 0.85 * error(Rounded(levels, scales), matrix)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_int4_blocks_of_a_gguf_file_are_found_again(kind: str, scale_type: DTypeLike) -> None:
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    matrix: FloatArray = gguf.dequantize(gguf.quantize(normal(), stored), stored)
    assert gains_by_offsets(matrix)
    bound = 5e-5 if scale_type == ml_dtypes.bfloat16 else 1e-7
    assert error(quantize_offset_blocks(matrix, scale_type), matrix) < bound


def test_the_blocks_of_q4_k_are_found_again() -> None:
    import gguf

    stored = gguf.GGMLQuantizationType.Q4_K
    num_bytes = gguf.GGML_QUANT_SIZES[stored][1]
    content = np.random.default_rng(3).integers(0, 256, (64, num_bytes), np.uint8)
    content[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)  # the two scales of each superblock
    matrix: FloatArray = gguf.dequantize(content, stored)
    assert gains_by_offsets(matrix)
    assert error(quantize_offset_blocks(matrix, np.float16), matrix) < 1e-4


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_other_weights_do_without_offsets(kind: str) -> None:
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    assert not gains_by_offsets(gguf.dequantize(gguf.quantize(normal(), stored), stored))


def test_int4_is_packed_as_onnx_unpacks_it() -> None:
    import onnx

    levels: NDArray[np.int8] = np.random.default_rng(1).integers(-8, 8, (6, 5)).astype(np.int8)
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=levels.shape)
    tensor.raw_data = pack_int4(levels).tobytes()
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), levels)
