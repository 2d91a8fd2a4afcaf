"""A decoder of any family as an ONNX graph, with the cache and the products left to a dialect."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from engines.api import EngineError
from engines.form import Dialect, GraphForm
from engines.graph_builder import GraphBuilder
from engines.graph_parts import CacheNodes, ProductNodes
from engines.grouped_graph import BlockProducts, GroupedCache, use_own_nodes
from engines.linear_graph import RowCache, StandardProducts
from engines.options import Precision, WeightFormat
from engines.paged_graph import OwnProducts, PagedCache
from engines.spec import Activation, ModelSpec
from engines.weightfile import WeightFile, WeightSource

_GROUPED_WEIGHTS = (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FLOAT32)
_PAGED_WEIGHTS = (WeightFormat.INT8, WeightFormat.BF16, WeightFormat.FLOAT32)


def _paged_parts(form: GraphForm) -> tuple[CacheNodes, ProductNodes]:
    if form.activations is not Precision.F32 or form.num_candidates or form.weights not in _PAGED_WEIGHTS:
        allowed = ", ".join(kind.value for kind in _PAGED_WEIGHTS)
        raise EngineError(
            f"there is no graph {form.label}: a paged one computes in f32, gives no candidates and holds its "
            f"weights as {allowed}"
        )
    return PagedCache(), OwnProducts()


def _grouped_parts(form: GraphForm) -> tuple[CacheNodes, ProductNodes]:
    if form.activations is not Precision.F32 or form.weights not in _GROUPED_WEIGHTS:
        allowed = ", ".join(kind.value for kind in _GROUPED_WEIGHTS)
        raise EngineError(
            f"there is no graph {form.label}: a grouped one computes in f32 and holds its weights as "
            f"{allowed}"
        )
    return GroupedCache(), BlockProducts()


GRAPH_PARTS: Mapping[Dialect, Callable[[GraphForm], tuple[CacheNodes, ProductNodes]]] = {
    Dialect.PAGED: _paged_parts,
    Dialect.LINEAR: lambda _: (RowCache(), StandardProducts()),
    Dialect.GROUPED: _grouped_parts,
}
"""What makes a dialect's nodes for a form; raises EngineError for a form that it does not have."""


