import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from engines.vocabulary import vocabulary_from_gguf
from streamsrv.constraint.compiler import Constraint, ConstraintCompiler
from streamsrv.constraint.mask import allowed_ids, apply_mask, num_mask_words
from streamsrv.constraint.spec import (
    MAX_CONSTRAINT_BYTES,
    ConstraintFailedError,
    ConstraintKind,
    ConstraintSpec,
    InvalidConstraintError,
)
from streamsrv.constraint.state import ConstraintState
from tests import constrained, tiny_tokenizer, vocabularies
from tests.constrained import Output, Rig, draw_output
from tests.schemas import SCHEMAS, Json, SchemaCase
from tests.schemas.formats import FORMATS

_ALL = pytest.mark.parametrize("case", SCHEMAS, ids=[case.name for case in SCHEMAS])
_EOS = tiny_tokenizer.SPECIAL_TOKENS.index("<|im_end|>")


@pytest.fixture
def tiny() -> Rig:
    return constrained.tiny()


def _validator(schema: Json) -> jsonschema.protocols.Validator:
    made = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return made(schema, format_checker=FORMATS)


def _check(rig: Rig, case: SchemaCase, seed: int, num_free: int) -> Output:
    output = draw_output(rig, rig.start("json_schema", case.text), random.Random(seed), num_free=num_free)
    _validator(case.schema).validate(json.loads(rig.tokenizer.decode(output.token_ids)))
    return output


def _accepts(rig: Rig, state: ConstraintState, text: str) -> bool:
    """Whether a text is of the language, in whatever tokens."""
    state = state.copy()
    try:
        for token_id in rig.encode(text):
            state.accept(token_id)
    except ConstraintFailedError:
        return False
    return state.may_stop


def _spec(kind: str, *texts: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind(kind), texts)


# Schemas


def test_there_are_300_schemas_and_each_is_another() -> None:
    assert len(SCHEMAS) == len({case.name for case in SCHEMAS}) == len({case.text for case in SCHEMAS}) == 300


@_ALL
def test_outputs_are_valid_whether_they_end_by_themselves_or_are_continued_from_a_cut(
    tiny: Rig, case: SchemaCase
) -> None:
    # What is drawn freely is what an output cut by its length would be; it goes on to an end from there.
    for seed, num_free in enumerate((0, 6, 20)):
        _check(tiny, case, seed, num_free)


@_ALL
def test_outputs_are_valid_in_the_demo_models_tokens(demo_path: Path, case: SchemaCase) -> None:
    _check(constrained.demo(demo_path), case, 3, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "demo"])
@_ALL
def test_outputs_of_any_length_are_valid_and_so_is_what_is_accepted_of_their_mutations(
    demo_path: Path, name: str, case: SchemaCase
) -> None:
    rig = constrained.demo(demo_path) if name == "demo" else constrained.tiny()
    start = rig.start("json_schema", case.text)
    validator = _validator(case.schema)
    for seed in range(12):
        draw = random.Random(seed)
        output = draw_output(rig, start.copy(), draw, num_free=draw.choice((0, 5, 15, 40, 100)), most=2000)
        text = rig.tokenizer.decode(output.token_ids)
        validator.validate(json.loads(text))
        for _ in range(6):
            i, j = draw.randrange(len(text)), draw.randrange(len(text))
            changed = text[:i] + draw.choice('0123456789abZ"{}[],:\\. -e+tfnul') + text[max(i, j) :]
            if _accepts(rig, start, changed):
                validator.validate(json.loads(changed))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("case", [c for c in SCHEMAS if c.examples], ids=lambda case: str(case.name))
def test_a_written_schema_accepts_its_example(tiny: Rig, case: SchemaCase, indent: int | None) -> None:
    state = tiny.start("json_schema", case.text)
    for example in case.examples:
        _validator(case.schema).validate(example)
        assert _accepts(tiny, state, json.dumps(example, ensure_ascii=False, indent=indent))


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_outputs_are_valid_in_a_sentencepiece_vocabularys_tokens(add_space_prefix: bool) -> None:
    changed = vocabularies.sentencepiece_changed(add_space_prefix=add_space_prefix)
    rig = constrained.rig(vocabulary_from_gguf(changed))
    for case in SCHEMAS[::10]:
        start = rig.start("json_schema", case.text)
        output = draw_output(rig, start, random.Random(1), num_free=6)
        text = rig.tokenizer.decode(output.token_ids, continues=True)
        _validator(case.schema).validate(json.loads(text))


