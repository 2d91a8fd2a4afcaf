"""TensorRT's networks, and the parser that fills them from ONNX files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from tests.standins.trt_names import DataType, Dims, ErrorCode, ILogger, LayerType, Severity, check_made

_TYPES: dict[int, DataType] = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.INT64: DataType.INT64,
    TensorProto.INT32: DataType.INT32,
    TensorProto.BOOL: DataType.BOOL,
}
_DOMAINS = ("", "ai.onnx", "trt.plugins")


@dataclass(frozen=True, slots=True)
class ITensor:
    name: str
    dtype: DataType
    shape: Dims
    dims: tuple[int | str, ...]
    """As ONNX has them, with the names of what is dynamic."""
    is_network_input: bool

    @property
    def is_network_output(self) -> bool:
        return not self.is_network_input

    @property
    def is_shape_tensor(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ILayer:
    name: str
    type: LayerType


@dataclass(eq=False)
class INetworkDefinition:
    """A network, filled by the parser."""

    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    layers: list[ILayer] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Output by output, the input that it is updated in place of."""
    model: bytes = b""
    """The graph as ONNX Runtime takes it."""
    folder: str = ""
    """Where its weights are."""
    name: str = "network"

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> ITensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def get_output(self, index: int) -> ITensor | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def get_layer(self, index: int) -> ILayer | None:
        return self.layers[index] if index < len(self.layers) else None


@dataclass(frozen=True, slots=True)
class ParserError:
    _desc: str
    _node: int = -1
    _code: ErrorCode = ErrorCode.UNSUPPORTED_NODE

    def desc(self) -> str:
        return self._desc

    def node(self) -> int:
        return self._node

    def code(self) -> ErrorCode:
        return self._code

    def node_name(self) -> str:
        return ""

    def node_operator(self) -> str:
        return ""

    def file(self) -> str:
        return ""

    def func(self) -> str:
        return "parse"

    def line(self) -> int:
        return 0


class OnnxParser:
    """Reads a graph and refuses what TensorRT's own parser refuses of a cache update."""

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self._logger = check_made(logger, ILogger)
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def clear_errors(self) -> None:
        self._errors.clear()

    def parse_from_file(self, model: str) -> bool:
        path = Path(text_of(model))
        if not path.is_file():
            return self._refuse(f"Input file cannot be found, or is not a regular file: {path}")
        return self.parse(path.read_bytes(), str(path))

    def parse(self, model: Any, path: str | None = None) -> bool:
        try:
            proto = onnx.load_model_from_string(bytes(model))
        except Exception:  # whatever protobuf raises
            return self._refuse("Failed to parse ONNX model from the given buffer")
        network, graph = self._network, proto.graph
        constants = {tensor.name for tensor in graph.initializer}
        network.inputs += [_tensor(v, True) for v in graph.input if v.name not in constants]
        network.outputs += [_tensor(v, False) for v in graph.output]
        outputs = {tensor.name for tensor in network.outputs}
        inputs = {tensor.name: tensor for tensor in network.inputs}
        for index, node in enumerate(graph.node):
            if node.domain not in _DOMAINS or node.op_type.startswith("TRT_"):
                return self._refuse(f"no importer registered for op: {node.op_type}", index)
            if node.op_type == "TensorScatter":
                cache = inputs.get(node.input[0])
                if cache is None or node.output[0] not in outputs:
                    return self._refuse("a cache update needs a network input and a network output", index)
                if cache.shape[2] < 0:
                    return self._refuse(f"{cache.name}: the length of a cache must be static", index)
                network.aliases[node.output[0]] = cache.name
            is_update = node.op_type == "TensorScatter"
            kind = LayerType.KV_CACHE_UPDATE if is_update else LayerType.CAST
            network.layers.append(ILayer(node.name, kind))
            for attribute in [a for a in node.attribute if a.name.startswith("TRT_")]:
                node.attribute.remove(attribute)
        used = {name for node in graph.node for name in node.input}
        for tensor in network.inputs:
            if tensor.name not in used:
                self._logger.log(Severity.WARNING, f"Unused Input: {tensor.name}")
        network.model = proto.SerializeToString()
        network.folder = str(Path(path).resolve().parent) if path else ""
        return True

    def _refuse(self, words: str, node: int = -1) -> bool:
        self._errors.append(ParserError(f"Assertion failed: {words}", node))
        self._logger.log(Severity.ERROR, f"In node {node} (parse): {words}")
        return False


def _tensor(value: onnx.ValueInfoProto, is_input: bool) -> ITensor:
    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or int(dim.dim_value) for dim in kind.shape.dim)
    shape = Dims(-1 if isinstance(dim, str) else dim for dim in dims)
    return ITensor(value.name, _TYPES[kind.elem_type], shape, dims, is_input)


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"incompatible function arguments: {value!r} is no str")
    return value
