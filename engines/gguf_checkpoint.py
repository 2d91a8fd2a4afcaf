"""A model in one GGUF file."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engines.api import CheckpointError, FloatArray
from engines.architecture import check_finite, check_spec, check_tensors, family_of
from engines.fields import Fields
from engines.gguf_file import GgufFile, GgufTensor
from engines.spec import Family, ModelInfo, ModelSpec, Vocabulary
from engines.tensors import EMBED, FINAL_NORM, LM_HEAD, LayerTensor

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
}
"""By `general.architecture`; Mistral and SmolLM2 are written as "llama"."""

ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {EMBED: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER_NAMES = {
    LayerTensor.ATTN_NORM: "attn_norm.weight",
    LayerTensor.Q: "attn_q.weight",
    LayerTensor.K: "attn_k.weight",
    LayerTensor.V: "attn_v.weight",
    LayerTensor.Q_BIAS: "attn_q.bias",
    LayerTensor.K_BIAS: "attn_k.bias",
    LayerTensor.V_BIAS: "attn_v.bias",
    LayerTensor.Q_NORM: "attn_q_norm.weight",
    LayerTensor.K_NORM: "attn_k_norm.weight",
    LayerTensor.O: "attn_output.weight",
    LayerTensor.MLP_NORM: "ffn_norm.weight",
    LayerTensor.GATE: "ffn_gate.weight",
    LayerTensor.UP: "ffn_up.weight",
    LayerTensor.DOWN: "ffn_down.weight",
}

_CHUNK_BYTES = 1 << 16
"""Stored bytes dequantised at a time, so that temporaries stay in the processor's cache: the demo model
took 0.20 s in pieces of 64 KiB, 0.59 s in pieces of 256 KiB."""


class GgufCheckpoint:
    """A checkpoint (see `engines.checkpoint.Checkpoint`) read from one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            CheckpointError: the file is damaged or its model is not supported.

        """
        self._path = path
        self._file = GgufFile(path)
        try:
            self._spec = _read_spec(self._file)
            shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
            self._names = check_tensors(self._spec, path, _file_name, shapes, _is_ignored)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @cached_property
    def revision(self) -> str:
        """Hex SHA-256 of the file."""
        try:
            with self._path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer out of the file's metadata."""
        from engines.vocabulary import vocabulary_from_gguf

        try:
            return vocabulary_from_gguf(self._file.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error

    @cached_property
    def info(self) -> ModelInfo:
        """Everything but the weights."""
        return ModelInfo(
            path=str(self._path),
            revision=self.revision,
            size_bytes=self._file.size_bytes,
            quantization=self._quantization(),
            spec=self._spec,
            vocabulary=self.vocabulary,
        )

    def has(self, name: str) -> bool:
        """Tell whether the model has a tensor of this name."""
        return name in self._names

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._stored(name).shape

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Read a tensor, or some of its rows (of a vector: some of its items), into a new array."""
        stored = self._stored(name)
        if len(stored.shape) == 1:
            vector: FloatArray = _dequantize(self._file.rows(stored), stored, self._path)[0]
            return vector if rows is None else vector[rows]
        source = self._file.rows(stored)
        order = self._row_order(name, stored.shape[0])
        if order is not None:
            source = source[order if rows is None else order[rows]]
        elif rows is not None:
            source = source[rows]
        return _dequantize(source, stored, self._path)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str) -> GgufTensor:
        return self._file.tensors[self._names[name]]

    def _row_order(self, name: str, num_rows: int) -> NDArray[np.intp] | None:
        """Where the file has each row of Q and K, or None where the order is the same.

        Files of the Llama architecture keep a head's rows as for interleaved rotation, row 2j + s for
        our row s * head_dim / 2 + j: llama.cpp's `permute` in convert_hf_to_gguf.py, undone.
        """
        if self._spec.family is not Family.LLAMA or not name.endswith((".q", ".k")):
            return None
        half = self._spec.head_dim // 2
        return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)

    def _quantization(self) -> str:
        weights: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            weights[tensor.kind.name] += prod(tensor.shape)
        return weights.most_common(1)[0][0]


def _file_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[LayerTensor(part)]}"


def _is_ignored(stored: str) -> bool:
    # Read into the spec, or (old files) tables that follow from it.
    return stored == ROPE_FACTORS or stored.endswith(("attn_rot_embd.weight", "attn_rot_embd", "rope_freqs"))


def _read_spec(file: GgufFile) -> ModelSpec:
    general = Fields(file.metadata, file.path)
    if general.has("split.count") and (parts := general.integer("split.count", least=0)) > 1:
        raise CheckpointError(
            f"{file.path}: is one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )
    architecture = general.text("general.architecture")
    family = family_of(architecture, ARCHITECTURES, file.path)
    fields = Fields(file.metadata, file.path, prefix=architecture + ".")
    if fields.integer("expert_count", 0, least=0) > 0:
        raise CheckpointError(f"{file.path}: is a mixture of experts; only dense models are supported")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: heads whose keys and values differ in length are not supported")
    if (rotated := fields.integer("rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(
            f"{file.path}: rotates {rotated} of a head's {head_dim} numbers; only whole heads are supported"
        )
    context_length = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", 0, least=0)
    if 0 < window < context_length:
        raise CheckpointError(
            f"{file.path}: attends to a sliding window of {window} tokens; only full attention is supported"
        )
    _check_rope_scaling(fields, file.path)
    embedding = file.tensors.get(_TOP_NAMES[EMBED])
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor {_TOP_NAMES[EMBED]!r} is missing; is this a whole model?")
    spec = ModelSpec(
        family=family,
        name=general.text("general.name", "") or file.path.stem,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        context_length=context_length,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=None,
        rope_factors=_rope_factors(file, head_dim),
        tied_embeddings=_TOP_NAMES[LM_HEAD] not in file.tensors,
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
    )
    check_spec(spec, file.path)
    tokens: Any = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > spec.vocab_size:
        raise CheckpointError(
            f"{file.path}: names {len(tokens)} tokens but has embeddings for {spec.vocab_size}"
        )
    return spec


def _check_rope_scaling(fields: Fields, path: Path) -> None:
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0) if kind != "none" else 1.0
    factor = factor if factor != 1.0 else fields.number("rope.scale_linear", 1.0)  # as old files have it
    if factor != 1.0:
        raise CheckpointError(
            f"{path}: stretches its rotary embedding by the {kind!r} method; supported are none and "
            f"Llama 3's ({ROPE_FACTORS})"
        )


def _rope_factors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    stored = file.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,) or stored.kind is not GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {stored.kind.name} {list(stored.shape)}; "
            f"it must be F32 [{head_dim // 2}]"
        )
    factors = _dequantize(file.rows(stored), stored, file.path)[0]
    if not np.all(factors > 0):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r} is damaged: not all positive")
    return None if np.all(factors == 1) else tuple(factors.tolist())


def _dequantize(source: NDArray[np.uint8], tensor: GgufTensor, path: Path) -> FloatArray:
    """Turn stored rows into `[rows, shape[-1]]` floats.

    The package works through groups of 16 rows, which for short rows is mostly overhead; blocks are
    independent, so that many rows can go to it as one.
    """
    num_rows, row_bytes = source.shape
    result = np.empty((num_rows, tensor.shape[-1]), np.float32)
    step = max(1, _CHUNK_BYTES // row_bytes)
    with np.errstate(all="ignore"):  # what damaged scales do is seen by `check_finite`
        for first in range(0, num_rows, step):
            chunk = np.ascontiguousarray(source[first : first + step])
            part = result[first : first + step]
            part[:] = dequantize(chunk.reshape(1, -1), tensor.kind).reshape(part.shape)
            check_finite(part, tensor.name, path)
    return result
