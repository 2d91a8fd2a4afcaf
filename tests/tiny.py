"""Tiny random models of every family, written as Hugging Face folders and as GGUF files.

Imports nothing of the project, so that golden values can be made from the same weights elsewhere.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import tiny_tokenizer

Floats = NDArray[np.float32]

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Of eight frequencies it leaves one alone, blends one and divides six."""

LONG_CONTEXT = 1024
"""Tokens that a model with LongRoPE is said to take, beyond its `context_length`."""
SHORT_FACTORS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0)
LONG_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
"""LongRoPE's divisors of eight frequencies."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The shape of a tiny model; its weights follow from it and the seed."""

    name: str
    model_type: str
    """As config.json has it: llama, mistral, qwen2, qwen3, gemma3_text or phi3."""
    seed: int
    tied: bool = False
    llama3_scaling: bool = False
    long_rope: bool = False
    rope_divisor: float = 1.0
    """Linear stretching of Gemma's layers without a window."""
    window: int | None = None
    window_period: int = 1
    """Every so many layers one has no window; 1 stands for none."""
    query_scalar: int | None = None
    """Gemma's query_pre_attn_scalar; None is head_dim. A GGUF file cannot say it."""
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    context_length: int = 256
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    vocab_size: int = tiny_tokenizer.VOCAB_SIZE

    @property
    def architecture(self) -> str:
        """The name GGUF has for it."""
        return {"mistral": "llama", "gemma3_text": "gemma3"}.get(self.model_type, self.model_type)


LLAMA_TIED = TinyModel("tiny-llama-tied", "llama", seed=1, tied=True, num_layers=3)
LLAMA_UNTIED = TinyModel("tiny-llama-untied", "llama", seed=2)
LLAMA_SCALED = TinyModel("tiny-llama-scaled", "llama", seed=3, llama3_scaling=True)
MISTRAL = TinyModel("tiny-mistral", "mistral", seed=4, head_dim=32, rope_theta=1e6)
QWEN2 = TinyModel("tiny-qwen2", "qwen2", seed=5, tied=True, num_kv_heads=1, rms_eps=1e-6)
QWEN3 = TinyModel("tiny-qwen3", "qwen3", seed=6, head_dim=32, rope_theta=1e6, rms_eps=1e-6)
TINY_MODELS = (LLAMA_TIED, LLAMA_UNTIED, LLAMA_SCALED, MISTRAL, QWEN2, QWEN3)
"""Those whose layers all attend to the whole past."""

GEMMA3 = TinyModel(
    "tiny-gemma3",
    "gemma3_text",
    seed=7,
    tied=True,
    num_layers=4,
    num_kv_heads=1,
    head_dim=32,
    rope_theta=1e6,
    rms_eps=1e-6,
    rope_divisor=8.0,
    window=9,
    window_period=2,
)
PHI3 = TinyModel("tiny-phi3", "phi3", seed=8, long_rope=True, window=12)
WINDOWED_MODELS = (GEMMA3, PHI3)
EVERY_MODEL = (*TINY_MODELS, *WINDOWED_MODELS)

GEMMA3_SCALED = replace(GEMMA3, name="tiny-gemma3-scaled", seed=9, query_scalar=20, rope_divisor=1.0)
"""As a folder only."""


