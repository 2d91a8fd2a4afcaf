"""The linear dialect: standard ONNX that ONNX Runtime and TensorRT's parser both take.

A run is B sequences with S tokens each. Every sequence owns a row of M cells in each cache, and the cell of a
token is its position. What was left in the cells beyond a token's position is hidden by a mask.
"""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from engines.graph_builder import GraphBuilder
from engines.graph_parts import heads, hold_rope_tables, require_blocks, rotate, split
from engines.options import WeightFormat
from engines.quantization import BLOCK_SIZE, PLAIN_TYPES

_MASK = "mask"
WINDOW_MASK = "window_mask"
"""As the mask, and false for what lies before the window."""


class RowCache:
    """A row of each cache for every sequence: TensorScatter writes it, Attention reads all of it."""

    def declare(self, graph: GraphBuilder) -> None:
        """Declare inputs and caches, and make the mask `[B, 1, S, M]`: true where a token may look."""
        spec = graph.spec
        graph.input("input_ids", TensorProto.INT64, ["B", "S"])
        graph.input("position_ids", TensorProto.INT64, ["B", "S"])
        graph.input("write_indices", TensorProto.INT64, ["B"])
        graph.input("logit_rows", TensorProto.INT64, ["R"])
        graph.input("cache_positions", TensorProto.INT64, ["M"])
        for layer in range(spec.num_layers):
            for kind in ("key", "value"):
                shape: list[int | str] = ["B", spec.num_kv_heads, "M", spec.head_dim]
                graph.input(f"{kind}_cache.{layer}", graph.type, shape)
                graph.output(f"new_{kind}_cache.{layer}", graph.type, shape)
        hold_rope_tables(graph)
        positions = graph.node("Unsqueeze", ["position_ids", graph.ints(1, 3)])
        graph.node("LessOrEqual", ["cache_positions", positions], name=_MASK)
        if spec.window is not None:
            before = graph.node("Sub", [positions, graph.ints(spec.window.size)])
            inside = graph.node("Greater", ["cache_positions", before])
            graph.node("And", [_MASK, inside], name=WINDOW_MASK)

    def attend(self, graph: GraphBuilder, layer: int, packed: str) -> str:
        """Write the new keys and values into the rows, and attend to these under the mask."""
        spec = graph.spec
        if graph.type == TensorProto.FLOAT16:
            packed = _finite(graph, packed)
        query, key, value = split(graph, packed)
        query = rotate(graph, layer, heads(graph, layer, "q", query))
        key = rotate(graph, layer, heads(graph, layer, "k", key))
        value = graph.reshape(value, (0, 0, spec.num_kv_heads, spec.head_dim))
        value = graph.node("Transpose", [value], perm=[0, 2, 1, 3])
        caches = []
        for kind, new in (("key", key), ("value", value)):
            inputs = [f"{kind}_cache.{layer}", new, "write_indices"]
            name = f"new_{kind}_cache.{layer}"
            caches.append(graph.node("TensorScatter", inputs, name=name, axis=-2, mode="linear"))
        mask = WINDOW_MASK if spec.has_window(layer) else _MASK
        scale: dict[str, Any] = {} if spec.attention_scale is None else {"scale": spec.attention_scale}
        attended = graph.node("Attention", [query, *caches, mask], **scale)
        attended = graph.node("Transpose", [attended], perm=[0, 2, 1, 3])
        return graph.reshape(attended, (0, 0, spec.num_heads * spec.head_dim))


def _finite(graph: GraphBuilder, value: str) -> str:
    """Keep float16 that overflowed out of the caches.

    A mask cannot hide it there: what is hidden is multiplied by 0, and 0 times infinity is no number. So it
    would spoil every later sequence of the row. The bound leaves room to rotate and to multiply.
    """
    bound = np.array(2.0**14, np.float16)
    bounds = [graph.constant("least", -bound), graph.constant("largest", bound)]
    zero = graph.constant("zero", np.zeros((), np.float16))
    value = graph.node("Where", [graph.node("IsNaN", [value]), zero, value])
    return graph.node("Clip", [value, *bounds])


class StandardProducts:
    """MatMul on `[in, out]` weights, behind DequantizeLinear where they are few bits.

    The look-up needs the table's rows, and neither ONNX Runtime nor TensorRT gathers those of a short type in
    a way that is both allowed and fast. So they are kept in two bytes beside the head's own matrix, unless
    the form is a plain one: then a tied head reads the same table.
    """

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Look the tokens up.

        Raises:
            EngineError: the model's sizes do not go with the form.

        """
        if graph.form.weights is WeightFormat.INT4:
            require_blocks(graph, WeightFormat.INT8)
        form = graph.form.weights
        if form not in PLAIN_TYPES:
            form = WeightFormat.BF16 if graph.type == TensorProto.BFLOAT16 else WeightFormat.F16
        spec = graph.spec
        for tensor in graph.file.rows(
            "embed", graph.source, {"embed": spec.vocab_size}, spec.hidden_size, form
        ):
            graph.hold(tensor)
        return self._activations(graph, graph.node("Gather", ["embed", ids], axis=0), form)

    def linear(self, graph: GraphBuilder, value: str, name: str, parts: dict[str, int], width: int) -> str:
        """Multiply by stored columns."""
        return self._product(graph, value, name, parts, width, graph.form.weights)

    def head(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Multiply by the table's rows, if they are plain, or by a matrix of the head's own.

        It is int8 where the other matrices are int4: on a 135M model an int4 head alone cost 0.08 nats.
        """
        spec, form = graph.spec, graph.form.weights
        parts = {name: spec.vocab_size}
        if form not in PLAIN_TYPES:
            form = WeightFormat.INT8 if form is WeightFormat.INT4 else form
            return self._product(graph, value, "head", parts, spec.hidden_size, form)
        if not graph.holds(name):
            for tensor in graph.file.rows(name, graph.source, parts, spec.hidden_size, form):
                graph.hold(tensor)
        rows = graph.reshape(value, (-1, spec.hidden_size))
        return graph.node("Gemm", [rows, self._activations(graph, name, form)], transB=1)

    def _product(
        self,
        graph: GraphBuilder,
        value: str,
        name: str,
        parts: dict[str, int],
        width: int,
        form: WeightFormat,
    ) -> str:
        """Multiply by columns stored in a form."""
        scale_type = helper.tensor_dtype_to_np_dtype(graph.type)
        tensors = graph.file.columns(name, graph.source, parts, width, form, scale_type)
        names = [graph.hold(tensor) for tensor in tensors]
        if form in PLAIN_TYPES:
            return graph.node("MatMul", [value, self._activations(graph, name, form)])
        if form is not WeightFormat.INT4:
            return graph.node("MatMul", [value, graph.node("DequantizeLinear", names, axis=1)])
        weights = graph.node("DequantizeLinear", names[:2], axis=0, block_size=BLOCK_SIZE)
        product = graph.node("MatMul", [value, weights])
        if len(names) == 2:
            return product
        # A block's offset is the same for each of its inputs, so it multiplies the sum of these. TensorRT has
        # no zero points but 0.
        blocks = graph.reshape(value, (0, 0, width // BLOCK_SIZE, BLOCK_SIZE))
        sums = graph.node("ReduceSum", [blocks, graph.ints(3)], keepdims=0)
        return graph.node("Add", [product, graph.node("MatMul", [sums, names[2]])])

    def _activations(self, graph: GraphBuilder, value: str, form: WeightFormat) -> str:
        """Turn plain weights into the activations' type, if they are of another."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(PLAIN_TYPES[form]))
        return value if kind == graph.type else graph.node("Cast", [value], to=graph.type)
