"""The tokenizer against llama.cpp's and Hugging Face's ids and texts, and on its own."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.api import CheckpointError
from engines.vocabulary import vocabulary_from_gguf
from streamsrv.tokenizer import Tokenizer
from tests import vocabularies
from tests.golden.tokens import GoldenTokens, golden_tokens, hugging_face_files

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_UNUSED_TOKEN = "[PAD]x"


def _assert_encodes(tokenizer: Tokenizer, golden: GoldenTokens) -> None:
    for entry in golden.encoded:
        for parse_special, ids in ((False, entry.plain), (True, entry.parsed)):
            got = tokenizer.encode(entry.text, add_special=False, parse_special=parse_special)
            assert got == ids, (entry.text, parse_special)
    assert tokenizer.encode("Hello world", add_special=True, parse_special=False) == golden.framed


def _assert_decodes(tokenizer: Tokenizer, golden: GoldenTokens) -> None:
    for entry in golden.decoded:
        whole = tokenizer.decode(entry.ids, skip_special=False)
        assert whole == entry.whole.decode(errors="replace"), entry.ids
        if entry.skipped is not None:
            assert tokenizer.decode(entry.ids) == entry.skipped.decode(errors="replace"), entry.ids


def test_the_demo_model_encodes_as_llama_cpp_does(demo_path: Path) -> None:
    golden = golden_tokens("smollm2")
    assert len(golden.encoded) == 2000
    _assert_encodes(vocabularies.demo(demo_path), golden)


def test_the_demo_model_decodes_as_llama_cpp_does(demo_path: Path) -> None:
    _assert_decodes(vocabularies.demo(demo_path), golden_tokens("smollm2"))


@pytest.mark.parametrize(
    ("name", "add_space_prefix"), [("sentencepiece", True), ("sentencepiece_bare", False)]
)
def test_a_sentencepiece_vocabulary_encodes_as_llama_cpp_does(name: str, add_space_prefix: bool) -> None:
    _assert_encodes(vocabularies.sentencepiece(add_space_prefix), golden_tokens(name))


@pytest.mark.parametrize(
    ("name", "add_space_prefix"), [("sentencepiece", True), ("sentencepiece_bare", False)]
)
def test_a_sentencepiece_vocabulary_decodes_as_llama_cpp_does(name: str, add_space_prefix: bool) -> None:
    _assert_decodes(vocabularies.sentencepiece(add_space_prefix), golden_tokens(name))


def test_a_hugging_face_folder_encodes_and_decodes_as_transformers_does(tmp_path: Path) -> None:
    tokenizer = vocabularies.from_hugging_face(vocabularies.hugging_face_folder(tmp_path))
    golden = golden_tokens("hugging_face")
    _assert_encodes(tokenizer, golden)
    _assert_decodes(tokenizer, golden)


def test_both_forms_of_one_vocabulary_give_the_same_ids(tmp_path: Path) -> None:
    folder = vocabularies.hugging_face_folder(tmp_path)
    from_hf, from_gguf = vocabularies.from_hugging_face(folder), vocabularies.sentencepiece()
    for entry in golden_tokens("hugging_face").encoded:
        # Hugging Face puts no space before a text that begins with one, nor after a control token.
        if entry.plain == entry.parsed and not entry.text.startswith((" ", "\u2581")):
            ids = from_gguf.encode(entry.text, add_special=True, parse_special=False)
            assert from_hf.encode(entry.text, add_special=True, parse_special=False) == ids


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.sentencepiece])
@given(text=_TEXT)
def test_decoding_what_was_encoded_gives_the_text(make: object, text: str) -> None:
    tokenizer = vocabularies.byte_level() if make is vocabularies.byte_level else vocabularies.sentencepiece()
    # SentencePiece writes "\u2581" for a space and cannot tell the two apart.
    expected = text if make is vocabularies.byte_level else text.replace("\u2581", " ")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == expected


def test_a_control_tokens_text_is_text_unless_it_is_to_be_parsed() -> None:
    tokenizer = vocabularies.byte_level()
    plain = tokenizer.encode("a<|im_end|>b", add_special=False, parse_special=False)
    parsed = tokenizer.encode("a<|im_end|>b", add_special=False, parse_special=True)
    assert not any(map(tokenizer.is_special, plain))
    assert parsed[1] == 2
    assert tokenizer.decode(plain) == "a<|im_end|>b"
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special=False) == "a<|im_end|>b"


def test_a_user_defined_token_is_cut_out_of_any_text() -> None:
    metadata = vocabularies.byte_level_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokenizer = Tokenizer(
        vocabulary_from_gguf(
            metadata
            | {"tokenizer.ggml.tokens": [*tokens, "<tool>"], "tokenizer.ggml.token_type": [*types, 4]}
        )
    )
    for parse_special in (False, True):
        ids = tokenizer.encode("a<tool>b", add_special=False, parse_special=parse_special)
        assert ids[1] == len(tokens)
        assert tokenizer.decode(ids) == "a<tool>b"


def test_special_tokens_are_added_in_both_modes() -> None:
    tokenizer = vocabularies.sentencepiece()
    for parse_special in (False, True):
        assert tokenizer.encode("", add_special=True, parse_special=parse_special) == [1]
        assert tokenizer.encode("", add_special=False, parse_special=parse_special) == []


def test_a_control_token_has_its_text_as_bytes() -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(3)


def test_every_byte_has_a_token_that_gives_it_back() -> None:
    tokenizer = vocabularies.byte_level()
    assert {tokenizer.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}
    sentencepiece = vocabularies.sentencepiece()
    assert {sentencepiece.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}


@pytest.mark.parametrize("token_id", [-1, 320, 2**31])
def test_an_id_without_a_token_contributes_nothing(token_id: int) -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.vocab_size == 320
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""


@given(data=st.binary(max_size=12))
def test_bytes_that_are_no_utf8_decode_as_python_replaces_them(data: bytes) -> None:
    by_byte = {vocabularies.byte_level().token_bytes(i): i for i in range(3, 259)}
    ids = [by_byte[bytes([b])] for b in data]
    assert vocabularies.byte_level().decode(ids) == data.decode(errors="replace")


def test_the_first_words_space_is_taken_away_only_at_the_beginning_of_a_text() -> None:
    tokenizer = vocabularies.sentencepiece()
    ids = tokenizer.encode("the end", add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.decode(ids, continues=True) == " the end"
    assert tokenizer.decode([1, *ids]) == "the end"
    assert vocabularies.sentencepiece(add_space_prefix=False).decode(ids) == " the end"


def test_threads_that_encode_in_both_modes_at_once_do_not_disturb_each_other(demo_path: Path) -> None:
    tokenizer = vocabularies.demo(demo_path)
    entries = golden_tokens("smollm2").encoded[:400]

    def differs(parse_special: bool) -> int:
        return sum(
            tokenizer.encode(entry.text, add_special=False, parse_special=parse_special)
            != (entry.parsed if parse_special else entry.plain)
            for entry in entries
        )

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(differs, [False, True] * 4)) == 0


def test_a_process_that_forks_after_encoding_prints_no_warning() -> None:
    script = (
        "import os\n"
        "from tests import vocabularies\n"
        "vocabularies.byte_level().encode('hello', add_special=True, parse_special=True)\n"
        "if os.fork() == 0:\n"
        "    vocabularies.byte_level().encode('hello', add_special=True, parse_special=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
    ],
)
def test_a_decoder_of_another_kind_is_refused_with_what_is_supported(decoder: object) -> None:
    vocabulary = vocabulary_from_gguf(vocabularies.byte_level_metadata())
    document = json.loads(vocabulary.tokenizer_json) | {"decoder": decoder}
    with pytest.raises(CheckpointError, match="supported are ByteLevel"):
        Tokenizer(replace(vocabulary, tokenizer_json=json.dumps(document)))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}']
)
def test_a_faulty_tokenizer_json_is_refused(text: str) -> None:
    vocabulary = vocabulary_from_gguf(vocabularies.byte_level_metadata())
    with pytest.raises(CheckpointError, match="tokenizer"):
        Tokenizer(replace(vocabulary, tokenizer_json=text))


def test_truncation_and_padding_in_a_tokenizer_json_are_ignored() -> None:
    vocabulary = vocabulary_from_gguf(vocabularies.byte_level_metadata())
    document = json.loads(vocabulary.tokenizer_json)
    document["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    tokenizer = Tokenizer(replace(vocabulary, tokenizer_json=json.dumps(document)))
    assert len(tokenizer.encode("abcdef", add_special=False, parse_special=False)) > 2


def test_the_golden_hugging_face_files_are_those_of_a_metaspace_that_spaces_the_first_word_only() -> None:
    # The case in which a piece after a control token is encoded by a tokenizer of its own.
    document = json.loads(hugging_face_files()["tokenizer.json"])
    assert document["pre_tokenizer"]["prepend_scheme"] == "first"