def make_weights(model: TinyModel) -> dict[str, Floats]:
    """Draw the weights, by their Hugging Face names.

    The scales keep activations near 1 and attention far from uniform, so that an error in any part
    moves the logits well beyond rounding.
    """
    random = np.random.default_rng(model.seed)
    d, f = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def matrix(out: int, into: int, gain: float = 1.0) -> Floats:
        return random.normal(0, gain / math.sqrt(into), (out, into)).astype(np.float32)

    def gains(size: int) -> Floats:
        return random.normal(1, 0.2, size).astype(np.float32)

    is_gemma = model.model_type == "gemma3_text"
    weights = {"model.embed_tokens.weight": matrix(model.vocab_size, d, gain=1.5 if is_gemma else 4.0)}
    for i in range(model.num_layers):
        layer = {
            "input_layernorm.weight": gains(d),
            "self_attn.q_proj.weight": matrix(q, d, gain=1.5),
            "self_attn.k_proj.weight": matrix(kv, d, gain=1.5),
            "self_attn.v_proj.weight": matrix(kv, d),
            "self_attn.o_proj.weight": matrix(d, q),
            "post_attention_layernorm.weight": gains(d),
            "mlp.gate_proj.weight": matrix(f, d, gain=2.0),
            "mlp.up_proj.weight": matrix(f, d),
            "mlp.down_proj.weight": matrix(d, f),
        }
        if model.model_type == "qwen2":
            for part, size in (("q", q), ("k", kv), ("v", kv)):
                layer[f"self_attn.{part}_proj.bias"] = random.normal(0, 0.5, size).astype(np.float32)
        if model.model_type in ("qwen3", "gemma3_text"):
            layer["self_attn.q_norm.weight"] = gains(model.head_dim)
            layer["self_attn.k_norm.weight"] = gains(model.head_dim)
        if is_gemma:
            layer["pre_feedforward_layernorm.weight"] = gains(d)
            layer["post_feedforward_layernorm.weight"] = gains(d)
        if model.model_type == "phi3":
            _fuse(layer, "self_attn.qkv_proj.weight", [f"self_attn.{part}_proj.weight" for part in "qkv"])
            _fuse(layer, "mlp.gate_up_proj.weight", [f"mlp.{part}_proj.weight" for part in ("gate", "up")])
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    weights["model.norm.weight"] = gains(d)
    if not model.tied:
        weights["lm_head.weight"] = matrix(model.vocab_size, d, gain=2.0)
    if is_gemma:  # its norms multiply by one more than is stored
        weights |= {name: value - 1 for name, value in weights.items() if name.endswith("norm.weight")}
    return weights


def _fuse(layer: dict[str, Floats], name: str, parts: list[str]) -> None:
    layer[name] = np.concatenate([layer.pop(part) for part in parts])


def config(model: TinyModel) -> dict[str, Any]:
    """The contents of its config.json, with rope settings in the old form but for Mistral's."""
    class_name = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "gemma3_text": "Gemma3",
        "phi3": "Phi3",
    }[model.model_type]
    settings: dict[str, Any] = {
        "architectures": [f"{class_name}ForCausalLM"],
        "model_type": model.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.rms_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if model.head_dim * model.num_heads != model.hidden_size:
        settings["head_dim"] = model.head_dim
    if model.model_type == "mistral":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
        settings["sliding_window"] = None
    else:
        settings["rope_theta"] = model.rope_theta
    if model.llama3_scaling:
        settings["rope_scaling"] = {"rope_type": "llama3", **LLAMA3_SCALING}
    if model.model_type == "gemma3_text":
        del settings["hidden_act"]
        settings |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": model.query_scalar or model.head_dim,
            "rope_local_base_freq": 10000.0,
            "sliding_window": model.window,
            "sliding_window_pattern": model.window_period,
            "head_dim": model.head_dim,
        }
        if model.rope_divisor != 1:
            settings["rope_scaling"] = {"rope_type": "linear", "factor": model.rope_divisor}
    if model.model_type == "phi3":
        settings |= {"sliding_window": model.window, "pad_token_id": 0}
    if model.long_rope:
        settings |= {
            "max_position_embeddings": LONG_CONTEXT,
            "original_max_position_embeddings": model.context_length,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": list(SHORT_FACTORS),
                "long_factor": list(LONG_FACTORS),
            },
        }
    return settings


