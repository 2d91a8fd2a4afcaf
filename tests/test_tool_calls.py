"""Calls of tools in a model's text."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.spec import Vocabulary
from engines.vocabulary import vocabulary_from_gguf
from streamsrv.chat import Tool, ToolCall
from streamsrv.detokenizer import Detokenizer
from streamsrv.tokenizer import Tokenizer
from streamsrv.tool_call_format import ToolCallFormat, tool_call_format
from streamsrv.tool_calls import Piece, ToolCallParser
from tests import vocabularies
from tests.golden.chats import TEMPLATES

_HERMES, _LLAMA3 = ToolCallFormat.HERMES, ToolCallFormat.LLAMA3
_MISTRAL, _XML = ToolCallFormat.MISTRAL, ToolCallFormat.QWEN_XML
_TYPES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": ["object", "null"]},
    "n": {"type": ["string", "null"]},
    "any": {},
}
_TOOLS = [Tool("f", "", json.dumps({"properties": _TYPES})), Tool("g")]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _parse(format_: ToolCallFormat, *texts: str) -> list[Piece]:
    parser = ToolCallParser(format_, _TOOLS)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return _joined([*pieces, *parser.flush()])


def _call(number: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call{number:05}", name, arguments)


_F = _call(0, "f", '{"a": 1}')
_G = _call(1, "g", "{}")
_GOOD: list[tuple[ToolCallFormat, str, list[Piece]]] = [
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [_F]),
    (_HERMES, 'Hm.\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>!', ["Hm.\n", _F, "!"]),
    (_HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>', [_F, _G]),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [_F]),
    (
        _HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g"}</tool_call>',
        [_F, "\n", _G],
    ),
    (_HERMES, '<<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', ["<<tool_call>", _F]),
    (_LLAMA3, '{"name": "f", "parameters": {"a": 1}}', [_F]),
    (_LLAMA3, ' {"type": "function", "name": "f", "parameters": {"a": 1}}\n', [_F, "\n"]),
    (_LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}', [_F, _G]),
    (
        _LLAMA3,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}};{"name": "g", "parameters": {}}',
        [_F, _G],
    ),
    (_LLAMA3, 'So: <|python_tag|>{"name": "f", "parameters": {"a": 1}} ', ["So: ", _F, " "]),
    (_LLAMA3, '{"name": "f", "parameters": {"a": 1}}; and', [_F, "; and"]),
    (_MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', [_F, _G]),
    (_MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', [_F, _G]),
    (_MISTRAL, 'x[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}.', ["x", _F, _G, "."]),
    (_MISTRAL, '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', [_F]),
    (
        _XML,
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>ok",
        [_call(0, "f", '{"a": "x"}'), "ok"],
    ),
    (_XML, "<tool_call><function=g></function></tool_call>", [_call(0, "g", "{}")]),
    (_XML, "<tool_call><tool_call><function=g></function>", ["<tool_call>", _call(0, "g", "{}")]),
    (_MISTRAL, '[TOOL_CALLS][TOOL_CALLS]f{"a": 1}', ["[TOOL_CALLS]", _F]),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}<think></think>', [_F, "<think></think>"]),
]
_BROKEN = [
    (_HERMES, "plain < text <tool_call"),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (_HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (_HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (_HERMES, "<tool_call>[]</tool_call>"),
    (_HERMES, '<tool_call>[{"name": "f"}, 1]</tool_call>'),
    (_HERMES, '<tool_call>[{"name": "f"}, {"no": 1}]</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}</tool_call>'),
    (_HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (_HERMES, "<tool_call>" + "[" * 200 + "]" * 200 + "</tool_call>"),
    (_HERMES, "<tool_call>f(1)</tool_call>"),
    (_LLAMA3, '{"name": "Bob", "age": 3}'),
    (_LLAMA3, '{"age": 3, "name": "f", "parameters": {}}'),
    (_LLAMA3, 'Well: {"name": "f", "parameters": {}}'),
    (_LLAMA3, '<|python_tag|>search.call(query="x")'),
    (_LLAMA3, '{"name": "f", "parameters": {"a": 1}'),
    (_LLAMA3, ' ; {"name": "f"'),
    (_MISTRAL, "[TOOL_CALLS]"),
    (_MISTRAL, "[TOOL_CALLS] []"),
    (_MISTRAL, "[TOOL_CALLS]f g{}"),
    (_MISTRAL, "[TOOL_CALLS]f[ARGS]{1}"),
    (_MISTRAL, "[TOOL_CALLS]f(x){}"),
    (_MISTRAL, "[TOOL_CALLS]" + "f" * 300 + "{}"),
    (_XML, "<tool_call><function=f><parameter=a>x</parameter>"),
    (_XML, "<tool_call><function=f>x</function></tool_call>"),
    (_XML, "<tool_call><function=></function></tool_call>"),
    (_XML, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    (_XML, "<tool_call><function=f><parameter=></parameter></function></tool_call>"),
]


@pytest.mark.parametrize(("format_", "text", "expected"), _GOOD)
def test_calls_are_read_however_the_text_is_cut(
    format_: ToolCallFormat, text: str, expected: list[Piece]
) -> None:
    assert _parse(format_, text) == expected
    assert _parse(format_, *text) == expected
    for i in range(len(text)):
        assert _parse(format_, text[:i], text[i:]) == expected


@pytest.mark.parametrize(("format_", "text"), _BROKEN)
def test_a_broken_call_comes_out_as_it_was_written_however_it_is_cut(
    format_: ToolCallFormat, text: str
) -> None:
    assert _parse(format_, text) == [text]
    assert _parse(format_, *text) == [text]
    for i in range(len(text)):
        assert _parse(format_, text[:i], text[i:]) == [text]


def test_a_call_comes_out_with_its_last_bracket() -> None:
    parser = ToolCallParser(_HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    assert parser.push("}") == [_F]


def test_text_comes_out_at_once_unless_a_marker_may_have_begun() -> None:
    parser = ToolCallParser(_HERMES)
    assert parser.push("a <to") == ["a "]
    assert parser.push("ol") == []
    assert parser.push("s> b") == ["<tools> b"]


def test_a_json_answer_is_held_no_longer_than_it_looks_like_a_call() -> None:
    parser = ToolCallParser(_LLAMA3)
    assert parser.push(' {"na') == []
    assert parser.push('tion"') == [' {"nation"']


def test_ids_go_on_from_the_calls_of_the_conversation() -> None:
    parser = ToolCallParser(_HERMES, num_earlier_calls=7)
    calls = parser.push('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>')
    assert calls == [_call(7, "f", "{}"), _call(8, "g", "{}")]


def test_arguments_are_kept_as_the_model_wrote_them() -> None:
    arguments = '{ "b":1.50,\n "a":"\\u00e9 \\" </tool_call> {", "c":{"c":[ ]} ,"a":"twice"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}, "id": 3}}</tool_call>'
    assert _parse(_HERMES, text) == [_call(0, "f", arguments)]


def test_calls_in_a_thought_are_only_thought_of() -> None:
    text = '<think>Maybe <tool_call>{"name": "f"}</tool_call></think>'
    after = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert _parse(_HERMES, *(text + after)) == [text, _F]
    parser = ToolCallParser(_HERMES, in_thought=True)
    assert _joined(parser.push(text.removeprefix("<think>") + after)) == [text.removeprefix("<think>"), _F]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_in_an_open_thought_is_told_from_others(prompt: str, opens: bool) -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.opens_thought(tokenizer.encode(prompt, add_special=False, parse_special=True)) is opens


def test_a_tokenizer_knows_its_models_format() -> None:
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    assert Tokenizer(_vocabulary(source)).tool_call_format is _HERMES
    assert vocabularies.byte_level().tool_call_format is None


def test_a_stop_text_in_a_call_ends_it_and_it_comes_out_as_text() -> None:
    tokenizer = vocabularies.byte_level()
    detokenizer, parser = Detokenizer(tokenizer, stop=["STOP"]), ToolCallParser(_HERMES)
    text = 'a <tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>'
    texts = [detokenizer.push(i) for i in tokenizer.encode(text, add_special=False, parse_special=False)]
    pieces = [piece for part in [*texts, detokenizer.flush()] for piece in parser.push(part)]
    assert _joined([*pieces, *parser.flush()]) == [text[: text.index("STOP")]]
    assert detokenizer.matched_stop == "STOP"


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("s", "1", '"1"'),
        ("s", '"x"', '"\\"x\\""'),
        ("s", "a\n\nb", '"a\\n\\nb"'),
        ("i", "1", "1"),
        ("i", "one", '"one"'),
        ("b", "True", "true"),
        ("o", '{"a": [1, {"b": 2}]}', '{"a": [1, {"b": 2}]}'),
        ("o", "null", "null"),
        ("n", "null", "null"),
        ("n", "5", '"5"'),
        ("any", "5", "5"),
        ("any", "NaN", '"NaN"'),
        ("unknown", "5", '"5"'),
        ("s", "</function></tool_call><parameter=b>", '"</function></tool_call><parameter=b>"'),
    ],
)
def test_values_without_quotation_marks_are_typed_by_the_schema(key: str, value: str, written: str) -> None:
    text = f"<tool_call><function=f><parameter={key}>\n{value}\n</parameter></function></tool_call>"
    assert _parse(_XML, *text) == [_call(0, "f", f'{{"{key}": {written}}}')]


_FRAGMENTS = {
    _HERMES: [
        *("<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", '{"name": "f", "arguments": '),
        *('{"a": "', "}", '"}', "[", "]", "{", '"', "\\", "\\u00e9", "\n", " ", "text", "1", ",", ":"),
        '<tool_call>{"name": "f", "arguments": {"x": [1]}}</tool_call>',
    ],
    _LLAMA3: [
        *(
            '{"name": "f", "parameters": ',
            "{}",
            "}",
            ";",
            " ",
            "<|python_tag|>",
            "text",
            '{"a": "',
            '"',
            "\\",
        ),
        '{"name": "f", "parameters": {"x": [1]}}',
    ],
    _MISTRAL: [
        *("[TOOL_CALLS]", "[", "]", "[ARGS]", "[CALL_ID]", "f", '{"name": "f", "arguments": {}}', "{}", "{"),
        *("}", ",", " ", '"', "\\", '[TOOL_CALLS]f{"x": 1}', "text"),
    ],
    _XML: [
        *("<tool_call>", "</tool_call>", "<function=f>", "<function=", ">", "</function>", "<parameter=s>"),
        *("</parameter>", "</para", "\n", " ", "text", "<", "1"),
        "<tool_call><function=f><parameter=i>\n1\n</parameter></function></tool_call>",
    ],
}
_texts = st.sampled_from(list(ToolCallFormat)).flatmap(
    lambda f: st.tuples(st.just(f), st.lists(st.sampled_from(_FRAGMENTS[f]), max_size=25).map("".join))
)


@given(made=_texts, cuts=st.lists(st.integers(0, 400), max_size=20))
def test_what_is_found_depends_on_the_text_alone_and_nothing_is_lost(
    made: tuple[ToolCallFormat, str], cuts: list[int]
) -> None:
    format_, text = made
    whole = _parse(format_, text)
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert _parse(format_, *(text[a:b] for a, b in pairwise(edges))) == whole
    assert _parse(format_, *text) == whole
    # Every text is there, in order, and between two only what belongs to calls.
    pattern = "".join(re.escape(piece) if isinstance(piece, str) else "(?:.+?)" for piece in whole)
    assert re.fullmatch(pattern, text, re.DOTALL)
    for piece in whole:
        if isinstance(piece, ToolCall):
            assert isinstance(json.loads(piece.arguments_json), dict)
            assert format_ is _XML or piece.arguments_json in (*_arguments_in(text), "{}")


def _arguments_in(text: str) -> list[str]:
    """Every part of the text that is a JSON object."""
    found = []
    for match in re.finditer(r"\{", text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        found.append(text[match.start() : end])
    return found


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    arguments=st.dictionaries(st.text(), _json_values, max_size=4),
    ascii_only=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_arguments_come_through_each_json_format(
    arguments: dict[str, object], ascii_only: bool, size: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    for format_, text in (
        (_HERMES, f'a<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>b'),
        (_LLAMA3, f'a<|python_tag|>{{"name": "f", "parameters": {written}}}b'),
        (_MISTRAL, f'a[TOOL_CALLS] [{{"name": "f", "arguments": {written}}}]b'),
        (_MISTRAL, f"a[TOOL_CALLS]f{written}b"),
    ):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert _parse(format_, *pieces) == ["a", _call(0, "f", written), "b"]


class _Counting(str):
    """A text that counts how many of its characters are copied out of it."""

    copied = 0

    def __getitem__(self, key: object) -> str:
        part = super().__getitem__(key)  # type: ignore[index]
        _Counting.copied += len(part)
        return part


@pytest.mark.parametrize(
    "make",
    [
        lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * n + '"}}</tool_call>',
        lambda n: "<tool_call>" * (n // 11),
        lambda n: '<tool_call>{"' * (n // 13),
        lambda n: "<tool_call>[" + '{"name": "f"},' * (n // 14) + '{"name": "f"}]',
        lambda n: "<tool_call>" + " " * n,
        lambda n: '<tool_call>{"name": "f"}' + " " * n,
        lambda n: '<tool_call>{"name": "f"}</tool_call>' * (n // 36),
    ],
)
def test_long_texts_are_looked_at_once(make: Callable[[int], str]) -> None:
    def copied(size: int) -> int:
        _Counting.copied = 0
        parser = ToolCallParser(_HERMES)
        parser.push(_Counting(make(size)))
        parser.flush()
        return _Counting.copied

    assert copied(100_000) <= 11 * copied(10_000) + 1000


def test_arguments_of_100_kb_come_through_in_small_pieces() -> None:
    arguments = json.dumps({"a": "é\\" * 20_000, "b": [{"c": i} for i in range(5000)]}, ensure_ascii=False)
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert len(text) > 100_000
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    assert _parse(_HERMES, *pieces) == [_call(0, "f", arguments)]


_TEMPLATES = {
    "hermes": _HERMES,
    "qwen2.5": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": _XML,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "mistral_v11": _MISTRAL,
    "gemma3": None,
    "phi3": None,
}


def _vocabulary(template: str | None) -> Vocabulary:
    metadata = vocabularies.byte_level_metadata()
    return replace(vocabulary_from_gguf(metadata), chat_template=template)


@pytest.mark.parametrize("name", _TEMPLATES)
def test_the_format_is_told_from_the_template(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert tool_call_format(_vocabulary(source)) is _TEMPLATES[name]


def test_a_model_without_a_template_has_no_format() -> None:
    assert tool_call_format(_vocabulary(None)) is None


def test_markers_that_are_control_tokens_reach_the_parser() -> None:
    metadata = vocabularies.byte_level_metadata()
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[0] = "[TOOL_CALLS]"
    tokenizer = Tokenizer(vocabulary_from_gguf(metadata | {"tokenizer.ggml.tokens": tokens}))
    ids = tokenizer.encode('[TOOL_CALLS]f{"a": 1}<|im_end|>', add_special=False, parse_special=True)
    assert tokenizer.control_ids(_MISTRAL.markers) == {0}
    assert (ids[0], ids[-1]) == (0, 2)
    detokenizer = Detokenizer(tokenizer, kept=_MISTRAL.markers)
    texts = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert "".join(texts) == '[TOOL_CALLS]f{"a": 1}'
    assert _parse(_MISTRAL, *texts) == [_F]
