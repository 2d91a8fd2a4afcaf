"""What holds for checkpoints of both formats, and for paths that are neither."""

import os
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.api import CheckpointError
from engines.checkpoint import open_checkpoint
from engines.tensors import tensor_shapes
from tests import tiny
from tests.conftest import TinyPaths
from tests.raw_gguf import RawGguf

names = pytest.mark.parametrize("name", [model.name for model in tiny.EVERY_MODEL])


@names
def test_both_formats_hold_the_same_tensors(name: str, tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[name]
    with open_checkpoint(paths.folder) as folder, open_checkpoint(paths.gguf) as file:
        for tensor, shape in tensor_shapes(folder.spec):
            assert folder.tensor_shape(tensor) == file.tensor_shape(tensor) == shape
            assert folder.tensor(tensor).shape == shape
            np.testing.assert_array_equal(folder.tensor(tensor), file.tensor(tensor))


@names
def test_both_formats_hold_the_same_vocabulary(name: str, tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[name]
    with open_checkpoint(paths.folder) as folder, open_checkpoint(paths.gguf) as file:
        ours, theirs = folder.info.vocabulary, file.info.vocabulary
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


@names
@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 20), slice(30, 999), slice(None), slice(5, 5)])
def test_some_rows_equal_those_rows_of_the_whole(
    name: str, rows: slice, tiny_models: dict[str, TinyPaths]
) -> None:
    for path in (tiny_models[name].folder, tiny_models[name].gguf):
        with open_checkpoint(path) as checkpoint:
            for tensor in ("embed", "layers.1.q", "layers.0.k", "layers.1.down", "layers.0.attn_norm"):
                whole = checkpoint.tensor(tensor)
                np.testing.assert_array_equal(checkpoint.tensor(tensor, rows), whole[rows])


@names
def test_tensors_are_float32_and_outlive_the_checkpoint(name: str, tiny_models: dict[str, TinyPaths]) -> None:
    for path in (tiny_models[name].folder, tiny_models[name].gguf):
        with open_checkpoint(path) as checkpoint:
            kept = [checkpoint.tensor(tensor) for tensor, _ in tensor_shapes(checkpoint.spec)]
        for value in kept:
            assert value.dtype == np.float32
            assert value.flags.c_contiguous
            assert np.isfinite(value.sum())


def test_a_tensor_that_the_model_does_not_have_is_a_key_error(tiny_models: dict[str, TinyPaths]) -> None:
    for path in (tiny_models[tiny.LLAMA_TIED.name].folder, tiny_models[tiny.LLAMA_TIED.name].gguf):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.has("layers.2.q")
            for absent in ("lm_head", "layers.3.q", "layers.0.q_bias", "nonsense"):
                assert not checkpoint.has(absent)
                with pytest.raises(KeyError):
                    checkpoint.tensor(absent)
                with pytest.raises(KeyError):
                    checkpoint.tensor_shape(absent)


def test_a_checkpoint_can_be_closed_twice_and_not_read_after(tiny_models: dict[str, TinyPaths]) -> None:
    for path in (tiny_models[tiny.QWEN3.name].folder, tiny_models[tiny.QWEN3.name].gguf):
        checkpoint = open_checkpoint(path)
        checkpoint.close()
        checkpoint.close()
        with pytest.raises(ValueError, match="closed"):
            checkpoint.tensor("embed")


def test_the_revision_follows_the_weights_alone(tmp_path: Path) -> None:
    first = tiny.write_hf(tiny.QWEN2, tmp_path / "a")
    second = tiny.write_hf(tiny.QWEN2, tmp_path / "b")
    (second / "generation_config.json").write_text("{}")
    third = tiny.write_hf(tiny.QWEN2, tmp_path / "c", kind="BF16")
    revisions = []
    for folder in (first, second, third):
        with open_checkpoint(folder) as checkpoint:
            revisions.append(checkpoint.revision)
    assert revisions[0] == revisions[1] != revisions[2]


def test_reading_some_rows_takes_memory_for_those_rows_only(demo_path: Path) -> None:
    with open_checkpoint(demo_path) as checkpoint:
        tracemalloc.start()
        try:
            checkpoint.tensor("embed", slice(1000, 1100))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 20 * 100 * 576 * 4


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nothing.gguf"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value) == (
        f"{path}: no such file or folder; give a GGUF file or a Hugging Face model folder"
    )


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(Path(path))


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/model"):
        open_checkpoint(tmp_path / "file" / "model")


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_one_file_of_a_folder_is_refused_with_the_folder(
    file: str, tiny_models: dict[str, TinyPaths]
) -> None:
    folder = tiny_models[tiny.QWEN2.name].folder
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder / file)
    assert str(caught.value).endswith(f"give the folder that holds it, {folder}")


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read every file")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.QWEN2, tmp_path / "a.gguf")
    path.chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        open_checkpoint(path)


class Damage:
    """A valid GGUF file to be damaged, and the size of its header."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "damaged.gguf"
        self.content = tiny.write_gguf(tiny.QWEN2, tmp_path / "whole.gguf", "Q8_0").read_bytes()
        # The header ends with the vocabulary's end; after it there are only tensors.
        self.header_size = self.content.index(b"output_norm.weight") + 64

    def open(self, content: bytes) -> None:
        """Open the content; only a CheckpointError may come out, and not too late."""
        self.path.write_bytes(content)
        start = time.monotonic()
        with suppress(CheckpointError), open_checkpoint(self.path) as checkpoint:
            _ = checkpoint.info
        assert time.monotonic() - start < 5


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Damage:
    return Damage(tmp_path_factory.mktemp("damage"))


fuzzed = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_file_cut_anywhere_is_refused(damage: Damage) -> None:
    # Every offset of the first kilobyte, then a prime stride over header and data.
    offsets = [*range(1024), *range(1024, len(damage.content), 997), len(damage.content) - 1]
    for offset in offsets:
        damage.path.write_bytes(damage.content[:offset])
        with pytest.raises(CheckpointError, match=r"damaged\.gguf"):
            open_checkpoint(damage.path)


@fuzzed
@given(data=st.data())
def test_flipped_bytes_in_the_header_end_in_a_model_or_a_checkpoint_error(
    damage: Damage, data: st.DataObject
) -> None:
    content = bytearray(damage.content)
    offsets = st.integers(0, damage.header_size - 1)
    for at in data.draw(st.lists(offsets, min_size=1, max_size=8)):
        content[at] ^= data.draw(st.integers(1, 255))
    damage.open(bytes(content))


@fuzzed
@given(at=st.integers(0, 2000), junk=st.binary(min_size=1, max_size=64))
def test_overwritten_settings_end_in_a_model_or_a_checkpoint_error(
    damage: Damage, at: int, junk: bytes
) -> None:
    damage.open(damage.content[:at] + junk + damage.content[at + len(junk) :])


@fuzzed
@given(junk=st.binary(max_size=400))
def test_junk_after_the_magic_ends_in_a_checkpoint_error(damage: Damage, junk: bytes) -> None:
    damage.open(RawGguf().to_bytes()[:8] + junk)


@fuzzed
@given(data=st.data())
def test_flipped_bytes_in_a_safetensors_header_end_in_a_model_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged-folder"
    if not folder.exists():
        tiny.write_hf(tiny.QWEN3, folder)
        (folder / "model.safetensors").rename(folder / "whole")
    content = bytearray((folder / "whole").read_bytes())
    for at in data.draw(st.lists(st.integers(0, 2500), min_size=1, max_size=6)):
        content[at] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    with suppress(CheckpointError), open_checkpoint(folder) as checkpoint:
        _ = checkpoint.spec
