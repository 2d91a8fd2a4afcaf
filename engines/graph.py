"""A decoder as an ONNX graph: Llama, Qwen2 and Qwen3, with the cache left to a dialect.

Activations are `[N, S, features]`. What N and S are is the dialect's matter: the paged one lays all
tokens of a step end to end (N tokens, S = 1).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engines.options import WeightFormat
from engines.rope import tables
from engines.spec import ModelSpec
from engines.weightfile import WeightFile, WeightSource

OPSET = 24
DOMAIN = "streamsrv"
"""The domain of our own nodes: `Linear` and `PagedAttention`."""


class Dialect(Protocol):
    """The part of the graph that knows about the cache."""

    def declare(self, graph: "GraphBuilder") -> None:
        """Declare the inputs and outputs that are about the cache."""
        ...

    def attend(self, graph: "GraphBuilder", layer: int, query: str, key: str, value: str) -> str:
        """Store a layer's new keys and values and attend to all of them.

        Args:
            graph: where the nodes go.
            layer: its index.
            query: `[N, heads, S, head_dim]`, rotated.
            key: `[N, kv_heads, S, head_dim]`, rotated.
            value: `[N, S, kv_heads * head_dim]`.

        Returns:
            `[N, S, heads * head_dim]`.

        """
        ...


class PagedDialect:
    """Blocks of tokens in one pool and a block table per sequence; one node in our own domain."""

    _CONTROLS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")

    def declare(self, graph: "GraphBuilder") -> None:
        """Declare the block tables and each layer's pools; the engine decides the pools' layout."""
        for name in self._CONTROLS:
            graph.input(name, TensorProto.INT32, [f"num_{name}"])
        graph.input("max_context_len", TensorProto.INT32, [])
        for layer in range(graph.spec.num_layers):
            for kind in ("key", "value"):
                graph.input(f"{kind}_cache.{layer}", TensorProto.FLOAT, ["a", "b", "c", "d"])

    def attend(self, graph: "GraphBuilder", layer: int, query: str, key: str, value: str) -> str:
        """Emit one PagedAttention node on `[tokens, heads * head_dim]`."""
        spec = graph.spec
        query = graph.reshape(graph.node("Transpose", [query], perm=[0, 2, 1, 3]), (0, -1))
        key = graph.reshape(graph.node("Transpose", [key], perm=[0, 2, 1, 3]), (0, -1))
        value = graph.reshape(value, (0, -1))
        caches = [f"key_cache.{layer}", f"value_cache.{layer}"]
        attended = graph.node(
            "PagedAttention",
            [query, key, value, *caches, *self._CONTROLS, "max_context_len"],
            domain=DOMAIN,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=float(spec.head_dim) ** -0.5,
        )
        return graph.reshape(attended, (0, 1, spec.num_heads * spec.head_dim))


class GraphBuilder:
    """Collects a graph's nodes and writes its weights as it goes."""

    def __init__(self, spec: ModelSpec, source: WeightSource, file: WeightFile, form: WeightFormat) -> None:
        self.spec = spec
        self._source = source
        self._file = file
        self._form = form
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._tensors: dict[str, TensorProto] = {}

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """Declare an input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declare an output of the graph."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def node(
        self, op: str, inputs: Sequence[str], domain: str = "", name: str = "", **attributes: Any
    ) -> str:
        """Add a node and return its output's name."""
        return self.nodes(op, inputs, 1, domain, name, **attributes)[0]

    def nodes(
        self,
        op: str,
        inputs: Sequence[str],
        num_outputs: int,
        domain: str = "",
        name: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node of several outputs and return their names."""
        stem = name or f"{op}_{len(self._nodes)}"
        outputs = [stem] if num_outputs == 1 else [f"{stem}.{i}" for i in range(num_outputs)]
        self._nodes.append(helper.make_node(op, inputs, outputs, stem, domain=domain, **attributes))
        return outputs

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Hold a small constant inside the graph, once under its name."""
        if name not in self._tensors:
            self._tensors[name] = onnx.numpy_helper.from_array(value, name)
        return name

    def ints(self, *values: int) -> str:
        """Hold a vector of integers: a shape, axes or sizes."""
        return self.constant("i" + "_".join(map(str, values)), np.array(values, np.int64))

    def reshape(self, value: str, shape: tuple[int, ...]) -> str:
        """Reshape; 0 keeps a dimension, -1 is what remains."""
        return self.node("Reshape", [value, self.ints(*shape)])

    def vector(self, name: str, parts: Sequence[str] = ()) -> str:
        """Hold a norm's weights or a bias, or several end to end."""
        values = [self._source.tensor(part) for part in parts or (name,)]
        return self.table(name, np.concatenate(values))

    def table(self, name: str, value: NDArray[np.generic]) -> str:
        """Hold a computed array beside the weights."""
        self._tensors[name] = self._file.array(name, value)
        return name

    def matrix(self, name: str, parts: dict[str, int], width: int) -> list[str]:
        """Hold weights stacked as one `[N, width]` matrix; the names of it and, for int8, its scales."""
        if name not in self._tensors:
            matrix, scales = self._file.matrix(name, self._source, parts, width, self._form)
            self._tensors[name] = matrix
            if scales is not None:
                self._tensors[scales.name] = scales
        scale = f"{name}_scale"
        return [name, scale] if scale in self._tensors else [name]

    def linear(self, value: str, name: str, parts: dict[str, int], width: int) -> str:
        """Multiply by the transpose of stacked weights: `[N, S, width]` to `[N, S, sum of parts]`."""
        return self.node("Linear", [value, *self.matrix(name, parts, width)], domain=DOMAIN)

    def norm(self, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis (Zhang and Sennrich, arXiv 1910.07467)."""
        return self.node("RMSNormalization", [value, self.vector(name)], axis=-1, epsilon=self.spec.rms_eps)

    def model(self) -> onnx.ModelProto:
        """Put the graph together."""
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._tensors.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="streamsrv")


DIALECTS: Mapping[str, Callable[[], Dialect]] = {"paged": PagedDialect}
"""By the name that prepared models go under."""


def write_model(
    spec: ModelSpec,
    source: WeightSource,
    path: Path,
    form: WeightFormat,
    dialect: Dialect,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write a decoder's graph, and its weights beside it with the suffix `.weights`.

    The graph takes `input_ids` and `position_ids` `[N, S]`, `logit_rows` `[R]` (indices into the N * S
    tokens) and the dialect's inputs, and gives `logits` `[R, vocab_size]` in float32.

    Args:
        spec: the decoder's shape.
        source: its weights.
        path: the graph's file.
        form: how to hold the matrices.
        dialect: how the graph keeps keys and values.
        progress: called with the fraction done.

    Raises:
        OSError: the files cannot be written.

    """
    with WeightFile(path.with_suffix(".weights")) as file:
        graph = GraphBuilder(spec, source, file, form)
        _build(graph, dialect, progress or (lambda _: None))
    path.write_bytes(graph.model().SerializeToString())


def _build(graph: GraphBuilder, dialect: Dialect, progress: Callable[[float], None]) -> None:
    spec = graph.spec
    ids = graph.input("input_ids", TensorProto.INT64, ["N", "S"])
    positions = graph.input("position_ids", TensorProto.INT64, ["N", "S"])
    logit_rows = graph.input("logit_rows", TensorProto.INT64, ["R"])
    dialect.declare(graph)

    cos_table, sin_table = tables(spec, spec.context_length)
    angles = [graph.table("rope.cos", cos_table), graph.table("rope.sin", sin_table), positions]

    hidden = _embed(graph, ids)
    for layer in range(spec.num_layers):
        hidden = graph.node("Add", [hidden, _attention(graph, dialect, layer, hidden, angles)])
        hidden = graph.node("Add", [hidden, _feed_forward(graph, layer, hidden)])
        progress((layer + 1) / (spec.num_layers + 1))

    hidden = graph.reshape(hidden, (-1, 1, spec.hidden_size))
    wanted = graph.node("Gather", [hidden, logit_rows], axis=0)
    table = "embed" if spec.tied_embeddings else "lm_head"
    normed = graph.norm(wanted, "final_norm")
    logits = graph.linear(normed, table, {table: spec.vocab_size}, spec.hidden_size)
    graph.node("Reshape", [logits, graph.ints(0, spec.vocab_size)], name="logits")
    graph.output("logits", TensorProto.FLOAT, ["R", spec.vocab_size])
    progress(1.0)


def _embed(graph: GraphBuilder, ids: str) -> str:
    """Look the tokens up: rows of the table in its stored form, then to float."""
    spec = graph.spec
    table, *scales = graph.matrix("embed", {"embed": spec.vocab_size}, spec.hidden_size)
    rows = graph.node("Gather", [table, ids], axis=0)
    rows = graph.node("Cast", [rows], to=TensorProto.FLOAT)
    if not scales:
        return rows
    return graph.node("Mul", [rows, graph.node("Gather", [scales[0], ids], axis=0)])


def _attention(graph: GraphBuilder, dialect: Dialect, layer: int, hidden: str, angles: list[str]) -> str:
    """One layer's attention, before the residual sum; Q, K and V come from one product."""
    spec, stem = graph.spec, f"layers.{layer}"
    widths = {
        "q": spec.num_heads * spec.head_dim,
        "k": spec.num_kv_heads * spec.head_dim,
        "v": spec.num_kv_heads * spec.head_dim,
    }
    parts = {f"{stem}.{part}": width for part, width in widths.items()}
    normed = graph.norm(hidden, f"{stem}.attn_norm")
    packed = graph.linear(normed, f"{stem}.qkv", parts, spec.hidden_size)
    if spec.qkv_bias:
        bias = graph.vector(f"{stem}.qkv_bias", [f"{part}_bias" for part in parts])
        packed = graph.node("Add", [packed, bias])
    query, key, value = graph.nodes("Split", [packed, graph.ints(*widths.values())], 3, axis=-1)
    query = _rotate(graph, query, spec.num_heads, f"{stem}.q_norm", angles)
    key = _rotate(graph, key, spec.num_kv_heads, f"{stem}.k_norm", angles)
    attended = dialect.attend(graph, layer, query, key, value)
    return graph.linear(attended, f"{stem}.o", {f"{stem}.o": spec.hidden_size}, widths["q"])


def _rotate(graph: GraphBuilder, packed: str, num_heads: int, norm: str, angles: list[str]) -> str:
    """Split `[N, S, heads * head_dim]` into heads in front of S, normalise them if need be, and turn them."""
    heads = graph.reshape(packed, (0, 0, num_heads, graph.spec.head_dim))
    if graph.spec.qk_norm:
        heads = graph.norm(heads, norm)
    return graph.node("RotaryEmbedding", [graph.node("Transpose", [heads], perm=[0, 2, 1, 3]), *angles])


def _feed_forward(graph: GraphBuilder, layer: int, hidden: str) -> str:
    """One layer's gated feed-forward network (SwiGLU: Shazeer, arXiv 2002.05202), before the sum."""
    spec, stem = graph.spec, f"layers.{layer}"
    width = spec.intermediate_size
    normed = graph.norm(hidden, f"{stem}.mlp_norm")
    parts = {f"{stem}.gate": width, f"{stem}.up": width}
    packed = graph.linear(normed, f"{stem}.gate_up", parts, spec.hidden_size)
    gate, up = graph.nodes("Split", [packed, graph.ints(width, width)], 2, axis=-1)
    active = graph.node("Mul", [graph.node("Swish", [gate]), up])
    return graph.linear(active, f"{stem}.down", {f"{stem}.down": spec.hidden_size}, width)
