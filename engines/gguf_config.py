"""Reading a model's settings out of a GGUF file's metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from engines.api import CheckpointError
from engines.architecture import check_spec, family_of
from engines.fields import Fields
from engines.gguf_file import GgufFile
from engines.spec import Family, ModelSpec
from engines.tensors import EMBED, FINAL_NORM, LM_HEAD, LayerTensor

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
}
"""By `general.architecture`; Mistral and SmolLM2 are written as "llama"."""

ROPE_FACTORS = "rope_freqs.weight"

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
}


def file_name(name: str) -> str:
    """Turn a name of `engines.tensors` into the file's."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[LayerTensor(part)]}"


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
    context_length = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", 0, least=0)
    if 0 < window < context_length:
        raise CheckpointError(
            f"{file.path}: attends to a sliding window of {window} tokens; only full attention is supported"
        )
    _check_rope_scaling(fields, file.path)
    embedding = file.tensors.get(_TOP_NAMES[EMBED])
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor {_TOP_NAMES[EMBED]!r} is missing; is this a whole model?")
    spec = ModelSpec(
        family=family,
        name=general.text("general.name", "") or file.path.stem,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=context_length,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=None,
        rope_factors=_rope_factors(file, head_dim),
        tied_embeddings=_TOP_NAMES[LM_HEAD] not in file.tensors,
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
    )
    check_spec(spec, file.path)
    tokens: Any = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > spec.vocab_size:
        raise CheckpointError(
            f"{file.path}: names {len(tokens)} tokens but has embeddings for {spec.vocab_size}"
        )
    return spec


def _check_rope_scaling(fields: Fields, path: Path) -> None:
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0) if kind != "none" else 1.0
    factor = factor if factor != 1.0 else fields.number("rope.scale_linear", 1.0)  # as old files have it
    if factor != 1.0:
        raise CheckpointError(
            f"{path}: stretches its rotary embedding by the {kind!r} method; supported are none and "
            f"Llama 3's ({ROPE_FACTORS})"
        )


def _rope_factors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    stored = file.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,) or stored.kind is not GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {stored.kind.name} {list(stored.shape)}; "
            f"it must be F32 [{head_dim // 2}]"
        )
    factors = file.rows(stored).view(np.float32)[0]
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r} is damaged: it must be positive")
    return None if np.all(factors == 1) else tuple(factors.tolist())
