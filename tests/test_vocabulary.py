"""Vocabularies out of GGUF metadata and Hugging Face folders, good and bad."""

import heapq
import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.api import CheckpointError
from engines.gguf_file import GgufFile
from engines.pretokenizer import PRE_TOKENIZERS
from engines.vocabulary import vocabulary_from_gguf, vocabulary_from_hf
from streamsrv.tokenizer import Tokenizer
from tests import tiny_tokenizer, vocabularies
from tests.golden.tokens import CUTS, golden_tokens, pre_tokenized, sentencepiece_metadata
from tests.vocabularies import byte_level_metadata, hugging_face_folder, sentencepiece_changed

_TOKENS = list(tiny_tokenizer.tokens())
_TYPES = [3, 3, 3] + [1] * (len(_TOKENS) - 3)


def _with_tokens(*added: tuple[str, int]) -> dict[str, object]:
    """Byte-level metadata with more tokens, given with their types; their ids begin at 320."""
    return byte_level_metadata(
        tokens=[*_TOKENS, *(text for text, _ in added)], token_type=[*_TYPES, *(kind for _, kind in added)]
    )


def _encode(metadata: dict[str, object], text: str, *, add_special: bool = False) -> list[int]:
    return Tokenizer(vocabulary_from_gguf(metadata)).encode(
        text, add_special=add_special, parse_special=False
    )


def test_outputs_end_as_in_llama_cpp(demo_path: Path) -> None:
    assert list(vocabularies.demo_vocabulary(demo_path).eos_token_ids) == golden_tokens("smollm2").end_ids
    spm = vocabulary_from_gguf(sentencepiece_metadata())
    assert list(spm.eos_token_ids) == golden_tokens("sentencepiece").end_ids


