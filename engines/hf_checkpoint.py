"""A model in a folder with the layout of a Hugging Face repository."""

from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from engines.api import CheckpointError, FloatArray
from engines.architecture import check_tensors
from engines.hf_config import read_config
from engines.safetensors_files import SafetensorsFiles
from engines.spec import Family, ModelInfo, ModelSpec, Vocabulary
from engines.tensors import EMBED, FINAL_NORM, LM_HEAD, LayerTensor

_TOP_NAMES = {EMBED: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", LM_HEAD: "lm_head.weight"}
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""In place of "model." where a model has other parts than that for text."""
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_LAYER_NAMES = {
    LayerTensor.ATTN_NORM: "input_layernorm.weight",
    LayerTensor.Q: "self_attn.q_proj.weight",
    LayerTensor.K: "self_attn.k_proj.weight",
    LayerTensor.V: "self_attn.v_proj.weight",
    LayerTensor.Q_BIAS: "self_attn.q_proj.bias",
    LayerTensor.K_BIAS: "self_attn.k_proj.bias",
    LayerTensor.V_BIAS: "self_attn.v_proj.bias",
    LayerTensor.Q_NORM: "self_attn.q_norm.weight",
    LayerTensor.K_NORM: "self_attn.k_norm.weight",
    LayerTensor.O: "self_attn.o_proj.weight",
    LayerTensor.MLP_NORM: "post_attention_layernorm.weight",
    LayerTensor.GATE: "mlp.gate_proj.weight",
    LayerTensor.UP: "mlp.up_proj.weight",
    LayerTensor.DOWN: "mlp.down_proj.weight",
}
_FAMILY_NAMES = {
    Family.GEMMA3: {
        LayerTensor.POST_ATTN_NORM: "post_attention_layernorm.weight",
        LayerTensor.MLP_NORM: "pre_feedforward_layernorm.weight",
        LayerTensor.POST_MLP_NORM: "post_feedforward_layernorm.weight",
    },
    Family.PHI3: {
        **dict.fromkeys((LayerTensor.Q, LayerTensor.K, LayerTensor.V), "self_attn.qkv_proj.weight"),
        **dict.fromkeys((LayerTensor.GATE, LayerTensor.UP), "mlp.gate_up_proj.weight"),
    },
}
"""What families call otherwise."""


class HfCheckpoint:
    """A checkpoint (see `engines.checkpoint.Checkpoint`) read from a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        """Open and check the folder.

        Raises:
            CheckpointError: a file is missing or damaged, or the model is not supported.

        """
        self._folder = folder
        config = folder / "config.json"
        try:
            if not config.exists():
                raise CheckpointError(
                    f"{folder}: holds no config.json, so it is no Hugging Face model folder; "
                    "if it holds a GGUF file, give that file's path"
                )
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error
        # The config first: of a foreign model its architecture is the thing to say.
        read_config(config, folder.name, has_lm_head=True)
        self._files = SafetensorsFiles(folder)
        try:
            stored = self._files.shapes
            self._prefix = next((p for p in _TEXT_PREFIXES if f"{p}norm.weight" in stored), "model.")
            has_lm_head = _TOP_NAMES[LM_HEAD] in stored
            self._spec = read_config(config, _folder_name(folder), has_lm_head)
            named = partial(_file_name, self._spec.family, self._prefix)
            self._places = check_tensors(self._spec, folder, named, stored, self._is_ignored)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @cached_property
    def revision(self) -> str:
        """Hex SHA-256 of the weight files."""
        return self._files.digest()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer out of the folder's files."""
        from engines.vocabulary import vocabulary_from_hf

        return vocabulary_from_hf(self._folder)

    @cached_property
    def info(self) -> ModelInfo:
        """Everything but the weights."""
        return ModelInfo(
            path=str(self._folder),
            revision=self.revision,
            size_bytes=self._files.size_bytes,
            quantization=self._files.quantization,
            spec=self._spec,
            vocabulary=self.vocabulary,
        )

    def has(self, name: str) -> bool:
        """Tell whether the model has a tensor of this name."""
        return name in self._places

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._places[name].shape

    def tensor(self, name: str, rows: slice | None = None) -> FloatArray:
        """Read a tensor, or some of its rows (of a vector: some of its items), into a new array."""
        place = self._places[name]
        values = self._files.read(place.name, place.rows(rows))
        if self._spec.family is Family.GEMMA3 and name.endswith("norm"):
            values += np.float32(1)  # a folder holds gains less one
        return values

    def close(self) -> None:
        """Unmap the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ignored(self, stored: str) -> bool:
        # A copy of the tied table, or (old files) the rotary frequencies, which follow from the config.
        tied_copy = stored.endswith(_TOP_NAMES[LM_HEAD]) and self._spec.tied_embeddings
        other_part = self._prefix != "model." and stored.removeprefix("model.").startswith(_OTHER_PARTS)
        return tied_copy or other_part or stored.endswith("rotary_emb.inv_freq")


def _file_name(family: Family, prefix: str, name: str) -> str:
    if name in _TOP_NAMES:
        top = _TOP_NAMES[name]
        return prefix + top.removeprefix("model.") if top.startswith("model.") else top
    _, layer, part = name.split(".")
    names = _LAYER_NAMES | _FAMILY_NAMES.get(family, {})
    return f"{prefix}layers.{layer}.{names[LayerTensor(part)]}"


def _folder_name(folder: Path) -> str:
    """Name a model after its folder; in the Hub's cache, which names that by a hash, after its repository."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name