def test_a_name_cannot_be_written_in_another_way_to_get_another_value(tiny: Rig) -> None:
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    state = tiny.start("json_schema", json.dumps({"type": "object", **schema}))
    assert _accepts(tiny, state, '{"a":"x","b":2}')
    assert not _accepts(tiny, state, '{"a":"x","a":2}')
    assert not _accepts(tiny, state, '{"a":"x","\\u0061":2}')


def test_no_string_has_a_lone_surrogate(tiny: Rig) -> None:
    state = tiny.start("json_schema", "{}")
    assert _accepts(tiny, state, '"\\n"')
    assert not _accepts(tiny, state, '"\\ud800"')


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31", "2023-02-28"],
            ["2023-02-29", "1900-02-29", "2024-04-31"],
        ),
        ("time", ["23:59:59Z", "00:00:00.123-05:30"], ["24:00:00Z", "23:59:60Z", "12:00:00"]),
        (
            "date-time",
            ["2024-02-29T00:00:00Z"],
            ["2023-02-29T00:00:00Z", "2024-02-29T00:00:60Z", "2024-02-29"],
        ),
    ],
)
def test_dates_and_times_are_those_that_exist(tiny: Rig, name: str, good: list[str], bad: list[str]) -> None:
    schema = {"anyOf": [{"type": "string", "format": name}, {"const": {"format": name}}]}
    state = tiny.start("json_schema", json.dumps({"properties": {"const": schema}, "required": ["const"]}))
    for text in (*good, {"format": name}):
        assert _accepts(tiny, state, json.dumps({"const": text}))
    for text in bad:
        assert not _accepts(tiny, state, json.dumps({"const": text}))


def test_white_space_is_free_but_ends(tiny: Rig) -> None:
    state = tiny.start("json_schema", '{"type": "array", "items": {"const": 1}}')
    assert _accepts(tiny, state, "[" + " \n\t\r" * 16 + "1 ]")
    assert not _accepts(tiny, state, "[" + " " * 65 + "1]")
    assert not _accepts(tiny, state, " []")


def test_white_space_can_be_turned_off(tiny: Rig) -> None:
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"whitespace_flexible": False}}
    state = tiny.start("json_schema", json.dumps(schema))
    assert _accepts(tiny, state, "[1,1]")
    assert not _accepts(tiny, state, "[1, 1]")


