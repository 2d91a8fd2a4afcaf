"""`streamsrv models`."""

import argparse
import json
from typing import Any

from engines.demo_model import model_path


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    models = commands.add_parser(
        "models",
        help="describe the model that a path holds",
        description="Describe the model that a path holds: family, layers, context, size, tokenizer.",
    )
    models.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="demo",
        help="a GGUF file, a Hugging Face folder, or 'demo'",
    )
    models.add_argument("--json", action="store_true", help="print one JSON object")
    models.set_defaults(command=_models)


def _models(arguments: argparse.Namespace) -> None:
    from engines.registry import inspect_model

    path = model_path(arguments.path)
    model = inspect_model(path)
    spec, vocabulary = model.spec, model.vocabulary
    tokenizer = json.loads(vocabulary.tokenizer_json)["model"]
    fallback = "byte fallback" if tokenizer.get("byte_fallback") else "byte level"
    facts: dict[str, Any] = {
        "name": model.name,
        "path": model.path,
        "revision": model.revision,
        "family": spec.family.value,
        "parameters": spec.num_parameters,
        "quantization": model.quantization,
        "size_bytes": model.size_bytes,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "context": spec.context_length,
        "vocabulary": spec.vocab_size,
        "tokenizer": f"{tokenizer.get('type', 'BPE')}, {fallback}",
        "end_token_ids": list(vocabulary.eos_token_ids),
        "chat_template": vocabulary.chat_template is not None,
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int):
            value = f"{value:,}"
        print(f"{name.replace('_', ' '):<16}{value}")
