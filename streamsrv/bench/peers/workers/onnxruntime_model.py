"""Give our graph the inputs and outputs that onnxruntime-genai knows.

    python onnxruntime_model.py FOLDER SPEC

FOLDER has model.onnx, a graph of the grouped dialect, and SPEC is JSON: what genai_config.json says of the
model. The products and the attention stay what they are; they are the nodes that onnxruntime-genai's own
builder puts there as well (MatMulNBits, GroupQueryAttention).
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Rewrite the graph in place, and write genai_config.json beside it."""
    folder, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
    path = folder / "model.onnx"
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(path, load_external_data=False)
    _rename(onnx, model.graph, spec["num_hidden_layers"])
    onnx.save(model, path)
    config = {"model": _model(spec), "search": {"past_present_share_buffer": True}}
    (folder / "genai_config.json").write_text(json.dumps(config, indent=2))


def _rename(onnx: Any, graph: Any, num_layers: int) -> None:
    """Call caches as onnxruntime-genai does, and make the other inputs out of its attention mask."""
    names = {"logits": "rows_of_logits"}
    for i in range(num_layers):
        for kind in ("key", "value"):
            names[f"{kind}_cache.{i}"] = f"past_key_values.{i}.{kind}"
            names[f"new_{kind}_cache.{i}"] = f"present.{i}.{kind}"
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    made = {"seqlens_k", "total_sequence_length", "logit_rows"}
    inputs = [value for value in graph.input if value.name not in made]
    kinds, make = onnx.TensorProto, onnx.helper
    inputs.append(make.make_tensor_value_info("attention_mask", kinds.INT64, ["B", "T"]))
    outputs = [value for value in graph.output if value.name != "rows_of_logits"]
    vocabulary = next(v for v in graph.output if v.name == "rows_of_logits").type.tensor_type.shape.dim[1]
    outputs.append(make.make_tensor_value_info("logits", kinds.FLOAT, ["B", 1, vocabulary.dim_value]))
    before, after = _nodes(onnx)
    nodes = [*before, *graph.node, *after]
    for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
        del field[:]
        field.extend(values)


def _nodes(onnx: Any) -> tuple[list[Any], list[Any]]:
    """Make the nodes before ours, and the one behind them."""
    make = onnx.helper.make_node

    def constant(name: str, value: Any) -> Any:
        array = importlib.import_module("numpy").array(value, "int64")
        return make("Constant", [], [name], value=onnx.numpy_helper.from_array(array, name))

    before = [
        constant("zero", 0),
        constant("one", 1),
        constant("ones", [1]),
        # The mask has a 1 for each token so far; the attention wants the last one's position.
        make("ReduceSum", ["attention_mask", "ones"], ["num_tokens"], keepdims=0),
        make("Sub", ["num_tokens", "one"], ["last_positions"]),
        make("Cast", ["last_positions"], ["seqlens_k"], to=onnx.TensorProto.INT32),
        make("Shape", ["attention_mask"], ["mask_shape"]),
        make("Gather", ["mask_shape", "one"], ["mask_length"]),
        make("Cast", ["mask_length"], ["total_sequence_length"], to=onnx.TensorProto.INT32),
        # Logits of each row's last token only, as its builder's prune_lm_head makes them.
        make("Shape", ["input_ids"], ["ids_shape"]),
        make("Gather", ["ids_shape", "one"], ["row_length"]),
        make("Size", ["input_ids"], ["num_ids"]),
        make("Sub", ["row_length", "one"], ["first_row"]),
        make("Range", ["first_row", "num_ids", "row_length"], ["logit_rows"]),
    ]
    return before, [make("Unsqueeze", ["rows_of_logits", "ones"], ["logits"])]


def _model(spec: dict[str, Any]) -> dict[str, Any]:
    inputs = {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    outputs = {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    }
    of_model = ("bos_token_id", "eos_token_id", "pad_token_id", "context_length", "vocab_size")
    decoder = {
        "filename": "model.onnx",
        "session_options": {"provider_options": []},
        "inputs": inputs,
        "outputs": outputs,
        **{name: value for name, value in spec.items() if name not in of_model},
    }
    return {"type": "llama", "decoder": decoder, **{name: spec[name] for name in of_model}}


if __name__ == "__main__":
    main()
