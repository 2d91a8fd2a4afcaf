"""Blocks of few bits, read back as MatMulNBits reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engines.api import FloatArray
from engines.block_weights import BLOCK_SIZE, hold_int4, hold_int8
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph_builder import GraphBuilder
from engines.options import WeightFormat
from engines.spec import ModelSpec
from engines.weightfile import WeightFile
from tests import tiny
from tests.conftest import TinyPaths

FORM = GraphForm(Dialect.GROUPED, WeightFormat.INT4)


class Given:
    """One matrix, whatever is asked for."""

    def __init__(self, matrix: FloatArray) -> None:
        self._matrix = matrix

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:  # noqa: ARG002
        return self._matrix[rows or slice(None)]


@pytest.fixture
def spec(tiny_models: dict[str, TinyPaths]) -> ModelSpec:
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        return checkpoint.spec


def held(hold: Any, matrix: FloatArray, spec: ModelSpec, folder: Path) -> list[NDArray[Any]]:
    """Hold a matrix, and read what was written."""
    with WeightFile(folder / "w.weights") as file:
        graph = GraphBuilder(spec, Given(matrix), file, FORM)
        names = hold(graph, "m", {"a": len(matrix)}, matrix.shape[1])
    tensors = {tensor.name: tensor for tensor in graph.model().graph.initializer}
    return [onnx.numpy_helper.to_array(tensors[name], str(folder)) for name in names]


def halves(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Take pairs of four bits apart, the low ones first."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1).astype(np.float32)


def read_int8(levels: NDArray[np.uint8], scales: FloatArray) -> FloatArray:
    weights: FloatArray = (levels.astype(np.float32) - 128) * scales[:, :, None]
    return weights.reshape(len(levels), -1)


def read_int4(arrays: list[NDArray[Any]], width: int) -> FloatArray:
    """Weights as the product has them: with those of a block's sum on each of its inputs."""
    levels, scales, zeros = arrays
    zero = halves(zeros)[:, : scales.shape[1], None]
    whole: FloatArray = ((halves(levels) - zero) * scales[:, :, None]).reshape(len(levels), -1)
    sums = whole[:, width : width + width // BLOCK_SIZE]
    return whole[:, :width] + np.repeat(sums, BLOCK_SIZE, axis=1)


def test_int8_is_off_by_half_a_scale_at_most(spec: ModelSpec, tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    levels, scales = held(hold_int8, matrix, spec, tmp_path)
    assert levels.dtype == np.uint8
    error = np.abs(read_int8(levels, scales) - matrix).reshape(5, 3, BLOCK_SIZE)
    assert (error <= 0.5001 * scales[:, :, None]).all()


def test_int8_keeps_zeros_and_stays_in_bounds_with_tiny_numbers(spec: ModelSpec, tmp_path: Path) -> None:
    matrix = np.zeros((3, 32), np.float32)
    matrix[1, :2] = 190e-45, -190e-45  # a scale that is rounded to one bit
    matrix[2, 0] = 1e-30
    levels, scales = held(hold_int8, matrix, spec, tmp_path)
    assert levels.min() >= 1
    np.testing.assert_allclose(read_int8(levels, scales), matrix, rtol=1e-6, atol=1e-43)


@pytest.mark.parametrize("width", [32, 96, 1056])  # sums in one block of columns, and in two
def test_int4_keeps_weights_that_lie_on_sixteen_levels_from_any_least_one(
    width: int, spec: ModelSpec, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    steps = random.uniform(0.01, 0.1, (7, width // BLOCK_SIZE, 1))
    levels = random.integers(0, 16, (7, width // BLOCK_SIZE, BLOCK_SIZE))
    levels[:, :, :2] = 0, 15
    least = -steps * random.uniform(0, 15, steps.shape)
    matrix = (least + steps * levels).reshape(7, width).astype(np.float32)
    arrays = held(hold_int4, matrix, spec, tmp_path)
    assert arrays[0].shape == (7, width // 32 + -(-width // 1024), 16)
    error = np.abs(read_int4(arrays, width) - matrix).reshape(7, -1, BLOCK_SIZE)
    most = steps.max(axis=1, keepdims=True) / 2  # the sums' columns share scales; their largest may be cut
    assert (error < most / 6).all()


def test_int4_has_zeros_of_its_own_only_where_weights_gain_by_them(spec: ModelSpec, tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    levels, scales = held(hold_int4, matrix, spec, tmp_path)
    assert levels.shape == (5, 3, 16)
    error = (halves(levels) - 8) * scales[:, :, None] - matrix.reshape(5, 3, BLOCK_SIZE)
    assert np.sqrt(np.square(error).mean()) < 0.1
