"""Reading the config.json of a Hugging Face model folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.api import CheckpointError
from engines.architecture import check_spec, family_of
from engines.fields import MAX_LAYERS, Fields
from engines.hf_rope import read_rope
from engines.spec import Activation, Family, ModelSpec, SlidingWindow

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "mistral": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
    "gemma3_text": Family.GEMMA3,
    "gemma3": Family.GEMMA3,
    "phi3": Family.PHI3,
}
"""By `model_type`; SmolLM2 is written as "llama". "gemma3" sees images, too, but is served for text alone."""

_GEMMA3_PERIOD = 6
"""Every so many layers of Gemma 3 one attends to the whole past, where the file does not say."""


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Settings that a family's configuration class in Hugging Face transformers gives values to."""

    vocab_size: int | None = None
    """None: it must be there, as below."""
    num_heads: int | None = None
    head_dim: int | None = None
    """None is hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None is as many as attention heads."""
    context_length: int | None = None
    """None: it must be there."""
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    tied_embeddings: bool | None = None
    """None: whether there is an output projection decides."""


_DEFAULTS = {
    Family.QWEN3: _Defaults(head_dim=128),
    Family.GEMMA3: _Defaults(
        vocab_size=262_208,
        num_heads=8,
        head_dim=256,
        num_kv_heads=4,
        context_length=131_072,
        rope_theta=1e6,
        tied_embeddings=True,
    ),
    Family.PHI3: _Defaults(context_length=4096, rms_eps=1e-5, tied_embeddings=False),
}


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
    _refuse_quantized(fields, path)
    if (text := fields.section("text_config")) is not None and architecture == "gemma3":
        fields = text
    _refuse_variants(fields, path, architecture, family)
    defaults = _DEFAULTS.get(family, _Defaults())
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads", defaults.num_heads)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    context_length = fields.integer("max_position_embeddings", defaults.context_length)
    rope = read_rope(fields, path, family, head_dim, context_length, defaults.rope_theta)
    context_length = rope.context_length
    is_gemma = family is Family.GEMMA3
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5 if is_gemma else None
    tied = not has_lm_head if defaults.tied_embeddings is None else defaults.tied_embeddings
    spec = ModelSpec(
        family=family,
        name=name,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults.num_kv_heads or num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        context_length=context_length,
        rms_eps=fields.number("rms_norm_eps", defaults.rms_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_factors=rope.factors,
        rope_magnitude=rope.magnitude,
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        qkv_bias=family is Family.QWEN2,
        qk_norm=family in (Family.QWEN3, Family.GEMMA3),
        window=_window(fields, path, architecture, family, num_layers, context_length, rope.window_theta),
        attention_scale=None if scale == head_dim**-0.5 else scale,
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        post_norms=is_gemma,
        embed_scale=hidden_size**0.5 if is_gemma else 1.0,
    )
    check_spec(spec, path)
    return spec


def _refuse_quantized(fields: Fields, path: Path) -> None:
    if fields.has("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantised (quantization_config); supported are F32, F16 and BF16, "
            "or a GGUF file"
        )


def _refuse_variants(fields: Fields, path: Path, architecture: str, family: Family) -> None:
    allowed: tuple[str, ...]
    if family is Family.GEMMA3:
        activation, allowed = fields.text("hidden_activation", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",)
    else:
        activation, allowed = fields.text("hidden_act", "silu"), ("silu", "swish")
    if activation not in allowed:
        raise CheckpointError(
            f"{path}: activation {activation!r} is not supported; supported is {allowed[0]}"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(key):
            raise CheckpointError(f"{path}: {key} is not supported: Gemma 2 has it, Gemma 3 does not")
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError(
            f"{path}: attends to later tokens (use_bidirectional_attention), so writes no text"
        )
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key, False):
            raise CheckpointError(
                f"{path}: {key} is not supported for {architecture}; Qwen2's biases on Q, K and V are"
            )


def _window(
    fields: Fields,
    path: Path,
    architecture: str,
    family: Family,
    num_layers: int,
    context_length: int,
    theta: float | None,
) -> SlidingWindow | None:
    """Read which layers attend to a window; `theta` is their own rotary base, if they have one."""
    is_gemma = family is Family.GEMMA3
    size = fields.integer("sliding_window", 4096 if is_gemma else 0, least=1 if is_gemma else 0)
    types = fields.texts("layer_types")
    if set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{path}: layer_types {sorted(set(types))} are not supported; full_attention is"
        )
    if is_gemma:
        period = fields.integer("sliding_window_pattern", _GEMMA3_PERIOD)
        types = types or tuple(
            "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)
        )
        if len(types) != num_layers:
            raise CheckpointError(
                f"{path}: layer_types names {len(types)} layers, but there are {num_layers}"
            )
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
        return SlidingWindow(size, layers, theta) if layers else None
    if architecture.startswith("qwen") and not fields.flag("use_sliding_window", False):
        size = 0
    if types and set(types) == {"full_attention"} and family is not Family.PHI3:
        size = 0
    if not 0 < size < context_length:
        return None
    if family is Family.PHI3:
        return SlidingWindow(size, tuple(range(num_layers)))
    raise CheckpointError(
        f"{path}: attends to a sliding window of {size} tokens; only full attention is supported for "
        f"{architecture}"
    )
