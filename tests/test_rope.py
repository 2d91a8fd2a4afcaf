"""Rotary angles."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.checkpoint import open_checkpoint
from engines.rope import frequencies, tables
from engines.spec import ModelSpec, RopeScaling, SlidingWindow
from tests import tiny
from tests.conftest import TinyPaths


@pytest.fixture
def spec(tiny_models: dict[str, TinyPaths]) -> ModelSpec:
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        return checkpoint.spec


def test_frequencies_fall_from_one_by_the_base(spec: ModelSpec) -> None:
    rates = frequencies(replace(spec, head_dim=8, rope_theta=10_000.0))
    np.testing.assert_allclose(rates, [1, 0.1, 0.01, 0.001])


def test_ready_made_factors_divide_the_frequencies(spec: ModelSpec) -> None:
    plain = replace(spec, head_dim=8)
    rates = frequencies(replace(plain, rope_factors=(1.0, 2.0, 4.0, 8.0)))
    np.testing.assert_allclose(rates, frequencies(plain) / [1, 2, 4, 8])


def test_llama3_leaves_short_wavelengths_divides_long_ones_and_blends_between(spec: ModelSpec) -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = replace(spec, head_dim=128, rope_theta=500_000.0)
    before = frequencies(plain)
    after = frequencies(replace(plain, rope_scaling=scaling))
    wavelengths = 2 * math.pi / before
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    np.testing.assert_array_equal(after[short], before[short])
    np.testing.assert_allclose(after[long], before[long] / 8)
    between = after[~short & ~long] / before[~short & ~long]
    assert len(between) > 3
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()


def test_layers_with_a_window_may_turn_by_a_base_of_their_own_and_unstretched(spec: ModelSpec) -> None:
    stretched = replace(spec, head_dim=8, rope_factors=(8.0,) * 4)
    own = replace(stretched, window=SlidingWindow(4, (0,), rope_theta=10_000.0), rope_theta=1e8)
    np.testing.assert_allclose(frequencies(own, in_window=True), [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(frequencies(own), np.array([1, 0.01, 1e-4, 1e-6]) / 8)
    same = replace(stretched, window=SlidingWindow(4, (0,)))
    np.testing.assert_array_equal(frequencies(same, in_window=True), frequencies(stretched))


def test_a_magnitude_multiplies_the_tables(spec: ModelSpec) -> None:
    for plain, larger in zip(tables(spec, 9), tables(replace(spec, rope_magnitude=1.5), 9), strict=True):
        np.testing.assert_allclose(larger, 1.5 * plain, rtol=1e-6)


def test_settings_and_ready_made_factors_of_one_model_agree(tiny_models: dict[str, TinyPaths]) -> None:
    for model in (tiny.LLAMA_SCALED, *tiny.WINDOWED_MODELS):
        paths = tiny_models[model.name]
        rates = []
        for path in (paths.folder, paths.gguf):
            with open_checkpoint(path) as checkpoint:
                rates.append(frequencies(checkpoint.spec) * checkpoint.spec.rope_magnitude)
        np.testing.assert_allclose(rates[0], rates[1], rtol=1e-6)


def test_tables_are_right_to_the_last_bit_at_far_positions(spec: ModelSpec) -> None:
    far = replace(spec, head_dim=64, rope_theta=500_000.0)
    cos, sin = tables(far, 131_072)
    assert cos.shape == sin.shape == (131_072, 32)
    for position in (0, 1, 4095, 4096, 99_999, 131_071):
        for i in (0, 1, 16, 31):
            angle = position * 500_000.0 ** (-2 * i / 64)
            assert cos[position, i] == pytest.approx(math.cos(angle), abs=6e-8)
            assert sin[position, i] == pytest.approx(math.sin(angle), abs=6e-8)


def test_the_demo_models_tables_are_small(demo_path: Path) -> None:
    with open_checkpoint(demo_path) as checkpoint:
        spec = checkpoint.spec
    assert sum(table.nbytes for table in tables(spec, spec.context_length)) == 2 * 8192 * 32 * 4
