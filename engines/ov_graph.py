"""Our ONNX graph as OpenVINO's: compressed products and paged attention. Imported by `engines.ov` alone."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset13 as ops
from openvino.frontend.onnx import ConversionExtension

from engines.api import EngineError


def read_graph(core: ov.Core, path: Path, activations: Type) -> ov.Model:
    """Read a paged graph and turn the nodes of our own domain into OpenVINO's.

    Args:
        core: where to read it.
        path: the graph's file.
        activations: what the model will be computed in.

    Raises:
        RuntimeError: OpenVINO cannot read it.
        EngineError: this version has no paged attention that we know.

    """
    linear = partial(_convert_linear, activations=activations)
    core.add_extension(ConversionExtension("Linear", "streamsrv", linear))
    core.add_extension(ConversionExtension("PagedAttention", "streamsrv", _convert_attention))
    model = core.read_model(path)
    for parameter in model.get_parameters():
        if "_cache." in parameter.get_friendly_name():
            parameter.set_element_type(Type.dynamic)  # the plugin sets type and layout when compiling
            parameter.set_partial_shape(ov.PartialShape([-1, -1, -1, -1]))
    model.validate_nodes_and_infer_types()
    return model


def _convert_linear(node: Any, activations: Type) -> list[ov.Output]:
    """Multiply by stored weights; in this form the plugin keeps int8 weights compressed."""
    value, weights = node.get_input(0), node.get_input(1)
    if weights.get_element_type() == activations == Type.bf16:
        # Converted to float32 here, the weights would stay in memory in that size too.
        product = ops.matmul(ops.convert(value, Type.bf16), weights, False, True)
        return list(ops.convert(product, Type.f32).outputs())
    if weights.get_element_type() != Type.f32:
        weights = ops.convert(weights, Type.f32).output(0)
    if node.get_input_size() == 3:
        weights = ops.multiply(weights, node.get_input(2)).output(0)
    return list(ops.matmul(value, weights, False, True).outputs())


def _convert_attention(node: Any) -> list[ov.Output]:
    """Make the plugin's paged attention out of ours; what is not used are empty constants."""
    try:
        from openvino.op import _PagedAttentionExtension
    except ImportError as error:
        raise EngineError(
            f"OpenVINO {ov.__version__} has no paged attention under the name that streamsrv knows; "
            "install a version that it supports: pip install 'streamsrv[openvino]'"
        ) from error

    def constant(value: float, kind: type[np.generic]) -> ov.Output:
        return ops.constant(np.array(value, kind)).output(0)

    def empty(kind: type[np.generic], rank: int = 1) -> ov.Output:
        return ops.constant(np.zeros((0,) * rank, kind)).output(0)

    arguments = [node.get_input(i) for i in range(9)]
    arguments += [
        constant(node.get_attribute("scale"), np.float32),
        constant(node.get_attribute("window", 0), np.int32),  # sliding window; 0 is none
        empty(np.float32),  # ALiBi slopes
        node.get_input(9),  # max_context_len
        empty(np.int32),  # score aggregation window
        empty(np.int32),  # rotation of cached keys: blocks,
        empty(np.int32),  # deltas,
        empty(np.float32),  # table
        empty(np.float32),  # sparse attention: threshold,
        constant(0, np.int32),  # block size,
        constant(0, np.int32),  # stride
        empty(np.float32, 4),  # sinks
        constant(0, np.int32),  # eviction: start,
        empty(np.int32),  # evictable sizes,
        empty(np.int32),  # blocks,
        empty(np.int32),  # their begins
        empty(np.int32),  # token types
        empty(np.uint8),  # query-to-query bias,
        empty(np.int32),  # its begins
    ]
    attention = _PagedAttentionExtension(arguments)
    num_heads, width = node.get_attribute("num_kv_heads"), node.get_attribute("head_dim")
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = num_heads
    info["k_head_size"] = info["v_head_size"] = width
    return list(attention.outputs()[:1])
