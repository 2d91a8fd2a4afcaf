"""The graph that TensorRT gets: a prepared linear graph, rewritten in memory where it needs another form.

The weights stay where they are, beside the prepared graph; TensorRT's parser finds them by the graph's path.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

from engines.linear_graph import WINDOW_MASK


class AttentionForm(Enum):
    """How attention knows which cells of a row hold tokens."""

    MASK = "mask"
    """By the mask that the graph makes of the positions."""
    LENGTHS = "lengths"
    """By the length of each row, in a node of TensorRT's own that reads no further. It was compiled, but has
    never been run."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output as the graph declares it."""

    name: str
    kind: str
    """The name of its type in TensorRT's DataType, such as "HALF"."""
    shape: tuple[int | str, ...]
    """Sizes, or the letters of those that vary: B, S and R."""


@dataclass(frozen=True, slots=True)
class TrtGraph:
    """What the parser is given, and what is to be found in the network afterwards."""

    model: bytes
    """The graph, serialised, without its weights."""
    path: Path
    """The prepared graph; the weights are named from its folder."""
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def num_caches(self) -> int:
        """Caches of keys and of values over all layers."""
        return sum(info.name.startswith(("key_cache.", "value_cache.")) for info in self.inputs)


_KINDS: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.BOOL: "BOOL",
}


def read_graph(path: Path, max_len: int, attention: AttentionForm = AttentionForm.MASK) -> TrtGraph:
    """Read a prepared linear graph and rewrite it for TensorRT.

    - The cells of a row, M in the prepared graph, become a number: TensorRT's cache update wants it so.
    - Attention in float32 is marked as decomposable: there is no fused kernel for it.
    - On request Attention becomes TRT_Attention with each row's length. `nonpad_kv_seqlen`, the standard's
      own input for that, is never used: TensorRT's parser ignores it without an error.

    Args:
        path: the prepared graph.
        max_len: cells of a row.
        attention: how attention knows which cells hold tokens.

    Raises:
        OSError: the file cannot be read.

    """
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "M":
                dim.dim_value = max_len
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    is_float32 = kinds["key_cache.0"] == TensorProto.FLOAT
    if attention is AttentionForm.LENGTHS:
        _use_lengths(graph)
    if is_float32:
        for node in graph.node:
            if node.op_type in ("Attention", "TRT_Attention"):
                node.attribute.append(helper.make_attribute("TRT_decomposable", 1))
    return TrtGraph(model.SerializeToString(), path, _infos(graph.input), _infos(graph.output))


def _infos(values: Iterable[onnx.ValueInfoProto]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(
            value.name,
            _KINDS[value.type.tensor_type.elem_type],
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    )


def _use_lengths(graph: onnx.GraphProto) -> None:
    """Give every Attention the rows' lengths instead of the mask, and drop what made the mask.

    One that attends to a window keeps its mask: lengths do not say where a window begins.

    A run's tokens are the last of its row, so the last S of `write_indices + S` cells: "lower right".
    """
    names = {"axis": "lengths.axis", "seq": "lengths.tokens", "sum": "lengths.wide", "out": "lengths"}
    lengths = [
        helper.make_node("Shape", ["input_ids"], [names["seq"]], names["seq"], start=1, end=2),
        helper.make_node("Add", ["write_indices", names["seq"]], [names["sum"]], names["sum"]),
        helper.make_node("Cast", [names["sum"]], [names["out"]], names["out"], to=TensorProto.INT32),
    ]
    nodes = [_with_lengths(node, names["out"]) for node in graph.node]
    del graph.node[:]
    graph.node.extend([*lengths, *nodes])
    _drop_unused(graph)


def _with_lengths(node: NodeProto, lengths: str) -> NodeProto:
    if node.op_type != "Attention" or node.input[3] == WINDOW_MASK:
        return node
    scale = [attribute for attribute in node.attribute if attribute.name == "scale"]
    query, key, value = node.input[:3]
    changed = helper.make_node(
        "TRT_Attention",
        [query, key, value, "", "", lengths],
        list(node.output),
        node.name,
        causal_kind="lower_right",
    )
    changed.attribute.extend(scale)
    return changed


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes, inputs and constants that no output needs: the parser's warnings of such are errors."""
    needed = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:]
    graph.node.extend(kept[::-1])
    inputs = [value for value in graph.input if value.name in needed]
    del graph.input[:]
    graph.input.extend(inputs)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)