def test_the_demo_model_has_its_tokens_and_template(demo_path: Path) -> None:
    vocabulary = vocabularies.demo_vocabulary(demo_path)
    assert (vocabulary.bos_token, vocabulary.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert vocabulary.chat_template is not None
    assert "<|im_start|>" in vocabulary.chat_template


def test_named_ids_and_well_known_texts_end_an_output() -> None:
    metadata = _with_tokens(("<|eot_id|>", 3), ("<file>", 3), ("<x>", 3)) | {
        "tokenizer.ggml.eot_token_id": 322
    }
    assert vocabulary_from_gguf(metadata).eos_token_ids == (0, 2, 320, 322)


def test_a_well_known_end_that_the_file_calls_text_is_a_control_token() -> None:
    vocabulary = vocabulary_from_gguf(_with_tokens(("<|eot_id|>", 1), ("<end_of_turn>", 4)))
    assert vocabulary.eos_token_ids == (0, 2, 320, 321)
    assert Tokenizer(vocabulary).is_special(320)
    assert Tokenizer(vocabulary).is_special(321)


def test_a_piece_that_merging_makes_out_of_text_ends_no_output() -> None:
    tokens = [*_TOKENS, "</", "s>", "</s>"]
    metadata = byte_level_metadata(
        tokens=tokens,
        token_type=[*_TYPES, 1, 1, 1],
        merges=["< /", "s >", "</ s>"],
        pre="gpt-2",
    )
    vocabulary = vocabulary_from_gguf(metadata)
    assert vocabulary.eos_token_ids == (0, 2)
    assert not Tokenizer(vocabulary).is_special(322)


def test_the_end_of_a_message_is_no_end_where_an_answer_has_several() -> None:
    metadata = _with_tokens(("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3))
    assert vocabulary_from_gguf(metadata).eos_token_ids == (0, 2, 321, 322)


@pytest.mark.parametrize(("pre", "adds_bos"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
def test_a_prompt_begins_as_the_pre_tokenizer_has_it(pre: str, adds_bos: bool) -> None:
    ids = _encode(byte_level_metadata(pre=pre), "a", add_special=True)
    assert ids[:-1] == [1] * adds_bos


def test_the_metadata_decides_what_goes_around_a_prompt() -> None:
    metadata = byte_level_metadata(add_bos_token=True, add_eos_token=True)
    assert _encode(metadata, "a", add_special=True) == [1, *_encode(metadata, "a"), 2]
    assert _encode(byte_level_metadata(pre="llama-bpe", add_bos_token=False), "", add_special=True) == []


def test_tokens_that_only_fill_the_table_have_no_text() -> None:
    tokenizer = Tokenizer(vocabulary_from_gguf(_with_tokens(("[PAD320]", 5), ("<x>", 4), ("[PAD322]", 5))))
    assert tokenizer.decode([320, 321, 322]) == "<x>"


def test_an_empty_token_gets_a_name_of_its_own() -> None:
    tokenizer = Tokenizer(vocabulary_from_gguf(_with_tokens(("", 1), ("", 1))))
    assert tokenizer.decode([320, 321]) == "[EMPTY_320][EMPTY_321]"


def test_the_first_of_two_equal_merges_counts() -> None:
    tokens = [*_TOKENS, "qx", "xz"]
    merges = ["q x", "x z", "q x"]
    metadata = byte_level_metadata(tokens=tokens, token_type=None, merges=merges)
    assert _encode(metadata, "qxz")[0] == 320


def test_a_byte_without_a_token_is_lost_and_joins_nothing() -> None:
    tokens = ["a", "b", "ab"]
    metadata = byte_level_metadata(
        tokens=tokens, token_type=None, merges=["a b"], bos_token_id=None, eos_token_id=None
    )
    assert _encode(metadata, "ab") == [2]
    assert _encode(metadata, "a\x00b") == [0, 1]


_SAMPLE = "Hi  they'LL 12345 \u00e9t\u00e9! A\u0301b\n\n x/\n"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["Hi", " ", " they", "'", "LL", " 12345", " \u00e9t\u00e9", "!", " A", "\u0301", "b"]),
        ("smollm", ["Hi", " ", " they", "'", "LL", " ", "1", "2", "3", "4", "5", " \u00e9t\u00e9", "!"]),
        ("llama-bpe", ["Hi", " ", " they", "'LL", " ", "123", "45", " \u00e9t\u00e9", "!", " A", "\u0301b"]),
        ("qwen2", ["Hi", " ", " they", "'LL", " ", "1", "2", "3", "4", "5", " \u00e9t\u00e9", "!", " A"]),
        (
            "qwen35",
            ["Hi", " ", " they", "'LL", " ", "1", "2", "3", "4", "5", " \u00e9t\u00e9", "!", " A\u0301b"],
        ),
        (
            "tekken",
            ["Hi", " ", " they", "'LL", " ", "1", "2", "3", "4", "5", " \u00e9t\u00e9", "!", " A\u0301b"],
        ),
        ("gpt-4o", ["Hi", " ", " they'LL", " ", "123", "45", " \u00e9t\u00e9", "!", " A\u0301b"]),
        ("deepseek-v3", ["Hi", " ", " they", "'LL", " ", "123", "45", " \u00e9t\u00e9", "!", " A\u0301b"]),
    ],
)
def test_text_is_cut_into_words_as_the_pre_tokenizer_says(pre: str, words: list[str]) -> None:
    import tokenizers  # the library's own view of the cutting

    text = json.loads(vocabulary_from_gguf(byte_level_metadata(pre=pre)).tokenizer_json)
    text["pre_tokenizer"]["pretokenizers"].pop()  # from words to bytes
    cutter = tokenizers.Tokenizer.from_str(json.dumps(text)).pre_tokenizer
    assert cutter is not None
    assert [word for word, _ in cutter.pre_tokenize_str(_SAMPLE)][: len(words)] == words


@pytest.fixture(scope="module")
def demo_metadata(demo_path: Path) -> dict[str, object]:
    with closing(GgufFile(demo_path)) as file:
        return dict(file.metadata)


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_merged_as_in_llama_cpp_however_text_is_cut(
    demo_metadata: dict[str, object], pre: str
) -> None:
    tokenizer = Tokenizer(vocabulary_from_gguf(demo_metadata | {"tokenizer.ggml.pre": pre}))
    for text, ids in pre_tokenized(pre):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(pre: str) -> None:
    tokenizer = Tokenizer(vocabulary_from_gguf(byte_level_metadata(pre=pre)))
    for entry in golden_tokens("smollm2").encoded[:300]:
        assert (
            tokenizer.decode(tokenizer.encode(entry.text, add_special=False, parse_special=False))
            == entry.text
        )


def _join_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's way of joining neighbours, as llama.cpp writes it: the oracle."""
    symbols, before = list(text), [*range(-1, len(text) - 1)]
    after = [*range(1, len(text)), -1]
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and symbols[left] + symbols[right] in scores:
            joined = symbols[left] + symbols[right]
            heapq.heappush(queue, (-scores[joined], left, right, len(joined)))

    for i in range(1, len(text)):
        consider(i - 1, i)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        if symbols[left] and symbols[right] and len(symbols[left]) + len(symbols[right]) == length:
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
    return [symbol for symbol in symbols if symbol]


@given(data=st.data())
def test_merging_by_score_is_sentencepieces_whatever_the_scores(data: st.DataObject) -> None:
    pieces = ["a", "b"]
    for _ in range(data.draw(st.integers(1, 20))):
        joined = data.draw(st.sampled_from(pieces)) + data.draw(st.sampled_from(pieces))
        if joined not in pieces and len(joined) < 12:
            pieces.append(joined)
    ranks = data.draw(st.permutations(range(len(pieces))))
    scores = dict(zip(pieces, map(float, ranks), strict=True))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *scores.values()],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer(vocabulary_from_gguf(metadata))
    text = data.draw(st.text("ab", max_size=40))
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert [tokenizer.token_bytes(i).decode() for i in ids] == _join_by_score(text, scores)


def test_text_never_joins_to_a_sentencepiece_control_or_byte_token() -> None:
    pieces = ["<", "/", "s", ">", "</", "</s", "0", "x", "A", "<0", "<0x", "<0x0", "<0x0A"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, 6] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 4 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert _encode(metadata, "</s>") == [9, 7]
    assert _encode(metadata, "<0x0A>") == [16, 7]


def test_merges_stand_in_for_scores_that_are_all_the_same() -> None:
    pieces = ["a", "b", "c", "ab", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * len(pieces),
        "tokenizer.ggml.scores": [-1000.0] * 8,
        "tokenizer.ggml.merges": ["b c", "a b"],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert _encode(metadata, "abc") == [3, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"model": 3}, "model must be a text"),
        ({"model": "t5"}, "'t5' is not supported: allowed are 'gpt2'.*'llama'"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"pre": "dinosaur"}, "pre-tokenizer 'dinosaur'.*known are .*gpt-2.*smollm"),
        ({"pre": 1}, "pre must be a text"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens must be a list"),
        ({"tokens": [1, 2]}, "tokens must hold texts only"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice, as ids 0 and 2"),
        ({"token_type": [1]}, "token_type has 1 entries and tokenizer.ggml.tokens has 320"),
        ({"token_type": ["x"] * 320}, "token_type must hold finite numbers only"),
        ({"token_type": 7}, "token_type must be a list"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["q z"]}, r"merges\[0\] is 'q z'.*must be in the vocabulary"),
        ({"merges": [1]}, "merges must hold texts only"),
        ({"bos_token_id": 320}, "bos_token_id is 320, but the vocabulary has ids 0 to 319"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "2"}, "eot_token_id must be a whole number"),
        ({"eom_token_id": True}, "eom_token_id must be a whole number"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id, which the metadata does not have"),
        ({"add_eos_token": True, "eos_token_id": None}, "eos_token_id, which the metadata does not have"),
    ],
)
def test_faulty_metadata_is_refused_with_the_key_at_fault(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        vocabulary_from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "has no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": [float("nan")] * 1000}, "scores must hold finite numbers only"),
        ({"unknown_token_id": 1000}, "unknown_token_id is 1000"),
        ({"add_space_prefix": 1}, "add_space_prefix must be true or false"),
    ],
)
def test_faulty_sentencepiece_metadata_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        vocabulary_from_gguf(sentencepiece_changed(**changes))


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template must be a text"):
        vocabulary_from_gguf(byte_level_metadata() | {"tokenizer.chat_template": ["x"]})


