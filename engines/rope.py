"""Rotary position embedding: the angles, as tables of cosines and sines."""

import math

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from engines.spec import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec, *, in_window: bool = False) -> NDArray[np.float64]:
    """Return the `[head_dim / 2]` angles, in radians per position, by which pairs of dimensions turn.

    Pair i turns by theta^(-2i / head_dim) (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2), divided
    by the checkpoint's own factors or stretched as Llama 3 does, if the model says so. Layers that attend
    to a window, `in_window`, may have a theta of their own, and then nothing else.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    if in_window and spec.window is not None and spec.window.rope_theta is not None:
        return spec.window.rope_theta**-exponents
    plain = spec.rope_theta**-exponents
    if spec.rope_factors is not None:
        return plain / np.asarray(spec.rope_factors, np.float64)
    return plain if spec.rope_scaling is None else _stretch(plain, spec.rope_scaling)


def tables(spec: ModelSpec, length: int, *, in_window: bool = False) -> tuple[FloatArray, FloatArray]:
    """Return cosines and sines, `[length, head_dim / 2]` each, for positions 0 .. length - 1.

    They are multiplied by the model's `rope_magnitude`.

    The angles are taken in double precision: a float32 product of position and frequency would be off
    by up to 2^-25 of the angle, 0.004 radians at position 131,072.
    """
    rates = frequencies(spec, in_window=in_window)
    cos = np.empty((length, len(rates)), np.float32)
    sin = np.empty_like(cos)
    for first in range(0, length, 4096):  # keeps the doubles small
        angles = np.arange(first, min(first + 4096, length), dtype=np.float64)[:, None] * rates
        cos[first : first + 4096] = spec.rope_magnitude * np.cos(angles)
        sin[first : first + 4096] = spec.rope_magnitude * np.sin(angles)
    return cos, sin


def _stretch(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Slow the long wavelengths by the factor, leave the short ones, and blend between the two bounds.

    Source: `_compute_llama3_parameters` in Hugging Face transformers' modeling_rope_utils.
    """
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_context / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)  # 0: stretched in full, 1: untouched
    return (1 - blend) * plain / scaling.factor + blend * plain
