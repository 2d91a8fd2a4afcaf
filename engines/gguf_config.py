"""Reading a model's settings out of a GGUF file's metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from engines.api import CheckpointError
from engines.architecture import check_spec, family_of
from engines.fields import MAX_LAYERS, Fields
from engines.gguf_file import GgufFile
from engines.hf_rope import say_what_is_left
from engines.spec import Activation, Family, ModelSpec, SlidingWindow
from engines.tensors import EMBED, FINAL_NORM, LM_HEAD, LayerTensor

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
    "gemma3": Family.GEMMA3,
    "phi3": Family.PHI3,
}
"""By `general.architecture`; Mistral and SmolLM2 are written as "llama"."""

ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
_LONG_FACTORS = "rope_factors_long.weight"
ROPE_FACTOR_TENSORS = (ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
"""Tensors of a file that are no weights but settings."""

_GEMMA3_PERIOD = 6
"""Every so many layers of Gemma 3 one attends to the whole past, where a file does not say."""
_GEMMA3_27B_LAYERS = 62
"""Layers of the one size of Gemma 3 whose scale of attention does not follow from the heads' width; files do
not say it, and llama.cpp (src/models/gemma3.cpp) tells it by this number, too."""

_TOP_NAMES = {EMBED: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER_NAMES = {
    LayerTensor.ATTN_NORM: "attn_norm.weight",
    LayerTensor.Q: "attn_q.weight",
    LayerTensor.K: "attn_k.weight",
    LayerTensor.V: "attn_v.weight",
    LayerTensor.Q_BIAS: "attn_q.bias",
    LayerTensor.K_BIAS: "attn_k.bias",
    LayerTensor.V_BIAS: "attn_v.bias",
    LayerTensor.Q_NORM: "attn_q_norm.weight",
    LayerTensor.K_NORM: "attn_k_norm.weight",
    LayerTensor.O: "attn_output.weight",
    LayerTensor.MLP_NORM: "ffn_norm.weight",
    LayerTensor.GATE: "ffn_gate.weight",
    LayerTensor.UP: "ffn_up.weight",
    LayerTensor.DOWN: "ffn_down.weight",
    LayerTensor.POST_ATTN_NORM: "post_attention_norm.weight",
    LayerTensor.POST_MLP_NORM: "post_ffw_norm.weight",
}
_FAMILY_NAMES = {
    Family.PHI3: {
        **dict.fromkeys((LayerTensor.Q, LayerTensor.K, LayerTensor.V), "attn_qkv.weight"),
        LayerTensor.GATE: "ffn_up.weight",
    },
}
"""What families call otherwise."""


def file_name(family: Family, name: str) -> str:
    """Turn a name of `engines.tensors` into the file's."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part = name.split(".")
    names = _LAYER_NAMES | _FAMILY_NAMES.get(family, {})
    return f"blk.{layer}.{names[LayerTensor(part)]}"


