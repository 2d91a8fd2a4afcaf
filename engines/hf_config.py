"""Reading the config.json of a Hugging Face model folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from engines.api import CheckpointError
from engines.architecture import check_spec, family_of
from engines.fields import Fields
from engines.spec import Family, ModelSpec, RopeScaling

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "mistral": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
}
"""By `model_type`; SmolLM2 is written as "llama"."""


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: it cannot be read, or holds something else.

    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; copy or download the model again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8 and overlong numbers
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}; it must be an object")
    return value


def read_config(path: Path, name: str, has_lm_head: bool) -> ModelSpec:
    """Turn a config.json into a spec.

    Absent settings have the values of the configuration classes of Hugging Face transformers.

    Args:
        path: the config.json.
        name: what to call the model.
        has_lm_head: the weights hold an output projection; decides about tied embeddings where the
            file says nothing.

    Raises:
        CheckpointError: the model is not supported, or the file damaged.

    """
    fields = Fields(read_json(path), path)
    architecture = fields.text("model_type")
    family = family_of(architecture, ARCHITECTURES, path)
    _refuse_variants(fields, path, architecture)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    default_head = 128 if family is Family.QWEN3 else hidden_size // num_heads
    theta, scaling = _rope(fields, path)
    spec = ModelSpec(
        family=family,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", default_head),
        intermediate_size=fields.integer("intermediate_size"),
        context_length=fields.integer("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=fields.flag("tie_word_embeddings", not has_lm_head),
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
    )
    check_spec(spec, path)
    return spec


def _refuse_variants(fields: Fields, path: Path, architecture: str) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{path}: activation {activation!r} is not supported; supported is silu")
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key, False):
            raise CheckpointError(
                f"{path}: {key} is not supported for {architecture}; Qwen2's biases on Q, K and V are"
            )
    if fields.has("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantised (quantization_config); supported are F32, F16 and BF16, "
            "or a GGUF file"
        )
    window = fields.integer("sliding_window", 0, least=0)
    if architecture.startswith("qwen") and not fields.flag("use_sliding_window", False):
        window = 0
    layers = fields.texts("layer_types")
    if layers and set(layers) == {"full_attention"}:
        window = 0
    if set(layers) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{path}: layer_types {sorted(set(layers))} are not supported; full_attention is"
        )
    if 0 < window < fields.integer("max_position_embeddings"):
        raise CheckpointError(
            f"{path}: attends to a sliding window of {window} tokens; only full attention is supported"
        )


def _rope(fields: Fields, path: Path) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling: one group `rope_parameters` since transformers 5, two settings before."""
    group = fields.section("rope_parameters")
    old = fields.section("rope_scaling")
    scaling = group or old
    theta = fields.number("rope_theta", 10000.0)
    if group is not None:
        theta = group.number("rope_theta", theta)
    partial = [part.number("partial_rotary_factor", 1.0) for part in (fields, group) if part is not None]
    if any(factor != 1.0 for factor in partial):
        raise CheckpointError(f"{path}: rotates a part of each head only; only whole heads are supported")
    if scaling is None:
        return theta, None
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{path}: stretches its rotary embedding by the {kind!r} method; supported are default and llama3"
        )
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{path}: low_freq_factor is {low}; it must be below high_freq_factor, {high}")
    return theta, RopeScaling(
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=scaling.integer("original_max_position_embeddings"),
    )
