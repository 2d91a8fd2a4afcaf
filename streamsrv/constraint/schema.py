"""JSON schemas: what is refused before the compiler sees them, because it would not hold or cost too much."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import TypeAlias

from engines.api import StreamsrvError

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, JsonValue]

# The compiler's own JSON reader goes 128 deep, its wrapping included.
MAX_NESTING = 100
# The compiler makes an automaton of that many states, all at once: 20,000 take 0.2 s, a million 10 s.
MAX_MULTIPLE = 20_000
_OPTIONS = "x-guidance"
# What the compiler takes for a date or a time, less the 29th of February of other than leap years, and less
# leap seconds, which come at few times and many readers refuse.
_DATE = (
    r"(\d{4}-(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|\d{4}-(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|\d{4}-02-(0[1-9]|1\d|2[0-8])|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"\d\d:\d\d:[0-5]\d"
_CALENDAR = {"date": f"^{_DATE}$", "time": f"^{_TIME}", "date-time": f"^{_DATE}[Tt ]{_TIME}"}
# Where the names in an object are the caller's own, and where values are no schemas.
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"enum", "const", "default", "examples"})
_TOO_DEEP = f"is nested too deeply; at most {MAX_NESTING} levels are allowed"


class SchemaError(StreamsrvError):
    """A schema cannot be used; the message says why."""

    reason = "CONSTRAINT_INVALID"


def read_schema(text: str) -> JsonObject:
    """Read a schema, and refuse what the compiler would take, but not hold, or not in reasonable time.

    Raises:
        SchemaError: it is no JSON, or as above; the message says what, and what to do.

    """
    schema = _parse(text)
    if schema is True:
        return {}
    if schema is False:
        raise SchemaError("allows no output at all")
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON object, true or false")
    _whitespace_is_flexible(schema)
    multiples: set[int] = set()
    for value, depth in _walk(schema):
        if depth > MAX_NESTING:
            raise SchemaError(_TOO_DEEP)
        if isinstance(value, float) and not math.isfinite(value):
            raise SchemaError("has a number that is too large")
        if isinstance(value, dict):
            _check_counts(value)
            multiples |= _multiple(value)
    # Where schemas meet, theirs multiply; which ones do is for the compiler to find out.
    if (multiple := math.lcm(*multiples)) > MAX_MULTIPLE:
        raise SchemaError(
            f"has values of multipleOf whose least common multiple, {multiple}, is too large to be enforced; "
            f"at most {MAX_MULTIPLE} is, decimal points and final zeros aside"
        )
    return schema


def compiler_schema(schema: JsonObject) -> JsonObject:
    r"""Put a schema that was read, and the options that it is compiled by, in the compiler's form.

    Without `\u` escapes each string has one way to be written, so that the compiler, which compares names
    as they are written, sees a name that is there already; and there are no lone surrogates. White space is
    bounded, since a model may go on with it forever.
    """
    flexible = _whitespace_is_flexible(schema)
    space: JsonObject = (
        {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"} if flexible else {"whitespace_flexible": False}
    )
    own: JsonObject = {"json_allowed_escapes": 'nrbtf\\"', "coerce_one_of": False, "lenient": False}
    return {**_with_calendar(schema), _OPTIONS: {**space, **own}}


def _with_calendar(schema: JsonObject, *, has_names: bool = False) -> JsonObject:
    """Add to each date and time the pattern of those that exist; `has_names` if its keys are no keywords."""
    made: JsonObject = {}
    for key, value in schema.items():
        if not has_names and key in _DATA:
            made[key] = value
        elif isinstance(value, dict):
            made[key] = _with_calendar(value, has_names=not has_names and key in _NAMES)
        elif isinstance(value, list):
            made[key] = [_with_calendar(inner) if isinstance(inner, dict) else inner for inner in value]
        else:
            made[key] = value
    kind = schema.get("format")
    if not has_names and isinstance(kind, str) and kind in _CALENDAR:
        others = made.get("allOf")
        made["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": _CALENDAR[kind]}]
    return made


def _whitespace_is_flexible(schema: JsonObject) -> bool:
    options = schema.get(_OPTIONS, {})
    if isinstance(options, dict) and set(options) <= {"whitespace_flexible"}:
        flexible = options.get("whitespace_flexible", True)
        if isinstance(flexible, bool):
            return flexible
    raise SchemaError(f"has {_OPTIONS!r} with other content than whitespace_flexible, true or false")


def _parse(text: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise SchemaError(_TOO_DEEP) from None
    except ValueError as error:
        raise SchemaError(f"is no JSON: {error}") from error
    return value


def _check_counts(schema: JsonObject) -> None:
    """Refuse a least number of properties that names written twice would seem to reach."""
    least, required = schema.get("minProperties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names) + 1:
        raise SchemaError(
            f"asks for minProperties {least:g} where {len(names)} are required: at most one more can be "
            "enforced; name more of them in required"
        )


def _multiple(schema: JsonObject) -> set[int]:
    """Give the digits of a multipleOf as a whole number, without final zeros."""
    value = schema.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return set()  # no number or not positive: the compiler says so, or it is a property's name
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return {int("".join(map(str, digits)))}


def _walk(schema: JsonValue) -> Iterator[tuple[JsonValue, int]]:
    """Give each value in a schema with its depth; a $ref can make a schema of any of them."""
    left: list[tuple[JsonValue, int]] = [(schema, 1)]
    while left:
        value, depth = left.pop()
        yield value, depth
        if isinstance(value, dict):
            left.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            left.extend((inner, depth + 1) for inner in value)


def _object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(f"has the name {twice!r} twice in one object")
    return value


def _refuse_constant(name: str) -> JsonValue:
    raise SchemaError(f"is no JSON: {name} is no number")
