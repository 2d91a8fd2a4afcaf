"""A model folder as Hugging Face lays it out, made of any checkpoint of the Llama family."""

import json
from pathlib import Path

import ml_dtypes
from safetensors.numpy import save_file

from engines.checkpoint import Checkpoint
from engines.spec import Family, ModelSpec
from engines.tensors import tensor_shapes
from streamsrv.bench.errors import BenchError

_WHOLE = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_hf_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, tokenizer files and the weights in bf16.

    Raises:
        BenchError: the model has something beyond a plain Llama.
    """
    spec, vocabulary = checkpoint.spec, checkpoint.vocabulary
    end_id = min(vocabulary.eos_token_ids)
    (folder / "config.json").write_text(json.dumps(_config(spec, end_id), indent=2))
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer_json, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.context_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {
        hf_name(name): checkpoint.tensor(name).astype(ml_dtypes.bfloat16) for name, _ in tensor_shapes(spec)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """Give Hugging Face's name of a tensor.

    Raises:
        BenchError: a Llama has none of this name.
    """
    if name in _WHOLE:
        return f"{_WHOLE[name]}.weight"
    _, layer, part = name.split(".")
    if part not in _PARTS:
        raise BenchError(f"the model has a tensor {part}, which a plain Llama has not")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def _config(spec: ModelSpec, end_id: int) -> dict[str, object]:
    if spec.family is not Family.LLAMA or spec.rope_scaling or spec.rope_factors or spec.window:
        raise BenchError(f"{spec.name} is no plain Llama, and only such a one is written")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.context_length,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
    }