def write_hf(model: TinyModel, folder: Path, kind: str = "F32", num_shards: int = 1) -> Path:
    """Write a Hugging Face folder with weights of one kind (F32, F16, BF16), and return it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _cast(value, kind) for name, value in make_weights(model).items()}
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        placed: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: weights[name] for name in list(weights)[shard::num_shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            placed |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(model), indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(tiny_tokenizer.END_TOKEN_IDS)})
    )
    (folder / "tokenizer.json").write_text(tiny_tokenizer.tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    )
    (folder / "chat_template.jinja").write_text(tiny_tokenizer.CHAT_TEMPLATE)
    return folder


def write_gguf(
    model: TinyModel,
    path: Path,
    kind: str = "F32",
    settings: Mapping[str, int | float | str | list[bool] | None] | None = None,
    weights: Mapping[str, Floats] | None = None,
) -> Path:
    """Write a GGUF file and return its path.

    Args:
        model: what to write.
        path: where to.
        kind: how matrices are stored, of those that the gguf package can quantise.
        settings: metadata to add or replace, or (None) to leave out.
        weights: instead of `gguf_weights(model)`.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name(model.name)
    writer.add_context_length(LONG_CONTEXT if model.long_rope else model.context_length)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(model.rms_eps)
    writer.add_rope_freq_base(model.rope_theta)
    if model.head_dim * model.num_heads != model.hidden_size:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    if model.window is not None:
        writer.add_sliding_window(model.window)
    if model.window_period != 1:
        writer.add_uint32(f"{model.architecture}.attention.sliding_window_pattern", model.window_period)
    if model.rope_divisor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_divisor)
    if model.long_rope:
        writer.add_rope_scaling_orig_ctx_len(model.context_length)
        factor = LONG_CONTEXT / model.context_length
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(model.context_length)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tiny_tokenizer.tokens())
    num_special = len(tiny_tokenizer.SPECIAL_TOKENS)
    writer.add_token_types([3] * num_special + [1] * (model.vocab_size - num_special))
    writer.add_token_merges([f"{left} {right}" for left, right in tiny_tokenizer.merges()])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_tokenizer.CHAT_TEMPLATE)
    for key, setting in (settings or {}).items():
        writer.kv_data[0].pop(key, None)
        if isinstance(setting, int):
            writer.add_uint32(key, setting)
        elif isinstance(setting, float):
            writer.add_float32(key, setting)
        elif isinstance(setting, str):
            writer.add_string(key, setting)
        elif setting is not None:
            writer.add_array(key, setting)
    for name, value in (gguf_weights(model) if weights is None else weights).items():
        stored = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_weights(model: TinyModel) -> dict[str, Floats]:
    """The weights under GGUF's names, with rows in the order that llama.cpp's converter gives them."""
    weights: dict[str, Floats] = {}
    for name, value in make_weights(model).items():
        stored = value
        if model.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = _interleaved(value, model.head_dim)
        if model.architecture == "gemma3" and name.endswith("norm.weight"):
            stored = value + 1
        weights[_gguf_name(model, name)] = stored
    if model.llama3_scaling:
        weights["rope_freqs.weight"] = _llama3_factors(model)
    if model.long_rope:
        weights["rope_factors_short.weight"] = np.asarray(SHORT_FACTORS, np.float32)
        weights["rope_factors_long.weight"] = np.asarray(LONG_FACTORS, np.float32)
    return weights


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA3_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(model: TinyModel, name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    parts = _GGUF_PARTS | (_GEMMA3_PARTS if model.architecture == "gemma3" else {})
    return f"blk.{layer}.{parts[part]}.{kind}"


def _interleaved(matrix: Floats, head_dim: int) -> Floats:
    rows = []
    for head in matrix.reshape(-1, head_dim, matrix.shape[1]):
        for i in range(head_dim // 2):
            rows += [head[i], head[i + head_dim // 2]]
    return np.stack(rows)


def _llama3_factors(model: TinyModel) -> Floats:
    """Divisors of the frequencies, as llama.cpp's converter computes them for Llama 3."""
    factor, low, high = (LLAMA3_SCALING[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = LLAMA3_SCALING["original_max_position_embeddings"]
    factors = []
    for i in range(model.head_dim // 2):
        wavelength = 2 * math.pi * model.rope_theta ** (2 * i / model.head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(factors, np.float32)


def _cast(value: Floats, kind: str) -> NDArray[Any]:
    if kind == "BF16":
        import ml_dtypes

        return value.astype(ml_dtypes.bfloat16)
    return value.astype({"F32": np.float32, "F16": np.float16}[kind])
