"""A graph's nodes and its weights, as they come together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engines.form import GraphForm
from engines.options import Precision
from engines.spec import ModelSpec
from engines.weightfile import WeightFile, WeightSource

OPSET = 24
"""Of standard ONNX; nodes of another domain are of its version 1."""

ACTIVATION_TYPES = {
    Precision.F32: TensorProto.FLOAT,
    Precision.F16: TensorProto.FLOAT16,
    Precision.BF16: TensorProto.BFLOAT16,
}
"""ONNX's name for what a form's activations are."""


class GraphBuilder:
    """Collects a graph's nodes and writes its weights as it goes."""

    def __init__(self, spec: ModelSpec, source: WeightSource, file: WeightFile, form: GraphForm) -> None:
        """Begin a graph.

        Args:
            spec: the decoder's shape.
            source: its weights.
            file: where they go.
            form: what the graph is to be like.

        """
        self.spec = spec
        self.source = source
        self.file = file
        self.form = form
        self.type: int = ACTIVATION_TYPES[form.activations]
        """Of activations, keys and values; norms, biases and the rotary tables are of it, too."""
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

    def named_node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        """Add a node whose outputs, such as the graph's own, have names that are given ("" for none)."""
        stem = f"{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, outputs, stem, domain=domain, **attributes))

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
        """Hold a norm's weights or a bias, or several end to end, in the activations' type."""
        values = [self.source.tensor(part) for part in parts or (name,)]
        return self.table(name, np.concatenate(values))

    def table(self, name: str, value: NDArray[np.generic]) -> str:
        """Hold a computed array of floats beside the weights, in the activations' type."""
        return self.hold(self.file.array(name, value.astype(helper.tensor_dtype_to_np_dtype(self.type))))

    def hold(self, tensor: TensorProto) -> str:
        """Hold a tensor that was written to `file`."""
        self._tensors[tensor.name] = tensor
        return tensor.name

    def view(self, held: str, name: str, shape: Sequence[int]) -> str:
        """Hold a tensor that is held already once more, in another shape; both are the same bytes."""
        tensor = TensorProto()
        tensor.CopyFrom(self._tensors[held])
        tensor.name = name
        tensor.dims[:] = shape
        return self.hold(tensor)

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._tensors

    def norm(self, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis (Zhang and Sennrich, arXiv 1910.07467).

        It is computed in float32 whatever the activations are: the node's `stash_type` is that by default.
        """
        return self.node("RMSNormalization", [value, self.vector(name)], axis=-1, epsilon=self.spec.rms_eps)

    def model(self) -> onnx.ModelProto:
        """Put the graph together."""
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._tensors.values())
        )
        domains = dict.fromkeys(node.domain for node in self._nodes if node.domain)
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(name, 1) for name in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="streamsrv")
