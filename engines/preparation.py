"""Making one prepared model: into a draft folder first, then under its name in one step."""

import errno
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from engines.api import EngineError
from engines.cache_entries import making_entry
from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.manifest import TOKENIZER_FILE, FileRecord, Manifest
from engines.memory import GIB
from engines.options import WeightFormat
from engines.quantization import PLAIN_TYPES
from engines.spec import ModelSpec

GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.weights"

_BYTES_PER_WEIGHT = {
    WeightFormat.INT4: 0.5,
    WeightFormat.INT8: 1,
    WeightFormat.FP8: 1,
    WeightFormat.F16: 2,
    WeightFormat.BF16: 2,
    WeightFormat.FLOAT32: 4,
}

Progress = Callable[[str, float], None]


def make_entry(entry: Path, path: Path, form: GraphForm, report: Progress) -> None:
    """Prepare the model of `path` as the folder `entry`, in place of one that may be there.

    The caller keeps others from making it at the same time.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineError: the model cannot be written; nothing of it is left.

    """
    try:
        with making_entry(entry) as draft:
            _write(draft, path, form, report)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise EngineError(f"{path} could not be prepared in {entry.parent}: {error}") from error
        raise _no_space(entry.parent, path) from error


def _no_space(folder: Path, path: Path, needed: str = "more") -> EngineError:
    free = shutil.disk_usage(folder).free
    return EngineError(
        f"no space left in {folder} to prepare {path}: {needed} is needed and {free / GIB:.2f} GiB are free; "
        "make room, or choose another cache folder"
    )


def _least_bytes(spec: ModelSpec, form: GraphForm) -> float:
    """What the weights take at least: scales and a few small tensors come on top."""
    needed = spec.num_parameters * _BYTES_PER_WEIGHT[form.weights]
    if form.dialect is Dialect.LINEAR and form.weights not in PLAIN_TYPES:
        needed += spec.vocab_size * spec.hidden_size * (2 if spec.tied_embeddings else 1)  # rows in two bytes
    return needed


def _write(draft: Path, path: Path, form: GraphForm, report: Progress) -> None:
    from engines.graph import write_model  # the only place that needs onnx

    with open_checkpoint(path) as checkpoint:
        needed = _least_bytes(checkpoint.spec, form)
        if shutil.disk_usage(draft).free < needed:
            raise _no_space(draft.parent, path, f"{needed / GIB:.2f} GiB")
        model = checkpoint.info
        write_model(
            checkpoint.spec,
            checkpoint,
            draft / GRAPH_FILE,
            form,
            lambda done: report("convert", done),
        )
    (draft / TOKENIZER_FILE).write_text(model.vocabulary.tokenizer_json, encoding="utf-8")
    files = {}
    for file in sorted(draft.iterdir()):
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        files[file.name] = FileRecord(file.stat().st_size, digest)
    Manifest(model, form, files).write(draft)
