"""What differs between graphs of one model: the seam between the decoder and a dialect's nodes.

`engines.graph` writes what every decoder is made of: norms, residual sums, the gated feed-forward network.
It asks a `CacheNodes` for attention and a `ProductNodes` for whatever reads a stored matrix; `GRAPH_PARTS`
in `engines.graph` says which two a dialect has. What both may want is here: `split` takes the product of Q,
K and V apart, `heads` gives heads their own axis and normalises them where the model does, `rotate` turns
them. Attention that rotates by itself uses no `rotate`, and needs neither `position_ids` nor the order of
axes that `rotate` gives.
"""

from typing import Protocol

from engines.api import EngineError
from engines.graph_builder import GraphBuilder
from engines.options import WeightFormat
from engines.quantization import BLOCK_SIZE
from engines.rope import tables
from engines.spec import ModelSpec


class CacheNodes(Protocol):
    """Attention, and how it keeps keys and values; owns the graph's inputs and what is about the cache."""

    def declare(self, graph: GraphBuilder) -> None:
        """Declare every input, first `input_ids` `[N, S]` and among them `logit_rows` `[R]`, int64 both.

        What N and S are is the dialect's matter. It also holds the tables that attention needs, and declares
        the caches' outputs, if any.
        """
        ...

    def attend(self, graph: GraphBuilder, layer: int, packed: str) -> str:
        """Store a layer's new keys and values and attend to all of them.

        Args:
            graph: where the nodes go.
            layer: its index.
            packed: Q, K and V with their biases, `[N, S, (heads + 2 * kv_heads) * head_dim]`, not rotated,
                heads not normalised.

        Returns:
            `[N, S, heads * head_dim]`.

        """
        ...


class ProductNodes(Protocol):
    """How matrices are stored, and the nodes that read them."""

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Look tokens up in the table "embed": `[N, S]` to `[N, S, hidden_size]` activations."""
        ...

    def linear(self, graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
        """Multiply by the transpose of weights stacked below one another.

        Args:
            graph: where the nodes go.
            value: `[N, S, width]` activations.
            name: what to call the matrix.
            parts: each weight's name in the checkpoint and its number of rows, top to bottom.
            width: columns of each.

        Returns:
            `[N, S, sum of the rows]`.

        """
        ...

    def head(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Multiply by the transpose of the table of the vocabulary: "embed", if that is tied, or "lm_head".

        Args:
            graph: where the nodes go.
            value: `[R, 1, hidden_size]` activations, normalised.
            name: the table's name in the checkpoint.

        Returns:
            `[R, 1, vocab_size]` or `[R, vocab_size]`, in the activations' type or float32.

        """
        ...


ROPE_TABLES = ("rope.cos", "rope.sin")
_WINDOW_TABLES = ("rope.window_cos", "rope.window_sin")


def rope_tables(spec: ModelSpec, layer: int) -> tuple[str, str]:
    """Name a layer's tables; `ROPE_TABLES` but in layers with a window and a rotary base of their own."""
    own = spec.window is not None and spec.window.rope_theta is not None and spec.has_window(layer)
    return _WINDOW_TABLES if own else ROPE_TABLES


def hold_rope_tables(graph: GraphBuilder) -> None:
    """Hold the angles' cosines and sines, `[context_length, head_dim / 2]` each, as layers name them."""
    spec = graph.spec
    for names in dict.fromkeys(rope_tables(spec, layer) for layer in range(spec.num_layers)):
        arrays = tables(spec, spec.context_length, in_window=names is _WINDOW_TABLES)
        for name, table in zip(names, arrays, strict=True):
            graph.table(name, table)


def split(graph: GraphBuilder, packed: str) -> list[str]:
    """Take Q, K and V apart; each `[N, S, its heads * head_dim]`."""
    spec = graph.spec
    widths = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    return graph.nodes("Split", [packed, graph.ints(*widths)], 3, axis=-1)


def heads(graph: GraphBuilder, layer: int, part: str, value: str) -> str:
    """Give the heads of part "q" or "k" their own axis, `[N, S, heads, head_dim]`, normalised if need be."""
    spec = graph.spec
    num_heads = spec.num_heads if part == "q" else spec.num_kv_heads
    value = graph.reshape(value, (0, 0, num_heads, spec.head_dim))
    return graph.norm(value, f"layers.{layer}.{part}_norm") if spec.qk_norm else value


def rotate(graph: GraphBuilder, layer: int, value: str) -> str:
    """Turn `[N, S, heads, head_dim]` by the input `position_ids` to `[N, heads, S, head_dim]`."""
    turned = graph.node("Transpose", [value], perm=[0, 2, 1, 3])
    return graph.node("RotaryEmbedding", [turned, *rope_tables(graph.spec, layer), "position_ids"])


def require_blocks(graph: GraphBuilder, instead: WeightFormat, where: str = "") -> None:
    """Refuse a model whose matrices the blocks of its weights do not divide.

    Args:
        graph: of the model, with the format of the weights.
        instead: the format to name as a remedy.
        where: what the message says of the place, such as " here".

    Raises:
        EngineError: a size is no multiple of a block's.

    """
    spec = graph.spec
    for what, width in (
        ("hidden size", spec.hidden_size),
        ("width of the feed-forward network", spec.intermediate_size),
        ("width of all heads", spec.num_heads * spec.head_dim),
    ):
        if width % BLOCK_SIZE:
            raise EngineError(
                f"{spec.name} cannot have {graph.form.weights.value} weights{where}: they are kept in blocks "
                f"of {BLOCK_SIZE} inputs, and its {what}, {width}, is not a multiple of that; choose "
                f"{instead.value}"
            )
