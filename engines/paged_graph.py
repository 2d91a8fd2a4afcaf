"""The paged dialect: nodes in a domain of our own, which `engines.ov_graph` turns into OpenVINO's.

All tokens of a step lie end to end: N tokens, S = 1.
"""

from typing import Any

from onnx import TensorProto

from engines.graph_builder import GraphBuilder
from engines.graph_parts import heads, hold_rope_tables, rotate, split

DOMAIN = "streamsrv"
"""The domain of our own nodes: `Linear` and `PagedAttention`."""

_CONTROLS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


class PagedCache:
    """Blocks of tokens in one pool and a block table per sequence."""

    def declare(self, graph: GraphBuilder) -> None:
        """Declare the block tables and each layer's pools; the engine decides the pools' layout."""
        graph.input("input_ids", TensorProto.INT64, ["N", "S"])
        graph.input("position_ids", TensorProto.INT64, ["N", "S"])
        graph.input("logit_rows", TensorProto.INT64, ["R"])
        for name in _CONTROLS:
            graph.input(name, TensorProto.INT32, [f"num_{name}"])
        graph.input("max_context_len", TensorProto.INT32, [])
        for layer in range(graph.spec.num_layers):
            for kind in ("key", "value"):
                graph.input(f"{kind}_cache.{layer}", TensorProto.FLOAT, ["a", "b", "c", "d"])
        hold_rope_tables(graph)

    def attend(self, graph: GraphBuilder, layer: int, packed: str) -> str:
        """Emit one PagedAttention node on `[tokens, heads * head_dim]`."""
        spec = graph.spec
        query, key, value = split(graph, packed)
        query = rotate(graph, layer, heads(graph, layer, "q", query))
        key = rotate(graph, layer, heads(graph, layer, "k", key))
        query = graph.reshape(graph.node("Transpose", [query], perm=[0, 2, 1, 3]), (0, -1))
        key = graph.reshape(graph.node("Transpose", [key], perm=[0, 2, 1, 3]), (0, -1))
        value = graph.reshape(value, (0, -1))
        caches = [f"key_cache.{layer}", f"value_cache.{layer}"]
        window: dict[str, Any] = {}
        if spec.window is not None and spec.has_window(layer):
            window["window"] = spec.window.size
        attended = graph.node(
            "PagedAttention",
            [query, key, value, *caches, *_CONTROLS, "max_context_len"],
            domain=DOMAIN,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale or float(spec.head_dim) ** -0.5,
            **window,
        )
        return graph.reshape(attended, (0, 1, spec.num_heads * spec.head_dim))


class OwnProducts:
    """One `Linear` node a product, on rows as the checkpoint has them: `[out, in]`."""

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Look the tokens up: rows of the table in its stored form, then to float."""
        spec = graph.spec
        table, *scales = _matrix(graph, "embed", {"embed": spec.vocab_size}, spec.hidden_size)
        rows = graph.node("Gather", [table, ids], axis=0)
        rows = graph.node("Cast", [rows], to=TensorProto.FLOAT)
        if not scales:
            return rows
        return graph.node("Mul", [rows, graph.node("Gather", [scales[0], ids], axis=0)])

    def linear(self, graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
        """Multiply by the transpose of stacked weights."""
        return graph.node("Linear", [value, *_matrix(graph, name, parts, width)], domain=DOMAIN)

    def head(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Multiply by the transpose of the table; one that is tied is stored once."""
        return self.linear(graph, value, name, {name: graph.spec.vocab_size}, graph.spec.hidden_size)


def _matrix(graph: GraphBuilder, name: str, parts: dict[str, int], width: int) -> list[str]:
    """Hold weights as one `[N, width]` matrix, once; the names of it and, for int8, its scales."""
    scale = f"{name}_scale"
    if not graph.holds(name):
        for tensor in graph.file.rows(name, graph.source, parts, width, graph.form.weights):
            graph.hold(tensor)
    return [name, scale] if graph.holds(scale) else [name]
