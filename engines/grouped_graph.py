"""The grouped dialect: ONNX Runtime's own nodes, fast on a CPU.

The cache is as in the linear dialect: every sequence owns a row, and the cell of a token is its position. The
nodes differ: GroupQueryAttention rotates, writes the rows in place and reads no further than each sequence's
own length; MatMulNBits multiplies by blocks of few bits as they are stored. They are described in ONNX
Runtime's docs/ContribOperators.md.
"""

from typing import Any

from onnx import ModelProto, TensorProto, helper

from engines.api import EngineError
from engines.block_weights import BLOCK_SIZE, hold_int4, hold_int8
from engines.graph_builder import GraphBuilder
from engines.graph_parts import heads, hold_rope_tables, require_blocks, rope_tables, split
from engines.options import WeightFormat

DOMAIN = "com.microsoft"
"""ONNX Runtime's own nodes."""

_HEAD_UNIT = 16
"""GroupQueryAttention rotates heads of a multiple of so many numbers."""

_BY_INT8 = 4
"""MatMulNBits' accuracy level at which each block of activations is rounded to int8 as well; the products of
integers are several times as fast as float32 ones."""


class GroupedCache:
    """A row of each cache for every sequence, in GroupQueryAttention's order `[B, kv_heads, M, head_dim]`.

    Given S > 1 and a past, it takes one sequence only. Past and present must be bound to the same memory.
    """

    def declare(self, graph: GraphBuilder) -> None:
        """Declare inputs and caches.

        `seqlens_k` `[B]` is the position of each row's last new token, `total_sequence_length` the largest of
        them plus one. Equal to S, it says that no row has a past.

        Raises:
            EngineError: the model's heads do not go with the node.

        """
        spec = graph.spec
        if spec.head_dim % _HEAD_UNIT:
            raise EngineError(
                f"{spec.name} has heads of {spec.head_dim} numbers, and ONNX Runtime's fast attention takes "
                f"multiples of {_HEAD_UNIT}; choose weights float32 and precision f32, which do without it"
            )
        graph.input("input_ids", TensorProto.INT64, ["B", "S"])
        graph.input("seqlens_k", TensorProto.INT32, ["B"])
        graph.input("total_sequence_length", TensorProto.INT32, [])
        graph.input("logit_rows", TensorProto.INT64, ["R"])
        for layer in range(spec.num_layers):
            for kind in ("key", "value"):
                shape: list[int | str] = ["B", spec.num_kv_heads, "M", spec.head_dim]
                graph.input(f"{kind}_cache.{layer}", graph.type, shape)
                graph.output(f"new_{kind}_cache.{layer}", graph.type, shape)
        hold_rope_tables(graph)

    def attend(self, graph: GraphBuilder, layer: int, packed: str) -> str:
        """Emit one node; with norms of its own it takes Q, K and V apart, else together."""
        spec = graph.spec
        parts = [packed, "", ""]
        if spec.qk_norm:  # the node's own inputs for them are not honoured on a CPU
            query, key, value = split(graph, packed)
            query, key = (
                graph.reshape(heads(graph, layer, part, split_part), (0, 0, -1))
                for part, split_part in (("q", query), ("k", key))
            )
            parts = [query, key, value]
        settings: dict[str, Any] = {"num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
        if spec.attention_scale is not None:
            settings["scale"] = spec.attention_scale
        if spec.window is not None and spec.has_window(layer):
            settings["local_window_size"] = spec.window.size
        caches = [f"key_cache.{layer}", f"value_cache.{layer}"]
        attended = f"attended.{layer}"
        graph.named_node(
            "GroupQueryAttention",
            [*parts, *caches, "seqlens_k", "total_sequence_length", *rope_tables(spec, layer)],
            [attended, *(f"new_{name}" for name in caches)],
            domain=DOMAIN,
            do_rotary=1,
            **settings,
        )
        return attended


class BlockProducts:
    """MatMulNBits on blocks of 32 inputs, in int8 or int4; MatMul where the weights are float32.

    DynamicQuantizeMatMul, int8 with a scale for each output, was measured, too: on a 135M model it took 0.63
    of the time at 64 sequences and 0.51 of a prompt's of 512 tokens, but it has one scale for the activations
    of all tokens of a run, among which those of a text's beginning are hundreds of times as large as others.
    A prompt at once was then 0.52 nats away from float32, blocks of int8 0.004; a scale for each token still
    left 0.04, and a sequence's logits would depend on who else is in the run.
    """

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Look tokens up; the table is int8 where the matrices are int4.

        Raises:
            EngineError: the model's sizes do not go with the form.

        """
        if graph.form.weights is not WeightFormat.FLOAT32:
            require_blocks(graph, WeightFormat.FLOAT32, " here")
        spec = graph.spec
        parts = {"embed": spec.vocab_size}
        if graph.form.weights is WeightFormat.FLOAT32:
            self._hold_rows(graph, "embed")
            return graph.node("Gather", ["embed", ids], axis=0)
        table, scales = hold_int8(graph, "embed", parts, spec.hidden_size)
        rows = graph.view(table, "embed_rows", (spec.vocab_size, spec.hidden_size))
        return graph.node(
            "GatherBlockQuantized",
            [rows, ids, scales],
            domain=DOMAIN,
            bits=8,
            block_size=BLOCK_SIZE,
            gather_axis=0,
            quantize_axis=1,
        )

    def linear(self, graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
        """Multiply by the transpose of stacked weights."""
        form = graph.form.weights
        if form is WeightFormat.INT4:
            return _int4_product(graph, value, name, parts, width)
        if form is WeightFormat.INT8:
            return _int8_product(graph, value, name, parts, width)
        tensors = graph.file.columns(name, graph.source, parts, width, form, "float32")
        return graph.node("MatMul", [value, *(graph.hold(tensor) for tensor in tensors)])

    def head(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Multiply by the table's rows, in int8 where the other matrices are int4; tied, it is stored once.

        In int4 the head alone cost 0.06 nats on a 135M model, and saved a tenth of a token's time.
        """
        spec = graph.spec
        if graph.form.weights is not WeightFormat.FLOAT32:
            return _int8_product(graph, value, name, {name: spec.vocab_size}, spec.hidden_size)
        self._hold_rows(graph, name)
        rows = graph.reshape(value, (-1, spec.hidden_size))
        return graph.node("Gemm", [rows, name], transB=1)

    def _hold_rows(self, graph: GraphBuilder, name: str) -> None:
        spec = graph.spec
        if not graph.holds(name):
            parts = {name: spec.vocab_size}
            for tensor in graph.file.rows(name, graph.source, parts, spec.hidden_size, graph.form.weights):
                graph.hold(tensor)


def _int8_product(graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
    tensors = hold_int8(graph, name, parts, width)
    return _block_product(graph, [value, *tensors], bits=8, width=width, num_rows=sum(parts.values()))


def _int4_product(graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
    """Multiply; where blocks have offsets, by the sums of the activations of each block as well."""
    tensors = hold_int4(graph, name, parts, width)
    num_rows = sum(parts.values())
    if len(tensors) == 2:
        return _block_product(graph, [value, *tensors], bits=4, width=width, num_rows=num_rows)
    num_blocks = width // BLOCK_SIZE
    blocks = graph.reshape(value, (0, 0, num_blocks, BLOCK_SIZE))
    sums = graph.node("ReduceSum", [blocks, graph.ints(3)], keepdims=0)
    wider = graph.node("Concat", [value, sums], axis=-1)
    return _block_product(graph, [wider, *tensors], bits=4, width=width + num_blocks, num_rows=num_rows)


def _block_product(graph: GraphBuilder, inputs: list[str], *, bits: int, width: int, num_rows: int) -> str:
    return graph.node(
        "MatMulNBits",
        inputs,
        domain=DOMAIN,
        K=width,
        N=num_rows,
        bits=bits,
        block_size=BLOCK_SIZE,
        accuracy_level=_BY_INT8,
    )


def use_own_nodes(model: ModelProto) -> None:
    """Put ONNX Runtime's own nodes in place of standard ones that it would take apart.

    It joins the norms with the sums before them. On a 135M model a token took 5% less time.
    """
    for node in model.graph.node:
        if node.op_type == "RMSNormalization":
            node.op_type = "SimplifiedLayerNormalization"  # is in the standard's domain, where ONNX has none
        elif node.op_type == "Swish":
            node.op_type, node.domain = "QuickGelu", DOMAIN
            node.attribute.append(helper.make_attribute("alpha", 1.0))
