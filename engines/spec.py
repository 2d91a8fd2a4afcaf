"""What a decoder-only model is made of, in one vocabulary for every checkpoint format."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Family(Enum):
    """The supported model families; values are the names used in messages and caches."""

    LLAMA = "llama"
    """Llama, SmolLM2, Mistral."""
    QWEN2 = "qwen2"
    """As Llama, with a bias on the Q, K and V projections."""
    QWEN3 = "qwen3"
    """As Llama, with RMS norms over each head's query and key before rotation."""
    GEMMA3 = "gemma3"
    """Text alone: norms over query and key, norms before and behind each block, GELU, scaled embeddings, and
    layers that attend to a window."""
    PHI3 = "phi3"
    """As Llama; all layers may attend to a window."""


class Activation(Enum):
    """What the gate of the feed-forward network goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU in its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of the rotary embedding.

    Source: `_compute_llama3_parameters` in Hugging Face transformers' modeling_rope_utils.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    """Context length, in tokens, of the model before it was stretched."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Attention of some layers, or all, to the latest tokens only."""

    size: int
    """Tokens that a token attends to, itself included."""
    layers: tuple[int, ...]
    """Indices of the layers, ascending."""
    rope_theta: float | None = None
    """Base of their rotary embedding, which is not stretched then; None if it is that of the others."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder: everything the graph builder needs besides the weights."""

    family: Family
    name: str
    """The checkpoint's own name for itself; for people."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the gate and up projections."""
    context_length: int
    """Most tokens, prompt and output together, that the model was made for."""
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    """The output projection is the embedding table."""
    qkv_bias: bool
    qk_norm: bool
    rope_factors: tuple[float, ...] | None = None
    """[head_dim / 2] divisors of the rotary frequencies, where the checkpoint holds them ready-made
    (GGUF's `rope_freqs.weight`) or one number divides all; None otherwise. Excludes `rope_scaling`."""
    rope_magnitude: float = 1.0
    """What rotation multiplies queries and keys by, beside turning them."""
    window: SlidingWindow | None = None
    """None if every layer attends to the whole past."""
    attention_scale: float | None = None
    """What the products of queries and keys are multiplied by; None is 1 / sqrt(head_dim)."""
    activation: Activation = Activation.SILU
    post_norms: bool = False
    """There are RMS norms behind attention and behind the feed-forward network, too, before the sums."""
    embed_scale: float = 1.0
    """What the embeddings are multiplied by as a token's input; not as the output projection."""

    def has_window(self, layer: int) -> bool:
        """Tell whether a layer attends to the window only."""
        return self.window is not None and layer in self.window.layers

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied table counts once."""
        d, f, head = self.hidden_size, self.intermediate_size, self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * head
        layer = qkv * d + self.num_heads * head * d + 3 * d * f + 2 * d
        layer += qkv if self.qkv_bias else 0
        layer += 2 * head if self.qk_norm else 0
        layer += 2 * d if self.post_norms else 0
        tables = self.vocab_size * d * (1 if self.tied_embeddings else 2)
        return tables + self.num_layers * layer + d


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checkpoint's tokenizer, in the one form that every later stage reads."""

    tokenizer_json: str
    """A Hugging Face `tokenizer.json`. Its post-processor adds what the model wants before a plain text
    prompt (such as a beginning-of-sequence token) when asked to add special tokens."""
    bos_token: str | None
    eos_token: str | None
    """The two texts that chat templates may mention."""
    eos_token_ids: tuple[int, ...]
    """Ids that end an output: end of text, of turn, of message; ascending."""
    chat_template: str | None
    """Jinja2 source, or None where the model is not for chat."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Everything known about a checkpoint without its weights."""

    path: str
    revision: str
    """Hex SHA-256 of the weight files: the same weights have the same revision on every machine."""
    size_bytes: int
    """Size of the weight files."""
    quantization: str
    """How most weights are stored, such as "Q4_1" or "BF16"; for people."""
    spec: ModelSpec
    vocabulary: Vocabulary

    @property
    def name(self) -> str:
        """What requests call the model unless the settings give another name: its file's or folder's."""
        return Path(self.path).name.removesuffix(".gguf") or self.spec.name