# What is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object, true or false"),
        ("false", "allows no output at all"),
        ('{"minimum": NaN}', "NaN is no number"),
        ('{"minimum": 1e999}', "a number that is too large"),
        ('{"type": "string", "type": "null"}', "the name 'type' twice"),
        ("[" * 100_000, "has at most|at most 65536 bytes"),
        ("[" * 60_000, "nested too deeply"),
        ('{"items":' * 100 + "{}" + "}" * 100, "nested too deeply"),
        ('{"type": "integer", "multipleOf": 1000003}', "least common multiple, 1000003, is too large"),
        ('{"anyOf": [{"multipleOf": 0.997}, {"multipleOf": 991}]}', "least common multiple, 988027"),
        ('{"type": "object", "minProperties": 3, "required": ["a"]}', "minProperties 3 where 1 are required"),
        ('{"x-guidance": {"lenient": true}}', "whitespace_flexible"),
        ('{"x-guidance": {"whitespace_flexible": 1}}', "whitespace_flexible"),
        ('{"x-guidance": []}', "whitespace_flexible"),
        ("", "must not be empty"),
    ],
)
def test_a_schema_that_would_not_hold_is_refused_before_it_is_compiled(text: str, message: str) -> None:
    with pytest.raises(InvalidConstraintError, match=message) as caught:
        _spec("json_schema", text)
    assert caught.value.reason == "CONSTRAINT_INVALID"
    assert [violation.field for violation in caught.value.violations] == ["constraint.json_schema"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "Invalid type: text"),
        ({"uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"if": {}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
        ({"propertyNames": {"pattern": "^a"}}, 'Unimplemented keys: ["propertyNames"]'),
        ({"dependentRequired": {"a": ["b"]}}, 'Unimplemented keys: ["dependentRequired"]'),
        ({"type": "string", "format": "postcode"}, "Unknown format: postcode"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around, including look-ahead"),
        ({"type": "string", "pattern": "(a)\\1"}, "backreferences are not supported"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Unsatisfiable schema"),
        ({"enum": []}, "anyOf is empty"),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, "oneOf constraints are not supported"),
        ({"$ref": "#/$defs/none"}, "Pointer '/$defs/none' does not exist"),
        ({"$ref": "https://example.org/other"}, "https://example.org/other"),
        ({"$ref": "#"}, "allows no output at all"),
        ({"minimum": "3"}, "Expected f64 for 'minimum'"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_compilers_message(
    tiny: Rig, schema: Json, message: str
) -> None:
    with pytest.raises(InvalidConstraintError, match=re.escape(message)) as caught:
        tiny.start("json_schema", json.dumps(schema))
    assert caught.value.violations[0].field == "constraint.json_schema"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", r"\bword\b", "lookarounds not supported"),
        ("regex", " ", "must not be empty"),
        ("lark", "start: other", "other"),
        ("lark", 'a: "x"', "start"),
        ("lark", '{"grammars": []}', "cannot be compiled"),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_compilers_message(
    tiny: Rig, kind: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidConstraintError, match=message) as caught:
        tiny.start(kind, text)
    assert caught.value.violations[0].field == f"constraint.{kind}"
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize(
    ("texts", "field", "message"),
    [
        ((), ".texts", "at least one"),
        (("a", ""), ".texts[1]", "must not be empty"),
        (("a", "b", "a"), ".texts[2]", "is there already: 'a'"),
        (("a" * MAX_CONSTRAINT_BYTES, "b"), "", "at most 65536 bytes, got 65537"),
    ],
)
def test_choices_that_say_nothing_are_refused(texts: tuple[str, ...], field: str, message: str) -> None:
    with pytest.raises(InvalidConstraintError, match=message) as caught:
        _spec("choices", *texts)
    assert caught.value.violations[0].field == f"constraint.choices{field}"


@pytest.mark.parametrize(
    "rules",
    [
        "start: a0\n" + "".join(f"a{i}:a{i + 1}\n" for i in range(5000)) + 'a5000: "x"',
        "start: A0\n" + "".join(f"A{i}:A{i + 1}\n" for i in range(5000)) + 'A5000: "x"',
    ],
    ids=["rules", "terminals"],
)
def test_a_chain_of_rules_does_not_overflow_the_stack(tiny: Rig, rules: str) -> None:
    assert _accepts(tiny, tiny.start("lark", rules), "x")


def test_a_chain_of_references_does_not_overflow_the_stack(tiny: Rig) -> None:
    chain = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)}
    schema = {"$defs": chain | {"1500": {"const": 1}}, "$ref": "#/$defs/0"}
    assert _accepts(tiny, tiny.start("json_schema", json.dumps(schema)), "[[[]]]")


_TOO_MUCH = r"(\p{L}\w{0,100}\s?){0,100}"
_LONG = "Once upon a time there was a constraint that went too far for anyone to follow"


def test_a_constraint_that_becomes_too_complex_fails_its_output_alone(demo_path: Path) -> None:
    rig = constrained.demo(demo_path)
    constraint = rig.compiler.compile(_spec("regex", _TOO_MUCH))
    state, other = constraint.start(), constraint.start()
    rig.allowed(other)
    with pytest.raises(ConstraintFailedError, match="simplify it") as caught:
        rig.takes(state, rig.encode(_LONG))
    assert caught.value.reason == "CONSTRAINT_FAILED"
    # What they shared until then is at its limit.
    for untouched in (other, constraint.start()):
        assert rig.takes(untouched, rig.encode("Once"))


# Regular expressions, grammars, choices


@pytest.mark.parametrize(
    "pattern",
    ["a*b", "(a|b)*0", "a?b+1{2,3}", "[ab]{2}[^ab]", "a.b", "(?:ab|a)(?:b1)?", "(a+b?)+0|1*", "a{0,2}|b|",
     "-?[01]+", "(?i:A)b", r"\d\d", r"[^\d]{3}", r"\w+", "a|ab|ab0", "(((a)))", "^ab$", "a*?b"],
)  # fmt: skip
def test_a_regex_accepts_what_pythons_does(tiny: Rig, pattern: str) -> None:
    state = tiny.start("regex", pattern)
    for length in range(4):
        for chars in product("ab01-", repeat=length):
            text = "".join(chars)
            assert _accepts(tiny, state, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    [r"\d{4}-\d{2}-\d{2}", r"[A-Z]{3}(, [A-Z]{3}){0,3}", r'"[^"]*"', r"(\+|-)?\d+(\.\d+)?", "é[à-ü]+",
     "a/b\\\\c", r"[\x20-\x7e]{1,20}", "(foo|bar|baz)+", "x\ny"],
)  # fmt: skip
def test_what_a_regex_draws_matches_in_python(demo_path: Path, tiny: Rig, pattern: str) -> None:
    for rig in (tiny, constrained.demo(demo_path)):
        for seed in range(4):
            output = draw_output(rig, rig.start("regex", pattern), random.Random(seed), num_free=8)
            assert re.fullmatch(pattern, rig.tokenizer.decode(output.token_ids))


def test_a_lark_grammar_is_followed(tiny: Rig) -> None:
    grammar = """
        start: sum
        sum: product ("+" product)*
        product: atom ("*" atom)*
        atom: NUMBER | "(" sum ")"
        NUMBER: /[0-9]+/
    """
    state = tiny.start("lark", grammar)
    assert _accepts(tiny, state, "1+2*(30+4)*5")
    for wrong in ("", "1+", "(1", "1)", "1 + 2", "a"):
        assert not _accepts(tiny, state, wrong)


@pytest.mark.parametrize(
    "texts",
    [
        ("yes", "no"),
        ("a", "ab", "abc"),
        ('quote "', "back\\slash", "new\nline", "[a-z]+", "/", "\x01", "\x7f"),
        ("é", "😀", "日本語", "\u2028"),
    ],
)
def test_choices_allow_each_text_and_nothing_else(tiny: Rig, texts: tuple[str, ...]) -> None:
    state = tiny.start("choices", *texts)
    assert all(_accepts(tiny, state, text) for text in texts)
    for text in texts:
        for wrong in (text[:-1], text + "a", " " + text):
            assert _accepts(tiny, state, wrong) == (wrong in texts)


def test_thousands_of_choices_are_allowed(tiny: Rig) -> None:
    texts = [f"choice number {i}" for i in range(3000)]
    output = draw_output(tiny, tiny.start("choices", *texts), random.Random(5), num_free=30)
    assert tiny.tokenizer.decode(output.token_ids) in texts


# States


def test_the_end_of_text_is_allowed_exactly_where_the_output_may_end(tiny: Rig) -> None:
    state = tiny.start("regex", "ab?")
    assert not state.may_stop
    assert _EOS not in tiny.allowed(state)
    state.accept(tiny.encode("a")[0])
    assert (state.may_stop, state.must_stop, state.forced_tokens()) == (True, False, ())
    assert set(tiny.allowed(state)) == {*tiny.eos_token_ids, tiny.encode("b")[0]}
    state.accept(tiny.encode("b")[0])
    assert (state.may_stop, state.must_stop, state.forced_tokens()) == (True, True, (_EOS,))
    assert tiny.allowed(state) == [_EOS]


def test_nothing_follows_the_end_of_text(tiny: Rig) -> None:
    state = tiny.start("regex", "a*")
    state.accept(_EOS)
    assert (state.may_stop, state.must_stop, state.forced_tokens()) == (True, True, ())
    with pytest.raises(ConstraintFailedError, match="token 2"):
        state.accept(_EOS)
    with pytest.raises(ConstraintFailedError, match="complete"):
        state.accept(tiny.encode("a")[0])


def test_a_token_that_is_not_allowed_fails_the_output(tiny: Rig) -> None:
    state = tiny.start("regex", "ab")
    with pytest.raises(ConstraintFailedError, match="not complete"):
        state.copy().accept(_EOS)
    with pytest.raises(ConstraintFailedError, match="token"):
        state.accept(tiny.encode("b")[0])
    assert not state.must_stop
    with pytest.raises(ConstraintFailedError):
        tiny.allowed(state)
    with pytest.raises(ConstraintFailedError):
        state.forced_tokens()


def test_every_end_of_text_token_of_the_model_ends_an_output() -> None:
    compiler = ConstraintCompiler(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.VOCAB_SIZE, (0, 2))
    mask = np.empty(num_mask_words(tiny_tokenizer.VOCAB_SIZE), np.uint32)
    state = compiler.compile(_spec("regex", "a*")).start()
    state.mask(mask)
    assert {0, 2} < set(allowed_ids(mask, tiny_tokenizer.VOCAB_SIZE).tolist())
    state.accept(0)
    assert state.must_stop


def test_a_model_without_an_end_of_text_token_has_no_constraints() -> None:
    compiler = ConstraintCompiler(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.VOCAB_SIZE, ())
    with pytest.raises(InvalidConstraintError, match="it has no end-of-text token"):
        compiler.compile(_spec("regex", "a"))


@pytest.mark.parametrize("vocab_size", [317, 320, 321, 352, 400])
def test_a_mask_fits_the_models_vocabulary_whatever_the_tokenizers_size(vocab_size: int) -> None:
    # The tokenizer has 320 tokens, three control tokens first, of which two end an output.
    rig = constrained.rig(vocabulary_from_gguf(vocabularies.byte_level_metadata()), vocab_size)
    allowed = set(rig.allowed(rig.start("regex", "(?s:.*)")))
    assert allowed & {0, 1, 2} == {0, 2}
    assert max(allowed) == min(vocab_size, 320) - 1


def test_forced_tokens_are_those_of_the_whole_text(demo_path: Path) -> None:
    rig = constrained.demo(demo_path)
    schema = {"type": "object", "properties": {"given_name": {"type": "integer"}}, "required": ["given_name"]}
    state = rig.start("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))
    forced = state.forced_tokens()
    assert rig.tokenizer.decode(forced) == '{"given_name'
    assert list(forced) == rig.encode('{"given_name":3}')[: len(forced)]
    for token_id in forced:
        assert rig.allowed(state) == [token_id]
        state.accept(token_id)
    assert state.forced_tokens() == ()


def test_a_copy_goes_on_by_itself(tiny: Rig) -> None:
    state = tiny.start("regex", "ab|ac")
    state.accept(tiny.encode("a")[0])
    twin = state.copy()
    twin.accept(tiny.encode("b")[0])
    assert twin.must_stop
    assert not state.must_stop
    assert set(tiny.allowed(state)) == {*tiny.encode("b"), *tiny.encode("c")}


def test_tokens_can_be_taken_back_the_end_of_text_too(tiny: Rig) -> None:
    state = tiny.start("regex", "ab")
    before = tiny.allowed(state)
    for token_id in (*tiny.encode("a"), *tiny.encode("b"), _EOS):
        state.accept(token_id)
    state.roll_back(1)
    assert tiny.allowed(state) == [_EOS]
    state.roll_back(2)
    assert tiny.allowed(state) == before


def test_masks_along_a_draft_are_those_of_its_tokens_one_by_one(tiny: Rig) -> None:
    words = num_mask_words(tiny.vocab_size)
    a, b, c = (tiny.encode(char)[0] for char in "abc")
    for draft, num in (([a, b, a, b], 5), ([a, a, b], 2), ([], 1), ([c], 1), ([a, b, _EOS, a], 3)):
        state = tiny.start("regex", "(ab){1,3}")
        plain = state.copy()
        masks = np.zeros((len(draft) + 1, words), np.uint32)
        assert state.masks_along(draft, masks) == num
        for i in range(num):
            assert allowed_ids(masks[i], tiny.vocab_size).tolist() == tiny.allowed(plain)
            if i + 1 < num:
                plain.accept(draft[i])
        assert set(tiny.allowed(state)) == {a}


# Compiled constraints


def test_a_constraint_is_compiled_once_and_the_least_used_is_dropped() -> None:
    compiler = ConstraintCompiler(
        tiny_tokenizer.tokenizer_json(), tiny_tokenizer.VOCAB_SIZE, (2,), max_kept=2
    )
    first = compiler.compile(_spec("regex", "a"))
    assert compiler.compile(_spec("regex", "a")) is first
    assert compiler.compile(_spec("choices", "a")) is not first
    assert compiler.compile(_spec("regex", "a")) is first
    compiler.compile(_spec("regex", "b"))
    assert compiler.compile(_spec("regex", "a")) is first
    second = compiler.compile(_spec("choices", "a"))
    assert compiler.compile(_spec("choices", "a")) is second


def test_threads_that_compile_the_same_get_the_same_and_their_outputs_do_not_mix() -> None:
    compiler = ConstraintCompiler(tiny_tokenizer.tokenizer_json(), tiny_tokenizer.VOCAB_SIZE, (2,))
    rig = constrained.tiny()

    def work(i: int) -> tuple[Constraint, list[int]]:
        case = SCHEMAS[i % 4 + 100]
        made = compiler.compile(_spec("json_schema", case.text))
        return made, draw_output(rig, made.start(), random.Random(i % 4), num_free=20).token_ids

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(32)))
    for i, (made, token_ids) in enumerate(results):
        assert made is results[i % 4][0]
        assert token_ids == results[i % 4][1]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 49152])
def test_applying_a_mask_leaves_what_is_allowed_and_nothing_else(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    logits = draw.standard_normal(vocab_size).astype(np.float32)
    mask = draw.integers(0, 2**32, num_mask_words(vocab_size), np.uint32)
    plain = logits.copy()
    for i in range(vocab_size):
        if not int(mask[i // 32]) >> i % 32 & 1:
            plain[i] = -np.inf
    apply_mask(logits, mask)
    np.testing.assert_array_equal(logits, plain)
    assert allowed_ids(mask, vocab_size).tolist() == np.flatnonzero(np.isfinite(plain)).tolist()
