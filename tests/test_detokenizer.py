"""The incremental text of an output against the whole decoded at once."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.detokenizer import Detokenizer
from streamsrv.stop_matcher import StopMatcher
from streamsrv.tokenizer import Tokenizer
from tests import vocabularies
from tests.golden.tokens import golden_tokens

_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": cache(vocabularies.byte_level),
    "sentencepiece": cache(vocabularies.sentencepiece),
    "sentencepiece without a first space": cache(lambda: vocabularies.sentencepiece(add_space_prefix=False)),
}
_EVERY_TOKENIZER = pytest.mark.parametrize("name", list(_TOKENIZERS))
# Control tokens, bytes, and a few learned tokens: characters get broken often.
_IDS = st.lists(
    st.one_of(st.integers(0, 2), st.integers(3, 258), st.integers(259, 400)), min_size=0, max_size=30
)


def _run(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [by_byte[bytes([byte])] for byte in data]


def _first_stop(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop that is completed first, the longest of equals, and where it begins: the plain way."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return longest, end - len(longest)
    return None


@_EVERY_TOKENIZER
@given(ids=_IDS, skip_special=st.booleans(), continues=st.booleans())
def test_joined_pieces_are_the_whole_text(
    name: str, ids: list[int], skip_special: bool, continues: bool
) -> None:
    tokenizer = _TOKENIZERS[name]()
    pieces = _run(Detokenizer(tokenizer, skip_special=skip_special, continues=continues), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special, continues=continues)


@_EVERY_TOKENIZER
@given(ids=_IDS)
def test_every_piece_is_the_text_that_no_later_token_can_change(name: str, ids: list[int]) -> None:
    tokenizer = _TOKENIZERS[name]()
    detokenizer = Detokenizer(tokenizer)
    so_far = ""
    for i, token_id in enumerate(ids):
        so_far += detokenizer.push(token_id)
        # At most one unfinished character is held back, which whole decoding shows as one U+FFFD.
        assert tokenizer.decode(ids[: i + 1]) in (so_far, so_far + "\ufffd")


@_EVERY_TOKENIZER
@given(data=st.data(), stop=st.lists(st.sampled_from(["a", "ab", " the", "\ufffd"]), max_size=2))
def test_tokens_taken_together_or_on_by_a_copy_have_the_text_of_each_taken_alone(
    name: str, data: st.DataObject, stop: list[str]
) -> None:
    tokenizer, ids = _TOKENIZERS[name](), data.draw(_IDS)
    each, together = (Detokenizer(tokenizer, stop=stop) for _ in range(2))
    at = 0
    while at < len(ids):
        piece = ids[at : at + data.draw(st.integers(1, 6))]
        before = together.copy()
        text = "".join(map(each.push, piece))
        assert together.push_all(piece) == text
        assert before.push_all(piece) == text
        assert before.matched_stop == each.matched_stop
        at += len(piece)
    assert together.flush() == each.flush()


@_EVERY_TOKENIZER
@given(data=st.data(), include_stop=st.booleans(), skip_special=st.booleans())
def test_the_text_ends_where_the_first_stop_string_begins(
    name: str, data: st.DataObject, include_stop: bool, skip_special: bool
) -> None:
    tokenizer = _TOKENIZERS[name]()
    ids = data.draw(_IDS)
    text = tokenizer.decode(ids, skip_special=skip_special)
    cut = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(
        lambda at: text[at[0] : at[0] + at[1]]
    )
    stops = data.draw(st.lists(st.one_of(cut, st.text("ab\ufffd ", max_size=3)), max_size=4))
    stops = [stop for stop in stops if stop]
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop=include_stop, skip_special=skip_special)
    joined = "".join(_run(detokenizer, ids))
    first = _first_stop(text, stops)
    if first is None:
        assert (joined, detokenizer.matched_stop) == (text, None)
    else:
        stop, begin = first
        assert (joined, detokenizer.matched_stop) == (text[:begin] + stop * include_stop, stop)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_what_is_matched_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    state, found, read = 0, None, 0
    for begin, end in pairwise(bounds):
        state, num_read, found = matcher.advance(state, text[begin:end])
        read = begin + num_read
        if found is not None:
            break
    first = _first_stop(text, stops)
    assert (found, read) == ((first[0], first[1] + len(first[0])) if first else (None, len(text)))


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize(
    "text", ["\U0001f468\u200d\U0001f469", "日本語", "\u05e9\u05dc\u05d5\u05dd", "\u00e9a"]
)
def test_a_character_spread_over_tokens_comes_out_whole(name: str, text: str) -> None:
    tokenizer = _TOKENIZERS[name]()
    pieces = _run(Detokenizer(tokenizer), _byte_ids(tokenizer, text.encode()))
    assert [piece for piece in pieces if piece] == list(text)


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character() -> None:
    tokenizer = vocabularies.byte_level()
    pieces = _run(Detokenizer(tokenizer), _byte_ids(tokenizer, b"a\xf0\x9f\x91"))
    assert pieces == ["a", "", "", "", "\ufffd"]


def test_bytes_that_begin_no_character_come_out_at_once() -> None:
    tokenizer = vocabularies.byte_level()
    pieces = _run(Detokenizer(tokenizer), _byte_ids(tokenizer, b"\xff\x80\xe4A"))
    assert pieces == ["\ufffd", "\ufffd", "", "\ufffdA", ""]


def test_a_stop_string_spread_over_tokens_does_not_leak() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["</end>"])
    pieces = _run(detokenizer, _byte_ids(tokenizer, b"ok</end>more"))
    assert "".join(pieces) == "ok"
    assert detokenizer.matched_stop == "</end>"


def test_a_stop_string_inside_one_token_cuts_the_token() -> None:
    tokenizer = vocabularies.byte_level()
    [token_id] = _ids(tokenizer, " the")
    detokenizer = Detokenizer(tokenizer, stop=["h"])
    assert detokenizer.push(token_id) == " t"
    assert detokenizer.matched_stop == "h"
    assert detokenizer.push(token_id) + detokenizer.flush() == ""


def test_a_half_matched_stop_string_is_released_as_soon_as_it_cannot_be_one() -> None:
    tokenizer = vocabularies.byte_level()
    pieces = _run(Detokenizer(tokenizer, stop=["abcd"]), _byte_ids(tokenizer, b"xabcabx"))
    assert pieces == ["x", "", "", "", "abc", "", "abx", ""]


def test_a_half_matched_stop_string_is_released_at_the_end() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["abcd"])
    assert _run(detokenizer, _byte_ids(tokenizer, b"xabc")) == ["x", "", "", "", "abc"]
    assert detokenizer.matched_stop is None


def test_of_overlapping_stop_strings_the_one_completed_first_wins() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["abcd", "bc"])
    assert "".join(_run(detokenizer, _byte_ids(tokenizer, b"xabcd"))) == "xa"
    assert detokenizer.matched_stop == "bc"


def test_of_stop_strings_completed_together_the_longest_wins() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["c", "abc", "bc"])
    assert "".join(_run(detokenizer, _byte_ids(tokenizer, b"xabcd"))) == "x"
    assert detokenizer.matched_stop == "abc"


def test_a_stop_string_is_in_the_text_if_asked_for_but_nothing_after_it() -> None:
    tokenizer = vocabularies.byte_level()
    [token_id] = _ids(tokenizer, " the")
    detokenizer = Detokenizer(tokenizer, stop=["t"], include_stop=True)
    assert _run(detokenizer, [token_id]) == [" t", ""]


def test_a_stop_string_may_be_completed_by_the_end_itself() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["a\ufffd"])
    assert "".join(_run(detokenizer, _byte_ids(tokenizer, b"xa\xf0"))) == "x"
    assert detokenizer.matched_stop == "a\ufffd"


def test_a_skipped_control_token_neither_shows_nor_parts_a_stop_string() -> None:
    tokenizer = vocabularies.byte_level()
    a, b = _byte_ids(tokenizer, b"ab")
    assert _run(Detokenizer(tokenizer, stop=["ab"]), [a, 2, b]) == ["", "", "", ""]
    shown = Detokenizer(tokenizer, stop=["ab"], skip_special=False)
    assert "".join(_run(shown, [a, 2, b])) == "a<|im_end|>b"


def test_a_control_tokens_text_can_be_a_stop_string_where_it_is_shown() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["<|im_end|>"], skip_special=False)
    assert "".join(_run(detokenizer, [*_byte_ids(tokenizer, b"ab"), 2, 2])) == "ab"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(vocabularies.byte_level(), stop=["a", ""])


def test_the_first_space_goes_even_after_a_skipped_control_token() -> None:
    tokenizer = vocabularies.sentencepiece()
    ids = [1, *_ids(tokenizer, "the end")]
    assert "".join(_run(Detokenizer(tokenizer), ids)) == "the end"
    assert "".join(_run(Detokenizer(tokenizer, skip_special=False), ids)) == "<s> the end"


@pytest.mark.parametrize("stop", [(), ("\n\n", "zz", "\ufffd\ufffd\ufffd\ufffd\ufffd")])
def test_the_demo_models_texts_come_out_whole(demo_path: Path, stop: tuple[str, ...]) -> None:
    tokenizer = vocabularies.demo(demo_path)
    for entry in golden_tokens("smollm2").decoded:
        detokenizer = Detokenizer(tokenizer, stop=stop, skip_special=False)
        joined = "".join(_run(detokenizer, entry.ids))
        if detokenizer.matched_stop is None:
            assert joined == entry.whole.decode(errors="replace")
