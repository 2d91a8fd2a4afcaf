"""The names and shapes of a decoder's tensors, in one vocabulary for every checkpoint format.

A matrix is `[out_features, in_features]`, as it multiplies a column. The rows of Q and K are in the
half-split order of rotary embeddings (the two halves of a head are rotated against each other),
whatever the file's own order is. A norm's gain is what it multiplies by, even where the file holds that
less one.
"""

from collections.abc import Iterator
from enum import StrEnum

from engines.spec import ModelSpec

EMBED = "embed"
"""[vocab_size, hidden_size] token embeddings."""
FINAL_NORM = "final_norm"
"""[hidden_size] gain of the RMS norm before the output projection."""
LM_HEAD = "lm_head"
"""[vocab_size, hidden_size] output projection; only where embeddings are not tied."""


class LayerTensor(StrEnum):
    """The tensors of one layer; values are the last part of their names."""

    ATTN_NORM = "attn_norm"
    """[hidden_size] gain of the RMS norm before attention."""
    Q = "q"
    """[num_heads * head_dim, hidden_size]."""
    K = "k"
    """[num_kv_heads * head_dim, hidden_size]."""
    V = "v"
    """[num_kv_heads * head_dim, hidden_size]."""
    Q_BIAS = "q_bias"
    """[num_heads * head_dim]; only where `ModelSpec.qkv_bias`, as the next two."""
    K_BIAS = "k_bias"
    """[num_kv_heads * head_dim]."""
    V_BIAS = "v_bias"
    """[num_kv_heads * head_dim]."""
    Q_NORM = "q_norm"
    """[head_dim] gain of the RMS norm over each query head; only where `ModelSpec.qk_norm`."""
    K_NORM = "k_norm"
    """[head_dim], likewise for the keys."""
    O = "o"  # noqa: E741 - the projection's name in the literature
    """[hidden_size, num_heads * head_dim]."""
    POST_ATTN_NORM = "post_attn_norm"
    """[hidden_size] gain of the RMS norm behind attention; only where `ModelSpec.post_norms`."""
    MLP_NORM = "mlp_norm"
    """[hidden_size] gain of the RMS norm before the feed-forward block."""
    GATE = "gate"
    """[intermediate_size, hidden_size]; its product goes through `ModelSpec.activation`."""
    UP = "up"
    """[intermediate_size, hidden_size]."""
    DOWN = "down"
    """[hidden_size, intermediate_size]."""
    POST_MLP_NORM = "post_mlp_norm"
    """[hidden_size] gain of the RMS norm behind the feed-forward block; likewise."""


def layer_tensor(layer: int, part: LayerTensor) -> str:
    """Name a layer's tensor, such as "layers.0.q"."""
    return f"layers.{layer}.{part}"


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor that a model of this spec has, in order of use."""
    yield EMBED, (spec.vocab_size, spec.hidden_size)
    parts = _layer_shapes(spec)
    for layer in range(spec.num_layers):
        for part, shape in parts.items():
            yield layer_tensor(layer, part), shape
    yield FINAL_NORM, (spec.hidden_size,)
    if not spec.tied_embeddings:
        yield LM_HEAD, (spec.vocab_size, spec.hidden_size)


def _layer_shapes(spec: ModelSpec) -> dict[LayerTensor, tuple[int, ...]]:
    d, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[LayerTensor, tuple[int, ...]] = {
        LayerTensor.ATTN_NORM: (d,),
        LayerTensor.Q: (q, d),
        LayerTensor.K: (kv, d),
        LayerTensor.V: (kv, d),
    }
    if spec.qkv_bias:
        shapes |= {LayerTensor.Q_BIAS: (q,), LayerTensor.K_BIAS: (kv,), LayerTensor.V_BIAS: (kv,)}
    if spec.qk_norm:
        shapes |= {LayerTensor.Q_NORM: (spec.head_dim,), LayerTensor.K_NORM: (spec.head_dim,)}
    shapes[LayerTensor.O] = (d, q)
    if spec.post_norms:
        shapes[LayerTensor.POST_ATTN_NORM] = (d,)
    shapes |= {
        LayerTensor.MLP_NORM: (d,),
        LayerTensor.GATE: (f, d),
        LayerTensor.UP: (f, d),
        LayerTensor.DOWN: (d, f),
    }
    if spec.post_norms:
        shapes[LayerTensor.POST_MLP_NORM] = (d,)
    return shapes
