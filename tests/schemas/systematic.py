"""Schemas made by going through keywords and their combinations."""

import random
from collections.abc import Iterator
from itertools import product

from tests.schemas.case import Json, SchemaCase, arr, obj

_STRING: Json = {"type": "string", "maxLength": 12}
_INTEGER: Json = {"type": "integer", "minimum": -1000, "maximum": 1000}
_NUMBER: Json = {"type": "number", "minimum": -10, "maximum": 10}
_BOOLEAN: Json = {"type": "boolean"}
_NULL: Json = {"type": "null"}
_SIMPLE: dict[str, Json] = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": _NUMBER,
    "boolean": _BOOLEAN,
    "null": _NULL,
}
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_PATTERNS = (
    r"^[A-Z]{2}-\d{4}$",
    r"^\+?[0-9]{7,15}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(foo|bar|baz)$",
    r"^[a-z][a-z0-9_]*$",
    r"^\d{3}-\d{2}-\d{4}$",
    r"^v?\d+\.\d+\.\d+$",
    r"[aeiou]{2}",
    r"^x",
    r"z$",
    r"^[^\s@]+@[^\s@]+$",
    r"^(?:[01]\d|2[0-3]):[0-5]\d$",
    r"^\w+( \w+){1,3}$",
    r"^[\u00e0-\u00ff]{1,4}$",
    r"^\"quoted\"$",
    r"^a\\b/c$",
    r"^.{2,5}$",
    r"^\S+$",
    r"^(ab?c*)+d$",
    r"^[A-Za-z0-9+/]{4}={0,2}$",
)


def systematic() -> Iterator[SchemaCase]:
    """Make them all."""
    for kind, make in (
        ("integer", _integers),
        ("number", _numbers),
        ("string", _strings),
        ("array", _arrays),
        ("object", _objects),
        ("value", _values),
        ("combined", _combined),
        ("nested", _nested),
        ("record", _records),
    ):
        for i, schema in enumerate(make()):
            yield SchemaCase(f"{kind}-{i}", schema)