_KEYS = (
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id"),
    *("unknown_token_id", "add_bos_token", "add_space_prefix"),
)
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 400),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=5),
    st.lists(st.integers(-1, 7), max_size=5),
)


@given(changes=st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1, max_size=4), is_spm=st.booleans())
def test_no_metadata_fails_in_another_way_than_by_being_refused(
    changes: dict[str, object], is_spm: bool
) -> None:
    metadata = sentencepiece_changed(**changes) if is_spm else byte_level_metadata(**changes)
    try:
        Tokenizer(vocabulary_from_gguf(metadata))
    except CheckpointError as error:
        assert "tokenizer" in str(error)  # noqa: PT017 (an accepted vocabulary is fine, too)


def test_a_hugging_face_folder_gives_its_tokens_ends_and_template(tmp_path: Path) -> None:
    folder = hugging_face_folder(
        tmp_path,
        generation_config_json='{"eos_token_id": [2, 7]}',
        chat_template_jinja="{{ messages }}",
    )
    vocabulary = vocabulary_from_hf(folder)
    assert (vocabulary.bos_token, vocabulary.eos_token) == ("<s>", "</s>")
    assert vocabulary.eos_token_ids == (2, 7)
    assert vocabulary.chat_template == "{{ messages }}"


def test_a_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path, config_json=None, tokenizer_config_json=None)
    vocabulary = vocabulary_from_hf(folder)
    assert (vocabulary.bos_token, vocabulary.eos_token, vocabulary.chat_template) == (None, None, None)
    assert vocabulary.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"chat_template": "A"}, "A"),
        (
            {"chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]},
            "A",
        ),
        ({"chat_template": [{"name": "tool_use", "template": "B"}]}, None),
        ({}, None),
    ],
)
def test_a_chat_template_is_found_in_the_settings(
    tmp_path: Path, settings: dict[str, object], template: str | None
) -> None:
    folder = hugging_face_folder(tmp_path, tokenizer_config_json=json.dumps(settings))
    assert vocabulary_from_hf(folder).chat_template == template


