"""The rotary embedding in the config.json of a Hugging Face model folder."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from engines.api import CheckpointError
from engines.fields import Fields
from engines.spec import Family, RopeScaling

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfRope:
    """A rotary embedding."""

    theta: float
    context_length: int
    """How far it reaches: less than the model was made for if a part of that is not supported."""
    scaling: RopeScaling | None = None
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    window_theta: float | None = None
    """Base in layers that attend to a window, if they have their own."""


def read_rope(
    fields: Fields, path: Path, family: Family, head_dim: int, context_length: int, default_theta: float
) -> HfRope:
    """Read theta and scaling: one group `rope_parameters` since transformers 5, two settings before.

    Gemma 3 has such a group for each type of layer.

    Args:
        fields: the config.json's settings.
        path: for messages.
        family: the model's.
        head_dim: numbers of a head.
        context_length: tokens that the model was made for.
        default_theta: the base where the file has none.

    Raises:
        CheckpointError: it is stretched in a way that is not supported.

    """
    group = fields.section("rope_parameters")
    window_theta = None
    if family is Family.GEMMA3:
        window_theta = _window_theta(fields, group, path)
        group = None if group is None else group.section("full_attention")
    scaling = group or fields.section("rope_scaling")
    theta = fields.number("rope_theta", default_theta)
    if group is not None:
        theta = group.number("rope_theta", theta)
    partial = [part.number("partial_rotary_factor", 1.0) for part in (fields, group) if part is not None]
    if any(factor != 1.0 for factor in partial):
        raise CheckpointError(f"{path}: rotates a part of each head only; only whole heads are supported")
    kind = "default" if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
    if scaling is None or kind == "default":
        return HfRope(theta, context_length, window_theta=window_theta)
    if family is Family.GEMMA3 and kind == "linear":
        factors = (scaling.number("factor"),) * (head_dim // 2)
        return HfRope(theta, context_length, factors=factors, window_theta=window_theta)
    if family is Family.PHI3 and kind in ("longrope", "su"):
        return _long_rope(fields, scaling, theta, head_dim, context_length)
    if family in (Family.GEMMA3, Family.PHI3) or kind != "llama3":
        allowed = {Family.GEMMA3: "linear", Family.PHI3: "longrope"}.get(family, "llama3")
        raise CheckpointError(
            f"{path}: stretches its rotary embedding by the {kind!r} method; "
            f"supported are default and {allowed}"
        )
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{path}: low_freq_factor is {low}; it must be below high_freq_factor, {high}")
    return HfRope(
        theta,
        context_length,
        RopeScaling(
            factor=scaling.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=scaling.integer("original_max_position_embeddings"),
        ),
    )


def _window_theta(fields: Fields, groups: Fields | None, path: Path) -> float:
    """Read the rotary base of Gemma 3's layers with a window; they are never stretched."""
    theta = fields.number("rope_local_base_freq", 10000.0)
    group = None if groups is None else groups.section("sliding_attention")
    if group is None:
        return theta
    if (kind := group.text("rope_type", "default")) != "default":
        raise CheckpointError(
            f"{path}: stretches the rotary embedding of layers with a window by the {kind!r} method; "
            "supported is default"
        )
    return group.number("rope_theta", theta)


def say_what_is_left(original: int, context_length: int) -> None:
    """Log it where a model is used up to the length only that it had before LongRoPE."""
    if original < context_length:
        _LOG.warning(
            "sequences may have %d tokens, not the %d of the model: its LongRoPE is supported up to its "
            "original context",
            original,
            context_length,
        )


def _long_rope(fields: Fields, scaling: Fields, theta: float, head_dim: int, context_length: int) -> HfRope:
    """Read LongRoPE (Ding et al., arXiv 2402.13753) up to the length that the model had before it.

    There the short factors hold. A sequence that grows beyond it would need its keys computed anew.
    The magnitude is that of `_compute_longrope_parameters` in transformers' modeling_rope_utils.
    """
    key = "original_max_position_embeddings"
    original = scaling.integer(key, fields.integer(key, 4096), least=2)
    say_what_is_left(original, context_length)
    factor = scaling.number("factor", context_length / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return HfRope(
        theta,
        min(context_length, original),
        factors=scaling.numbers("short_factor", head_dim // 2),
        magnitude=scaling.number("attention_factor", magnitude),
    )
