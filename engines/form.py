"""Which graph is made of a model, and in what its numbers are held."""

from dataclasses import dataclass
from enum import Enum

from engines.options import Precision, WeightFormat

MAX_CANDIDATES = 3839
"""TensorRT's TopK takes fewer than 3,840."""


class Dialect(Enum):
    """How a graph keeps keys and values, and whose nodes it is made of."""

    PAGED = "paged"
    """Blocks in one pool, in nodes of our own domain: for OpenVINO."""
    LINEAR = "linear"
    """A row of the cache for each sequence, in standard ONNX: for TensorRT, and on a CPU its oracle."""
    GROUPED = "grouped"
    """A row for each sequence, in ONNX Runtime's own nodes: fast on a CPU."""


@dataclass(frozen=True, slots=True)
class GraphForm:
    """What a prepared model's graph is like; two equal forms give equal graphs of a model.

    Raises:
        ValueError: a field is open (AUTO) or out of its range; the message names it.

    """

    dialect: Dialect
    weights: WeightFormat
    activations: Precision = Precision.F32
    """In what activations, keys and values are: F32, F16 or BF16. Logits are always float32."""
    num_candidates: int = 0
    """K of the best tokens that the graph gives beside the logits, at most the vocabulary; 0 is none."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.weights is WeightFormat.AUTO:
            raise ValueError("weights are auto; a graph needs a format that is decided")
        if self.activations is Precision.AUTO:
            raise ValueError("activations are auto; a graph needs one of f32, f16, bf16")
        if not 0 <= self.num_candidates <= MAX_CANDIDATES:
            raise ValueError(f"num_candidates is {self.num_candidates}; it must be in 0 .. {MAX_CANDIDATES}")

    @property
    def label(self) -> str:
        """The form in one word, such as "linear-int8-f16-k256"; for names and messages."""
        parts = [self.dialect.value, self.weights.value, self.activations.value]
        return "-".join([*parts, f"k{self.num_candidates}"] if self.num_candidates else parts)