def read_spec(file: GgufFile) -> ModelSpec:
    """Turn a file's metadata into a spec.

    Raises:
        CheckpointError: the model is not supported, or the file damaged.

    """
    general = Fields(file.metadata, file.path)
    if general.has("split.count") and (parts := general.integer("split.count", least=0)) > 1:
        raise CheckpointError(
            f"{file.path}: is one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )
    architecture = general.text("general.architecture")
    family = family_of(architecture, ARCHITECTURES, file.path)
    fields = Fields(file.metadata, file.path, prefix=architecture + ".")
    if fields.integer("expert_count", 0, least=0) > 0:
        raise CheckpointError(f"{file.path}: is a mixture of experts; only dense models are supported")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: heads whose keys and values differ in length are not supported")
    if (rotated := fields.integer("rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(
            f"{file.path}: rotates {rotated} of a head's {head_dim} numbers; only whole heads are supported"
        )
    _refuse_soft_caps(fields, file.path)
    is_gemma = family is Family.GEMMA3
    num_layers = fields.integer("block_count", most=MAX_LAYERS)
    rope = (
        _phi3_rope(file, fields, head_dim) if family is Family.PHI3 else _rope(file, fields, family, head_dim)
    )
    embedding = file.tensors.get(_TOP_NAMES[EMBED])
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor {_TOP_NAMES[EMBED]!r} is missing; is this a whole model?")
    spec = ModelSpec(
        family=family,
        name=general.text("general.name", "") or file.path.stem,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=rope.context_length,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", None if is_gemma else 10000.0),
        rope_scaling=None,
        rope_factors=rope.factors,
        rope_magnitude=rope.magnitude,
        tied_embeddings=_TOP_NAMES[LM_HEAD] not in file.tensors,
        qkv_bias=family is Family.QWEN2,
        qk_norm=family in (Family.QWEN3, Family.GEMMA3),
        window=_window(fields, family, num_layers, rope.context_length, file.path),
        attention_scale=(
            (hidden_size / num_heads) ** -0.5 if is_gemma and num_layers == _GEMMA3_27B_LAYERS else None
        ),
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        post_norms=is_gemma,
        embed_scale=hidden_size**0.5 if is_gemma else 1.0,
    )
    check_spec(spec, file.path)
    tokens: Any = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > spec.vocab_size:
        raise CheckpointError(
            f"{file.path}: names {len(tokens)} tokens but has embeddings for {spec.vocab_size}"
        )
    return spec


def _refuse_soft_caps(fields: Fields, path: Path) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(key):
            raise CheckpointError(f"{path}: {key} is not supported: Gemma 2 has it, Gemma 3 does not")


def _window(
    fields: Fields, family: Family, num_layers: int, context_length: int, path: Path
) -> SlidingWindow | None:
    """Read which layers attend to a window.

    llama.cpp makes no use of Phi-3's: its tokens after the first 2,047 then see more than the model's own
    code shows them.
    """
    size = fields.integer("attention.sliding_window", 0, least=0)
    if family is Family.GEMMA3:
        key = "attention.sliding_window_pattern"
        local = fields.flags(key)  # or a number
        period = _GEMMA3_PERIOD if local else fields.integer(key, _GEMMA3_PERIOD)
        local = local or tuple((layer + 1) % period != 0 for layer in range(num_layers))
        if len(local) != num_layers:
            raise CheckpointError(
                f"{path}: says of {len(local)} layers whether they attend to a window, but has {num_layers}"
            )
        layers = tuple(layer for layer, has_window in enumerate(local) if has_window)
        if not layers:
            return None
        if size == 0:
            raise CheckpointError(f"{path}: has no gemma3.attention.sliding_window, which the model needs")
        return SlidingWindow(size, layers, rope_theta=fields.number("rope.freq_base_swa", 10000.0))
    if not 0 < size < context_length:
        return None
    if family is Family.PHI3:
        return SlidingWindow(size, tuple(range(num_layers)))
    raise CheckpointError(
        f"{path}: attends to a sliding window of {size} tokens; only full attention is supported for "
        f"{family.value}"
    )


@dataclass(frozen=True, slots=True)
class _Rope:
    """How the rotary embedding is stretched, and how far it then reaches."""

    context_length: int
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0


def _rope(file: GgufFile, fields: Fields, family: Family, head_dim: int) -> _Rope:
    context_length = fields.integer("context_length")
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0) if kind != "none" else 1.0
    factor = factor if factor != 1.0 else fields.number("rope.scale_linear", 1.0)  # as old files have it
    if factor == 1.0:
        return _Rope(context_length, _rope_factors(file, ROPE_FACTORS, head_dim))
    if family is Family.GEMMA3 and kind == "linear":
        return _Rope(context_length, (factor,) * (head_dim // 2))
    allowed = "linear" if family is Family.GEMMA3 else f"Llama 3's ({ROPE_FACTORS})"
    raise CheckpointError(
        f"{file.path}: stretches its rotary embedding by the {kind!r} method; "
        f"supported are none and {allowed}"
    )


def _phi3_rope(file: GgufFile, fields: Fields, head_dim: int) -> _Rope:
    """Read LongRoPE (Ding et al., arXiv 2402.13753) up to the length that the model had before it.

    There the short factors hold. A sequence that grows beyond it would need its keys computed anew.
    """
    context_length = fields.integer("context_length")
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "longrope"):
        raise CheckpointError(
            f"{file.path}: stretches its rotary embedding by the {kind!r} method; "
            "supported are none and longrope"
        )
    if _SHORT_FACTORS not in file.tensors:
        return _Rope(context_length)
    original = fields.integer("rope.scaling.original_context_length", context_length)
    say_what_is_left(original, context_length)
    return _Rope(
        min(context_length, original),
        _rope_factors(file, _SHORT_FACTORS, head_dim),
        fields.number("rope.scaling.attn_factor", 1.0),
    )


def _rope_factors(file: GgufFile, name: str, head_dim: int) -> tuple[float, ...] | None:
    stored = file.tensors.get(name)
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,) or stored.kind is not GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is {stored.kind.name} {list(stored.shape)}; "
            f"it must be F32 [{head_dim // 2}]"
        )
    factors = file.rows(stored).view(np.float32)[0]
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise CheckpointError(f"{file.path}: tensor {name!r} is damaged: it must be positive")
    return None if np.all(factors == 1) else tuple(factors.tolist())
