import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from tokenizers import Tokenizer

from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import WeightFormat
from engines.spec import Vocabulary
from engines.tensors import tensor_shapes
from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.conversion import converted
from streamsrv.bench.peers.environment import PeerEnvironment
from streamsrv.bench.peers.gguf_copy import copy_gguf
from streamsrv.bench.peers.hf_folder import write_hf_folder
from tests import tiny
from tests.accuracy import oracle_of
from tests.conftest import TinyPaths


def relative_error(path: Path, other: Path) -> float:
    """The largest error of any of the tensors, against the root of its mean square."""
    errors = []
    with open_checkpoint(path) as a, open_checkpoint(other) as b:
        assert a.spec == replace(b.spec, name=a.spec.name)
        assert encoded(a.vocabulary) == encoded(b.vocabulary)
        for name, _ in tensor_shapes(a.spec):
            difference = a.tensor(name) - b.tensor(name)
            errors.append(float(np.abs(difference).max() / np.sqrt((a.tensor(name) ** 2).mean())))
    return max(errors)


def encoded(vocabulary: Vocabulary) -> list[int]:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    ids: list[int] = tokenizer.encode("Hello, world", add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(
    ("kind", "most"), [(GGMLQuantizationType.F16, 0.003), (GGMLQuantizationType.Q8_0, 0.03)]
)
def test_a_copied_gguf_file_is_the_same_model_but_for_rounding(
    llama: Path, tmp_path: Path, kind: GGMLQuantizationType, most: float
) -> None:
    copy_gguf(llama, tmp_path / "copy.gguf", kind)
    assert 0 < relative_error(llama, tmp_path / "copy.gguf") < most


@pytest.mark.parametrize("model", [tiny.LLAMA_TIED, tiny.LLAMA_UNTIED], ids=lambda model: model.name)
def test_a_written_folder_is_the_same_model_but_for_rounding(
    tiny_models: dict[str, TinyPaths], tmp_path: Path, model: tiny.TinyModel
) -> None:
    with open_checkpoint(tiny_models[model.name].gguf) as checkpoint:
        write_hf_folder(checkpoint, tmp_path)
    assert 0 < relative_error(tiny_models[model.name].gguf, tmp_path) < 0.03


@pytest.mark.parametrize("model", [tiny.QWEN3, tiny.LLAMA_SCALED], ids=lambda model: model.name)
def test_a_model_that_is_no_plain_llama_is_not_written_as_one(
    tiny_models: dict[str, TinyPaths], tmp_path: Path, model: tiny.TinyModel
) -> None:
    with (
        open_checkpoint(tiny_models[model.name].gguf) as checkpoint,
        pytest.raises(BenchError, match="plain Llama"),
    ):
        write_hf_folder(checkpoint, tmp_path)


def test_a_graph_for_onnxruntime_genai_gives_the_logits_of_each_rows_last_token(
    llama: Path, tmp_path: Path
) -> None:
    import onnxruntime

    with open_checkpoint(llama) as checkpoint:
        spec = checkpoint.spec
        form = GraphForm(Dialect.GROUPED, WeightFormat.FLOAT32)
        write_model(spec, checkpoint, tmp_path / "model.onnx", form)
    told = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1) | {
        "context_length": spec.context_length,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_layers,
    }
    script = str(files("streamsrv.bench.peers.workers").joinpath("onnxruntime_model.py"))
    subprocess.run([sys.executable, script, str(tmp_path), json.dumps(told)], check=True)
    config = json.loads((tmp_path / "genai_config.json").read_text())
    assert config["model"]["decoder"]["num_hidden_layers"] == spec.num_layers
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    ids = np.array([[5, 9, 30, 2], [7, 7, 1, 40]])
    empty = np.zeros((2, spec.num_kv_heads, 0, spec.head_dim), np.float32)
    caches = {
        value.name: empty for value in session.get_inputs() if value.name.startswith("past_key_values.")
    }
    assert len(caches) == 2 * spec.num_layers
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), **caches}
    (logits,) = session.run(["logits"], inputs)
    assert logits.shape == (2, 1, spec.vocab_size)
    for row, row_ids in zip(logits, ids.tolist(), strict=True):
        assert np.abs(row[0] - oracle_of(llama).logits(row_ids)[-1]).max() < 1e-3


async def test_a_conversion_is_made_once_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    environment = PeerEnvironment(tmp_path, [])
    made: list[Path] = []

    async def convert(folder: Path) -> None:
        made.append(folder)
        (folder / "model").write_text("whole")
        if len(made) == 1:
            raise BenchError("no space left")

    with pytest.raises(BenchError, match="no space"):
        await converted(environment, "a", convert)
    assert list((tmp_path / "models").iterdir()) == []
    for _ in range(2):
        folder = await converted(environment, "a", convert)
        assert (folder / "model").read_text() == "whole"
    assert len(made) == 2
