"""The GGUF container: what is read, and what is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from engines.api import CheckpointError
from engines.gguf_file import GgufFile
from engines.gguf_header import MAX_ARRAY_ITEMS
from tests.conftest import TinyPaths
from tests.raw_gguf import ARRAY, STRING, UINT32, RawGguf, array, entry, tensor, text


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile(path)


def refusal(tmp_path: Path, content: bytes) -> str:
    """The message that a file's content is refused with, without the file's name in front."""
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError) as caught:
        opened(path, content)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_metadata_and_tensors_equal_those_of_the_package_s_own_reader(
    tiny_models: dict[str, TinyPaths],
) -> None:
    for paths in tiny_models.values():
        reader = GGUFReader(paths.gguf)
        file = GgufFile(paths.gguf)
        expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert file.metadata == expected
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(theirs.shape.tolist())[::-1]
            assert ours.kind is theirs.tensor_type
            assert ours.offset == theirs.data_offset
            assert file.rows(ours).tobytes() == theirs.data.tobytes()
        file.close()


def test_every_scalar_type_is_read(tmp_path: Path) -> None:
    layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    entries = [entry(f"k{kind}", kind, struct.pack("<" + code, 1)) for kind, code in layouts.items()]
    file = opened(tmp_path / "a.gguf", RawGguf(entries).to_bytes())
    assert file.metadata == {f"k{kind}": 1 for kind in layouts}
    assert file.metadata["k7"] is True
    file.close()


def test_arrays_of_arrays_are_read(tmp_path: Path) -> None:
    inner = array(UINT32, 2, struct.pack("<II", 5, 6))
    file = opened(tmp_path / "a.gguf", RawGguf([entry("k", ARRAY, array(ARRAY, 2, inner * 2))]).to_bytes())
    assert file.metadata == {"k": [[5, 6], [5, 6]]}
    file.close()


def test_version_2_is_read(tmp_path: Path) -> None:
    file = opened(tmp_path / "a.gguf", RawGguf(version=struct.pack("<I", 2)).to_bytes())
    assert file.tensors == {}
    file.close()


def test_another_alignment_is_kept_to(tmp_path: Path) -> None:
    raw = RawGguf([entry("general.alignment", UINT32, struct.pack("<I", 64))], [tensor("t", [4])])
    raw.data = np.arange(4, dtype=np.float32).tobytes()
    file = opened(tmp_path / "a.gguf", raw.to_bytes(alignment=64))
    assert file.tensors["t"].offset % 64 == 0
    assert file.rows(file.tensors["t"]).view(np.float32).tolist() == [[0, 1, 2, 3]]
    file.close()


def test_a_file_can_be_closed_twice_and_not_read_after(tiny_models: dict[str, TinyPaths]) -> None:
    file = GgufFile(next(iter(tiny_models.values())).gguf)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.rows(file.tensors["token_embd.weight"])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"") == "is empty; copy or download it again"


@pytest.mark.parametrize("content", [b"G", b"GGU", b"PK\x03\x04 something else", b"GGML" + bytes(100)])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "is not a GGUF file" in refusal(tmp_path, content)


@pytest.mark.parametrize("version", [0, 1, 4, 0x12345])
def test_another_version_is_refused_with_the_supported_ones(tmp_path: Path, version: int) -> None:
    message = refusal(tmp_path, RawGguf(version=struct.pack("<I", version)).to_bytes())
    assert message == f"is GGUF version {version}; supported are versions 2 and 3"


def test_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    assert "is a big-endian GGUF file" in refusal(tmp_path, RawGguf(version=struct.pack(">I", 3)).to_bytes())


@pytest.mark.parametrize(
    "raw",
    [
        RawGguf(num_entries=2**63),
        RawGguf(num_tensors=2**63),
        RawGguf([entry("k", STRING, struct.pack("<Q", 2**62))]),
        RawGguf([struct.pack("<Q", 2**64 - 1)]),
        RawGguf([entry("k", ARRAY, array(STRING, MAX_ARRAY_ITEMS, text("a") * 3))]),
        RawGguf([entry("k", ARRAY, array(UINT32, MAX_ARRAY_ITEMS, b""))]),
    ],
)
def test_counts_and_lengths_beyond_the_file_are_refused(tmp_path: Path, raw: RawGguf) -> None:
    assert "cut short or damaged" in refusal(tmp_path, raw.to_bytes())


def test_an_array_of_absurd_length_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, RawGguf([entry("k", ARRAY, array(UINT32, 2**40, b""))]).to_bytes())
    assert "a metadata array of 1099511627776 items" in message


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    nested = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(10_000))
    assert "nested deeper" in refusal(tmp_path, RawGguf([entry("k", ARRAY, nested)]).to_bytes())


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    twice = [entry("k", UINT32, bytes(4))] * 2
    assert "metadata key 'k' appears twice" in refusal(tmp_path, RawGguf(twice).to_bytes())


def test_a_tensor_that_appears_twice_is_refused(tmp_path: Path) -> None:
    raw = RawGguf(tensors=[tensor("t", [8])] * 2, data=bytes(32))
    assert "tensor 't' appears twice" in refusal(tmp_path, raw.to_bytes())


def test_metadata_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    assert "unknown type, 77" in refusal(tmp_path, RawGguf([entry("k", 77, bytes(8))]).to_bytes())


@pytest.mark.parametrize(
    "value", [entry("k", STRING, text(b"\xff")), entry("k", ARRAY, array(STRING, 1, text(b"\xff")))]
)
def test_text_that_is_not_utf_8_is_refused(tmp_path: Path, value: bytes) -> None:
    assert "not UTF-8" in refusal(tmp_path, RawGguf([value]).to_bytes())


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int) -> None:
    raw = RawGguf([entry("general.alignment", UINT32, struct.pack("<I", alignment))])
    assert "not a power of two" in refusal(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("dims", [[], [2] * 5, [2] * 100])
def test_an_impossible_number_of_dimensions_is_refused(tmp_path: Path, dims: list[int]) -> None:
    raw = RawGguf(tensors=[tensor("t", dims)], data=bytes(4096))
    assert f"tensor 't' has {len(dims)} dimensions" in refusal(tmp_path, raw.to_bytes())


def test_a_tensor_without_weights_is_refused(tmp_path: Path) -> None:
    raw = RawGguf(tensors=[tensor("t", [4, 0])])
    assert "tensor 't' of shape [0, 4]" in refusal(tmp_path, raw.to_bytes())


def test_rows_that_do_not_divide_into_blocks_are_refused(tmp_path: Path) -> None:
    raw = RawGguf(tensors=[tensor("t", [48, 2], GGMLQuantizationType.Q4_0)], data=bytes(4096))
    assert "does not divide into Q4_0 blocks of 32" in refusal(tmp_path, raw.to_bytes())


@pytest.mark.parametrize(
    ("kind", "stored"), [(GGMLQuantizationType.IQ4_XS, "IQ4_XS"), (999, "an unknown type, 999")]
)
def test_an_unsupported_storage_type_is_refused_with_the_supported_ones(
    tmp_path: Path, kind: int, stored: str
) -> None:
    raw = RawGguf(tensors=[tensor("blk.0.ffn_up.weight", [256, 2], kind)], data=bytes(4096))
    assert refusal(tmp_path, raw.to_bytes()) == (
        f"tensor 'blk.0.ffn_up.weight' is stored as {stored}; supported are "
        "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K"
    )


def test_a_misaligned_tensor_is_refused(tmp_path: Path) -> None:
    raw = RawGguf(tensors=[tensor("t", [8], offset=8)], data=bytes(64))
    assert "tensor 't' is not aligned to 32 bytes" in refusal(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("dims", [[8], [2**62, 2**62], [2**40]])
def test_a_tensor_beyond_the_end_of_the_file_is_refused_with_the_sizes(
    tmp_path: Path, dims: list[int]
) -> None:
    content = RawGguf(tensors=[tensor("t", dims)], data=bytes(31)).to_bytes()
    needed = len(content) - 31 + int(np.prod(dims, dtype=object)) * 4
    assert refusal(tmp_path, content) == (
        f"is cut short: tensor 't' ends at byte {needed}, the file at {len(content)}; "
        "copy or download it again"
    )