def test_tokens_may_be_given_as_groups_of_settings(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    folder = hugging_face_folder(tmp_path, tokenizer_config_json=json.dumps(settings))
    assert vocabulary_from_hf(folder).bos_token == "<s>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_json": None}, "has no tokenizer.json"),
        ({"tokenizer_json": "{"}, "tokenizer.json is no JSON"),
        ({"tokenizer_json": "[]"}, "must hold a JSON object"),
        ({"tokenizer_json": '{"model": {"type": "Unigram"}}'}, "'Unigram'; only 'BPE' is supported"),
        ({"tokenizer_json": "{}"}, "only 'BPE' is supported"),
        ({"tokenizer_json": '{"model": {"vocab": []}}'}, "model.vocab must give each token an id"),
        ({"tokenizer_json": '{"model": {"vocab": {"a": "x"}}}'}, "model.vocab must give each token an id"),
        (
            {"tokenizer_json": '{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}'},
            "each of added_tokens must have a content and an id",
        ),
        ({"tokenizer_config_json": "nonsense"}, "tokenizer_config.json is no JSON"),
        ({"tokenizer_config_json": '{"eos_token": "<gone>"}'}, "'<gone>', which is no token"),
        ({"tokenizer_config_json": '{"bos_token": 5}'}, "bos_token must be a text"),
        ({"tokenizer_config_json": '{"chat_template": 5}'}, "chat_template must be a text"),
        ({"config_json": '{"eos_token_id": "two"}'}, "eos_token_id must be an id or a list of ids"),
        ({"generation_config_json": '{"eos_token_id": [true]}'}, "eos_token_id must be an id"),
        ({"generation_config_json": "[1]"}, "must hold a JSON object"),
    ],
)
def test_a_faulty_folder_is_refused_with_the_file_at_fault(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        vocabulary_from_hf(hugging_face_folder(tmp_path, **files))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        vocabulary_from_hf(folder)