def _integers() -> Iterator[Json]:
    yield {"type": "integer"}
    for low, high in (
        (0, 9),
        (-5, 5),
        (1, 100),
        (17, 18),
        (-1000, -1),
        (999, 1001),
        (0, 2**31 - 1),
        (42, 42),
    ):
        yield {"type": "integer", "minimum": low, "maximum": high}
        yield {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    for bound in (-123, 0, 7, 1000):
        yield {"type": "integer", "minimum": bound}
        yield {"type": "integer", "maximum": bound}
    for multiple in (2, 5, 7, 10, 25, 1000):
        yield {"type": "integer", "multipleOf": multiple}
    yield {"type": "integer", "minimum": 1.5, "maximum": 7.5}
    yield {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 40}


def _numbers() -> Iterator[Json]:
    yield {"type": "number"}
    for low, high in ((0, 1), (-1, 1), (0.5, 0.75), (-90, 90), (-180.0, 180.0), (1.25, 100), (-3.5, -0.001)):
        yield {"type": "number", "minimum": low, "maximum": high}
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for bound in (-2.5, 0, 99.9):
        yield {"type": "number", "minimum": bound}
        yield {"type": "number", "exclusiveMaximum": bound}
    yield {"type": "number", "multipleOf": 0.5}
    yield {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}


def _strings() -> Iterator[Json]:
    yield {"type": "string"}
    for low, high in ((0, 0), (1, 1), (3, 3), (0, 5), (2, 20), (10, 12)):
        yield {"type": "string", "minLength": low, "maxLength": high}
    yield {"type": "string", "minLength": 6}
    for name in _FORMATS:
        yield {"type": "string", "format": name}
    for pattern in _PATTERNS:
        yield {"type": "string", "pattern": pattern}
    yield {"type": "string", "pattern": "^[a-f]+$", "minLength": 2, "maxLength": 4}
    yield {"type": "string", "format": "email", "maxLength": 30}


def _arrays() -> Iterator[Json]:
    yield {"type": "array"}
    for schema in _SIMPLE.values():
        yield arr(schema)
        yield arr(schema, minItems=2, maxItems=4)
    for low, high in ((0, 0), (0, 1), (1, 1), (3, 3), (5, 8)):
        yield arr(_BOOLEAN, minItems=low, maxItems=high)
    yield arr(_INTEGER, minItems=3)
    yield {"type": "array", "prefixItems": [_STRING, _INTEGER]}
    yield {"type": "array", "prefixItems": [_STRING, _INTEGER], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": _NUMBER, "minItems": 2, "maxItems": 3}
    yield arr(arr(_INTEGER, minItems=2, maxItems=2), minItems=1, maxItems=2)
    yield arr(obj({"id": _INTEGER, "label": _STRING}), minItems=1, maxItems=3)
    yield arr({"enum": ["red", "green", "blue"]}, minItems=1, maxItems=3)


def _objects() -> Iterator[Json]:
    yield {"type": "object"}
    for name, schema in _SIMPLE.items():
        yield obj({name: schema})
        yield {"type": "object", "additionalProperties": schema}
    names = ("a", "ab", "abc", "b")
    for num, num_required in product((2, 4), (0, 1, 2)):
        properties = {name: list(_SIMPLE.values())[i] for i, name in enumerate(names[:num])}
        yield obj(properties, optional=names[num_required:num])
        yield obj(properties, optional=names[num_required:num], closed=False)
    yield {"type": "object", "properties": {"a": _STRING}, "additionalProperties": _INTEGER}
    yield {"type": "object", "properties": {"a": _STRING}, "required": ["a", "z"]}
    yield {"type": "object", "patternProperties": {"^x-": _STRING}, "additionalProperties": False}
    yield {"type": "object", "patternProperties": {"^i_": _INTEGER, "^s_": _STRING}}
    yield {"type": "object", "additionalProperties": _INTEGER, "minProperties": 1, "maxProperties": 3}
    yield {"type": "object", "required": ["k"], "minProperties": 2, "additionalProperties": _BOOLEAN}
    yield obj({'with "quotes"': _INTEGER, "back\\slash": _INTEGER, "new\nline": _INTEGER, "": _NULL})
    yield obj({"naïve": _STRING, "日本": _INTEGER, "😀": _BOOLEAN}, closed=False)
    yield obj({f"field_{i}": _BOOLEAN for i in range(20)})
    yield obj({f"option_{i}": _BOOLEAN for i in range(12)}, optional=tuple(f"option_{i}" for i in range(12)))


def _values() -> Iterator[Json]:
    for value in ("fixed", 7, -2.5, True, None, [], {}, [1, "two", None], {"a": {"b": [1]}}, 'quote " \\ \n'):
        yield {"const": value}
    yield {"enum": ["yes", "no", "maybe"]}
    yield {"enum": ["a", "ab", "abc", "abcd"]}
    yield {"enum": [1, 10, 100, 11]}
    yield {"enum": ["x", 1, None, False, [1], {"k": "v"}]}
    yield {"type": "string", "enum": ["north", "south", "east", "west"]}
    yield {"enum": ["é", "\u2028", "tab\t", "😀"]}
    yield {"enum": [f"country {i}" for i in range(200)]}
    yield {"type": ["string", "null"], "maxLength": 5}
    yield {"type": ["integer", "boolean", "null"]}
    yield {"type": ["array", "object"], "items": _INTEGER, "additionalProperties": _STRING}
    yield {}
    yield True


def _combined() -> Iterator[Json]:
    simple = list(_SIMPLE.values())
    for first, second in ((0, 1), (1, 3), (2, 4), (0, 4)):
        yield {"anyOf": [simple[first], simple[second]]}
        yield {"oneOf": [simple[first], simple[second]]}
    yield {"anyOf": [{"const": "a"}, {"const": "b"}, arr(_INTEGER, maxItems=2)]}
    kinds = [obj({"kind": {"const": name}, name: schema}) for name, schema in _SIMPLE.items()]
    yield {"anyOf": kinds}
    yield {"oneOf": kinds}
    yield {"anyOf": [obj({"x": _INTEGER}), obj({"y": _INTEGER}), _NULL]}
    yield {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}]}
    yield {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 6}, {"pattern": "^[a-z]*$"}]}
    yield {"allOf": [obj({"a": _INTEGER}, closed=False), obj({"b": _STRING}, closed=False)]}
    yield {"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"enum": ["q", 4, None]}]}
    yield {
        "type": "object",
        "properties": {"a": _INTEGER},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    yield obj(
        {"value": {"anyOf": [_STRING, _NUMBER, arr(_STRING, maxItems=2)]}, "unit": {"enum": ["m", "s"]}}
    )
    yield {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "minimum": 0, "maximum": 100}
    yield {"type": "object", "properties": {"n": {"allOf": [_INTEGER, {"minimum": 0}]}}, "required": ["n"]}


def _nested() -> Iterator[Json]:
    for depth in (2, 4, 8, 16):
        objects: Json = _INTEGER
        arrays: Json = _BOOLEAN
        for i in range(depth):
            objects = obj({f"level_{i}": objects})
            arrays = arr(arrays, minItems=1, maxItems=2)
        yield objects
        yield arrays
    mixed: Json = _STRING
    for i in range(6):
        mixed = arr(mixed, minItems=1, maxItems=1) if i % 2 else obj({"name": _STRING, "inner": mixed})
    yield mixed
    for schema in (mixed, obj({"a": _INTEGER, "b": arr(_STRING, maxItems=3)}), {"type": "object"}):
        yield schema | {"x-guidance": {"whitespace_flexible": False}}
    node = {
        "type": "object",
        "properties": {"value": _INTEGER},
        "required": ["value"],
        "additionalProperties": False,
    }
    for name, target in (("next", {"$ref": "#"}), ("children", arr({"$ref": "#"}, maxItems=2))):
        recursive = node | {"properties": {"value": _INTEGER, name: target}}
        yield recursive
        yield {"$defs": {"node": recursive | {"properties": {"value": _INTEGER, name: _renamed(target)}}}} | {
            "$ref": "#/$defs/node"
        }
    yield {"$defs": {"x": {"anyOf": [_NULL, arr({"$ref": "#/$defs/x"}, maxItems=2)]}}, "$ref": "#/$defs/x"}
    yield {"definitions": {"p": _STRING, "q": {"$ref": "#/definitions/p"}}, "$ref": "#/definitions/q"}
    yield {
        "$defs": {"a/b": _STRING, "c~d": _INTEGER},
        "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}],
    }
    yield {"$defs": {"n": {"$anchor": "here", **_INTEGER}}, "type": "array", "items": {"$ref": "#here"}}


def _renamed(target: Json) -> Json:
    ref = {"$ref": "#/$defs/node"}
    return ref if "$ref" in target else target | {"items": ref}


def _records() -> Iterator[Json]:
    """Make schemas of several levels with a bit of everything."""
    for seed in range(20):
        yield obj({f"part_{i}": _any_schema(random.Random(100 * seed + i), 3) for i in range(3)})


def _any_schema(draw: random.Random, levels: int) -> Json:
    kind = draw.randrange(9 if levels else 5)
    if kind < 2:
        return draw.choice(list(_SIMPLE.values()))
    if kind == 2:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    if kind == 3:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind == 4:
        return {"enum": draw.sample(["alpha", "beta", 1, 2.5, None, True, "ab"], 3)}
    inner = [_any_schema(draw, levels - 1) for _ in range(2)]
    if kind == 5:
        return arr(inner[0], minItems=draw.randrange(2), maxItems=draw.randrange(2, 4))
    if kind == 6:
        return {"anyOf": inner}
    names = draw.sample(["id", "name", "value", "kind", "meta-data", "ä"], 2)
    closed = bool(draw.randrange(2))
    return obj(dict(zip(names, inner, strict=True)), optional=(names[1],) if kind == 8 else (), closed=closed)