def write_model(
    spec: ModelSpec,
    source: WeightSource,
    path: Path,
    form: GraphForm,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write a decoder's graph, and its weights beside it with the suffix `.weights`.

    The graph takes `input_ids` `[N, S]`, `logit_rows` `[R]` (indices into the N * S tokens) and the
    dialect's inputs, and gives `logits` `[R, vocab_size]` in float32. With candidates it gives, too,
    `candidate_logits` and `candidate_ids` `[R, K]`, by falling logit and then rising id, and `logsumexp`
    `[R]`.

    Args:
        spec: the decoder's shape.
        source: its weights.
        path: the graph's file.
        form: what the graph is like.
        progress: called with the fraction done.

    Raises:
        EngineError: the model has no graph of that form.
        OSError: the files cannot be written.

    """
    cache, products = GRAPH_PARTS[form.dialect](form)
    with WeightFile(path.with_suffix(".weights")) as file:
        graph = GraphBuilder(spec, source, file, form)
        _Decoder(graph, cache, products).build(progress or (lambda _: None))
    model = graph.model()
    if form.dialect is Dialect.GROUPED:
        use_own_nodes(model)
    path.write_bytes(model.SerializeToString())


class _Decoder:
    """The nodes that every dialect has in common."""

    def __init__(self, graph: GraphBuilder, cache: CacheNodes, products: ProductNodes) -> None:
        self._graph = graph
        self._spec = graph.spec
        self._cache = cache
        self._products = products

    def build(self, progress: Callable[[float], None]) -> None:
        """Emit the whole decoder."""
        graph, spec = self._graph, self._spec
        self._cache.declare(graph)
        hidden = self._products.embed(graph, "input_ids")
        if spec.embed_scale != 1:
            scale = graph.table("embed_factor", np.array([spec.embed_scale], np.float32))
            hidden = graph.node("Mul", [hidden, scale])
        for layer in range(spec.num_layers):
            hidden = graph.node("Add", [hidden, self._attention(layer, hidden)])
            hidden = graph.node("Add", [hidden, self._feed_forward(layer, hidden)])
            progress((layer + 1) / (spec.num_layers + 1))
        self._logits(hidden)
        progress(1.0)

    def _attention(self, layer: int, hidden: str) -> str:
        """One layer's attention, before the residual sum; Q, K and V come from one product."""
        graph, spec, stem = self._graph, self._spec, f"layers.{layer}"
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {f"{stem}.q": query, f"{stem}.k": key, f"{stem}.v": key}
        normed = graph.norm(hidden, f"{stem}.attn_norm")
        packed = self._products.linear(graph, normed, f"{stem}.qkv", parts, spec.hidden_size)
        if spec.qkv_bias:
            bias = graph.vector(f"{stem}.qkv_bias", [f"{part}_bias" for part in parts])
            packed = graph.node("Add", [packed, bias])
        attended = self._cache.attend(graph, layer, packed)
        output = {f"{stem}.o": spec.hidden_size}
        result = self._products.linear(graph, attended, f"{stem}.o", output, query)
        return graph.norm(result, f"{stem}.post_attn_norm") if spec.post_norms else result

    def _feed_forward(self, layer: int, hidden: str) -> str:
        """One layer's gated feed-forward network (Shazeer, arXiv 2002.05202), before the sum."""
        graph, spec, stem = self._graph, self._spec, f"layers.{layer}"
        width = spec.intermediate_size
        normed = graph.norm(hidden, f"{stem}.mlp_norm")
        parts = {f"{stem}.gate": width, f"{stem}.up": width}
        packed = self._products.linear(graph, normed, f"{stem}.gate_up", parts, spec.hidden_size)
        gate, up = graph.nodes("Split", [packed, graph.ints(width, width)], 2, axis=-1)
        if spec.activation is Activation.GELU_TANH:
            gate = graph.node("Gelu", [gate], approximate="tanh")
        else:
            gate = graph.node("Swish", [gate])
        active = graph.node("Mul", [gate, up])
        down = {f"{stem}.down": spec.hidden_size}
        result = self._products.linear(graph, active, f"{stem}.down", down, width)
        return graph.norm(result, f"{stem}.post_mlp_norm") if spec.post_norms else result

    def _logits(self, hidden: str) -> None:
        """The wanted tokens' logits, in float32 whatever the activations are."""
        graph, spec = self._graph, self._spec
        hidden = graph.reshape(hidden, (-1, 1, spec.hidden_size))
        wanted = graph.node("Gather", [hidden, "logit_rows"], axis=0)
        normed = graph.norm(wanted, "final_norm")
        table = "embed" if spec.tied_embeddings else "lm_head"
        logits = self._products.head(graph, normed, table)
        if graph.type == TensorProto.FLOAT:
            graph.node("Reshape", [logits, graph.ints(0, spec.vocab_size)], name="logits")
        else:
            logits = graph.reshape(logits, (0, spec.vocab_size))
            graph.node("Cast", [logits], name="logits", to=TensorProto.FLOAT)
        graph.output("logits", TensorProto.FLOAT, ["R", spec.vocab_size])
        if graph.form.num_candidates:
            self._candidates(min(graph.form.num_candidates, spec.vocab_size))

    def _candidates(self, count: int) -> None:
        """The best tokens of each row and the logarithm of the sum of exp(logit) over all of them.

        The largest logit is taken off first: an exp of it may be infinite.
        """
        graph = self._graph
        names = ["candidate_logits", "candidate_ids"]
        graph.named_node("TopK", ["logits", graph.ints(count)], names, axis=-1, largest=1, sorted=1)
        best = graph.node("Slice", [names[0], graph.ints(0), graph.ints(1), graph.ints(1)])
        rest = graph.node("Sub", ["logits", best])
        log_sum = graph.node("ReduceLogSumExp", [rest, graph.ints(1)], keepdims=1)
        whole = graph.node("Add", [log_sum, best])
        graph.node("Reshape", [whole, graph.ints(-1)], name="logsumexp")
        graph.output(names[0], TensorProto.FLOAT, ["R", count])
        graph.output(names[1], TensorProto.INT64, ["R", count])
        graph.output("logsumexp", TensorProto.FLOAT, ["R"])
