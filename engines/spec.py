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
    (GGUF's `rope_freqs.weight`); None otherwise. Excludes `rope_scaling`."""

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied table counts once."""
        d, f, head = self.hidden_size, self.intermediate_size, self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * head
        layer = qkv * d + self.num_heads * head * d + 3 * d * f + 2 * d
        layer += qkv if self.qkv_bias else 0
        layer += 2 * head if self.qk_norm else 0
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
