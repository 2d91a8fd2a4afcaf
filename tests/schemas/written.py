"""Schemas as people write them: for extraction, for calls of tools, for records and documents."""

from collections.abc import Iterator

from tests.schemas.case import Json, SchemaCase, arr, obj

_S: Json = {"type": "string"}
_SHORT: Json = {"type": "string", "minLength": 1, "maxLength": 20}
_I: Json = {"type": "integer"}
_COUNT: Json = {"type": "integer", "minimum": 0, "maximum": 10_000}
_PRICE: Json = {"type": "number", "minimum": 0, "maximum": 100_000}
_B: Json = {"type": "boolean"}
_DATE: Json = {"type": "string", "format": "date"}
_TIME: Json = {"type": "string", "format": "date-time"}
_EMAIL: Json = {"type": "string", "format": "email"}
_UUID: Json = {"type": "string", "format": "uuid"}
_URI: Json = {"type": "string", "format": "uri"}
_CURRENCY: Json = {"type": "string", "pattern": "^[A-Z]{3}$"}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_ADDRESS = obj(
    {
        "street": _SHORT,
        "city": _SHORT,
        "zip": {"type": "string", "pattern": r"^\d{5}(-\d{4})?$"},
        "country": _SHORT,
    },
    optional=("country",),
)
_POINT = {"type": "array", "prefixItems": [{"type": "number"}] * 2, "items": False, "minItems": 2}

_TABLE: dict[str, tuple[Json, Json]] = {
    "sentiment": (
        obj(
            {
                "label": {"enum": ["positive", "negative", "neutral"]},
                "score": {"type": "number", "minimum": 0, "maximum": 1},
            }
        ),
        {"label": "neutral", "score": 0.25},
    ),
    "person": (
        obj(
            {"name": _SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": _EMAIL},
            optional=("email",),
        ),
        {"name": "Ada", "age": 36, "email": "ada@example.org"},
    ),
    "address": (_ADDRESS, {"street": "1 Main St", "city": "Springfield", "zip": "12345-6789"}),
    "contact": (
        obj(
            {
                "name": _S,
                "address": _ADDRESS,
                "phones": arr({"type": "string", "pattern": r"^\+[0-9]{6,14}$"}, maxItems=3),
            }
        ),
        {"name": "B", "address": {"street": "x", "city": "y", "zip": "00000"}, "phones": ["+4930123456"]},
    ),
    "entities": (
        arr(
            obj({"text": _SHORT, "type": {"enum": ["PERSON", "ORG", "LOC"]}, "start": _COUNT, "end": _COUNT}),
            maxItems=4,
        ),
        [{"text": "Oslo", "type": "LOC", "start": 3, "end": 7}],
    ),
    "order": (
        obj(
            {
                "order_id": _UUID,
                "placed": _TIME,
                "lines": arr(
                    obj({"sku": _SHORT, "quantity": {"type": "integer", "minimum": 1}, "price": _PRICE}),
                    minItems=1,
                    maxItems=4,
                ),
                "currency": _CURRENCY,
                "note": _nullable(_S),
            },
            optional=("note",),
        ),
        {
            "order_id": "123e4567-e89b-12d3-a456-426614174000",
            "placed": "2024-02-29T12:00:00Z",
            "lines": [{"sku": "A-1", "quantity": 2, "price": 9.95}],
            "currency": "EUR",
            "note": None,
        },
    ),
    "invoice": (
        obj(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
                "due": _DATE,
                "total": _PRICE,
                "paid": _B,
            }
        ),
        {"number": "INV-000042", "due": "2030-12-31", "total": 0, "paid": False},
    ),
    "weather-call": (
        obj(
            {
                "name": {"const": "get_weather"},
                "arguments": obj({"city": _SHORT, "unit": {"enum": ["C", "F"]}}, optional=("unit",)),
            }
        ),
        {"name": "get_weather", "arguments": {"city": "Rome"}},
    ),
    "tool-calls": (
        {
            "oneOf": [
                obj(
                    {
                        "tool": {"const": "search"},
                        "query": _SHORT,
                        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                    }
                ),
                obj(
                    {
                        "tool": {"const": "calculate"},
                        "expression": {"type": "string", "pattern": r"^[0-9+*/() .-]+$"},
                    }
                ),
                obj({"tool": {"const": "finish"}, "answer": _S}),
            ]
        },
        {"tool": "calculate", "expression": "(1 + 2) * 3"},
    ),
    "chain-of-thought": (
        obj(
            {"steps": arr(obj({"explanation": _S, "output": _S}), minItems=1, maxItems=3), "final_answer": _S}
        ),
        {"steps": [{"explanation": "add", "output": "3"}], "final_answer": "3"},
    ),
    "user-interface": (
        {
            "$defs": {
                "node": obj(
                    {
                        "type": {"enum": ["div", "button", "field", "form"]},
                        "label": _S,
                        "children": arr({"$ref": "#/$defs/node"}, maxItems=3),
                        "attributes": arr(obj({"name": _S, "value": _S}), maxItems=2),
                    }
                )
            },
            "$ref": "#/$defs/node",
        },
        {
            "type": "div",
            "label": "",
            "children": [{"type": "button", "label": "OK", "children": [], "attributes": []}],
            "attributes": [{"name": "id", "value": "x"}],
        },
    ),
    "linked-list": (
        {
            "$defs": {
                "node": obj({"value": {"type": "number"}, "next": _nullable({"$ref": "#/$defs/node"})})
            },
            **obj({"linked_list": {"$ref": "#/$defs/node"}}),
        },
        {"linked_list": {"value": 1, "next": {"value": -2.5, "next": None}}},
    ),
    "expression": (
        {
            "$defs": {
                "expr": {
                    "anyOf": [
                        {"type": "number"},
                        obj(
                            {
                                "op": {"enum": ["+", "-", "*", "/"]},
                                "left": {"$ref": "#/$defs/expr"},
                                "right": {"$ref": "#/$defs/expr"},
                            }
                        ),
                    ]
                }
            },
            "$ref": "#/$defs/expr",
        },
        {"op": "+", "left": 1, "right": {"op": "*", "left": 2, "right": 3.5}},
    ),
    "file-tree": (
        {
            "$defs": {
                "file": obj({"name": _SHORT, "size": _COUNT}),
                "folder": obj(
                    {
                        "name": _SHORT,
                        "entries": arr(
                            {"anyOf": [{"$ref": "#/$defs/file"}, {"$ref": "#/$defs/folder"}]}, maxItems=3
                        ),
                    }
                ),
            },
            "$ref": "#/$defs/folder",
        },
        {"name": "src", "entries": [{"name": "a.py", "size": 10}, {"name": "lib", "entries": []}]},
    ),
    "comment-thread": (
        {
            "$defs": {
                "comment": obj(
                    {"author": _SHORT, "text": _S, "replies": arr({"$ref": "#/$defs/comment"}, maxItems=2)},
                    optional=("replies",),
                )
            },
            "type": "array",
            "items": {"$ref": "#/$defs/comment"},
            "maxItems": 2,
        },
        [{"author": "a", "text": "hi", "replies": [{"author": "b", "text": "ho"}]}],
    ),
    "even-odd": (
        {
            "$defs": {
                "even": {"anyOf": [{"type": "null"}, obj({"odd": {"$ref": "#/$defs/odd"}})]},
                "odd": obj({"even": {"$ref": "#/$defs/even"}}),
            },
            "$ref": "#/$defs/even",
        },
        {"odd": {"even": {"odd": {"even": None}}}},
    ),
    "geo-point": (
        obj({"type": {"const": "Point"}, "coordinates": _POINT}),
        {"type": "Point", "coordinates": [1.5, -2]},
    ),
    "geo-geometry": (
        {
            "oneOf": [
                obj({"type": {"const": "Point"}, "coordinates": _POINT}),
                obj({"type": {"const": "LineString"}, "coordinates": arr(_POINT, minItems=2, maxItems=3)}),
                obj(
                    {
                        "type": {"const": "Polygon"},
                        "coordinates": arr(arr(_POINT, minItems=4, maxItems=5), minItems=1, maxItems=1),
                    }
                ),
            ]
        },
        {"type": "LineString", "coordinates": [[0, 0], [1, 1]]},
    ),
    "latitude": (
        obj(
            {
                "lat": {"type": "number", "minimum": -90, "maximum": 90},
                "lon": {"type": "number", "minimum": -180, "maximum": 180},
            }
        ),
        {"lat": -33.8688, "lon": 151.2093},
    ),
    "colour": (
        {
            "anyOf": [
                {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
                arr({"type": "integer", "minimum": 0, "maximum": 255}, minItems=3, maxItems=3),
            ]
        },
        [255, 0, 128],
    ),
    "package": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                "private": _B,
                "scripts": {"type": "object", "additionalProperties": _S},
                "dependencies": {
                    "type": "object",
                    "patternProperties": {"^[a-z-]+$": _S},
                    "additionalProperties": False,
                },
            },
            "required": ["name", "version"],
        },
        {
            "name": "left-pad",
            "version": "1.3.0",
            "private": False,
            "scripts": {"test": "true"},
            "dependencies": {"x": "^1"},
        },
    ),
    "http-log": (
        obj(
            {
                "at": _TIME,
                "method": {"enum": ["GET", "POST", "PUT", "DELETE", "PATCH"]},
                "status": {"type": "integer", "minimum": 100, "maximum": 599},
                "client": {"type": "string", "format": "ipv4"},
                "ms": {"type": "number", "minimum": 0},
            }
        ),
        {
            "at": "2021-01-01T00:00:00.5+01:00",
            "method": "PATCH",
            "status": 204,
            "client": "10.0.0.255",
            "ms": 0.5,
        },
    ),
    "calendar-event": (
        obj(
            {
                "title": _SHORT,
                "start": _TIME,
                "duration": {"type": "string", "format": "duration"},
                "attendees": arr(_EMAIL, maxItems=3),
                "location": _nullable(_S),
            },
            optional=("location",),
        ),
        {
            "title": "Talk",
            "start": "2025-05-01T10:00:00Z",
            "duration": "PT1H30M",
            "attendees": ["a@b.co"],
            "location": None,
        },
    ),
    "recipe": (
        obj(
            {
                "title": _SHORT,
                "servings": {"type": "integer", "minimum": 1, "maximum": 12},
                "ingredients": arr(
                    obj(
                        {
                            "name": _SHORT,
                            "amount": {"type": "number", "exclusiveMinimum": 0},
                            "unit": {"enum": ["g", "ml", "piece"]},
                        }
                    ),
                    minItems=1,
                    maxItems=3,
                ),
                "steps": arr(_S, minItems=1, maxItems=3),
            }
        ),
        {
            "title": "Toast",
            "servings": 1,
            "ingredients": [{"name": "bread", "amount": 1, "unit": "piece"}],
            "steps": ["Toast it."],
        },
    ),
    "quiz": (
        arr(
            obj(
                {
                    "question": _S,
                    "options": arr(_SHORT, minItems=4, maxItems=4),
                    "correct": {"type": "integer", "minimum": 0, "maximum": 3},
                }
            ),
            minItems=1,
            maxItems=2,
        ),
        [{"question": "2 + 2?", "options": ["1", "2", "3", "4"], "correct": 3}],
    ),
    "resume": (
        {
            "type": "object",
            "properties": {
                "basics": obj({"name": _SHORT, "email": _EMAIL, "url": _URI}, optional=("url",)),
                "work": arr(obj({"company": _SHORT, "from": _DATE, "to": _nullable(_DATE)}), maxItems=2),
                "skills": arr({"enum": ["Python", "C++", "Go", "Rust", "SQL"]}, maxItems=5),
            },
            "required": ["basics"],
        },
        {
            "basics": {"name": "G", "email": "g@h.io", "url": "https://h.io/"},
            "work": [{"company": "X", "from": "2020-01-01", "to": None}],
            "skills": ["Go"],
        },
    ),
    "server-config": (
        obj(
            {
                "host": {"type": "string", "format": "hostname"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                "tls": {"anyOf": [{"const": False}, obj({"cert": _SHORT, "key": _SHORT})]},
                "retries": {"type": "integer", "minimum": 0, "maximum": 10},
            },
            optional=("retries",),
        ),
        {"host": "example.org", "port": 443, "tls": {"cert": "a", "key": "b"}},
    ),
    "feature-flags": (
        {"type": "object", "additionalProperties": _B, "minProperties": 1, "maxProperties": 4},
        {"dark": True, "new-ui": False},
    ),
    "translations": (
        {
            "type": "object",
            "patternProperties": {"^[a-z]{2}(-[A-Z]{2})?$": _S},
            "additionalProperties": False,
        },
        {"en": "hello", "pt-BR": "olá"},
    ),
    "sql": (
        obj(
            {
                "table": {"type": "string", "pattern": "^[a-z_]+$"},
                "columns": arr({"type": "string", "pattern": "^[a-z_]+$"}, minItems=1, maxItems=3),
                "where": arr(
                    obj(
                        {
                            "column": _SHORT,
                            "op": {"enum": ["=", "<", ">", "<=", ">=", "!="]},
                            "value": {"type": ["string", "number", "boolean"]},
                        }
                    ),
                    maxItems=2,
                ),
                "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            },
            optional=("where", "limit"),
        ),
        {"table": "users", "columns": ["id"], "where": [{"column": "age", "op": ">=", "value": 18}]},
    ),
    "search-filter": (
        {
            "$defs": {
                "filter": {
                    "anyOf": [
                        obj({"and": arr({"$ref": "#/$defs/filter"}, minItems=1, maxItems=2)}),
                        obj({"not": {"$ref": "#/$defs/filter"}}),
                        obj({"field": _SHORT, "equals": {"type": ["string", "integer", "null"]}}),
                    ]
                }
            },
            "$ref": "#/$defs/filter",
        },
        {"and": [{"field": "a", "equals": None}, {"not": {"field": "b", "equals": 1}}]},
    ),
    "payment": (
        {
            "type": "object",
            "properties": {"amount": _PRICE, "method": {"enum": ["card", "iban"]}},
            "required": ["amount", "method"],
            "anyOf": [
                {"properties": {"card": {"type": "string", "pattern": "^[0-9]{16}$"}}, "required": ["card"]},
                {
                    "properties": {"iban": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{20}$"}},
                    "required": ["iban"],
                },
            ],
        },
        {"amount": 5, "method": "card", "card": "4111111111111111"},
    ),
    "product": (
        {
            "allOf": [
                {"$ref": "#/definitions/base"},
                {
                    "type": "object",
                    "properties": {"price": _PRICE, "tags": arr(_SHORT, maxItems=3)},
                    "required": ["price"],
                },
            ],
            "definitions": {
                "base": {
                    "type": "object",
                    "properties": {"id": _COUNT, "name": _SHORT},
                    "required": ["id", "name"],
                }
            },
        },
        {"id": 1, "name": "Cup", "price": 3.5, "tags": []},
    ),
    "draft-07-tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [_SHORT, _COUNT],
            "additionalItems": False,
            "minItems": 2,
        },
        ["a", 1],
    ),
    "draft-04-style": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "id": "x",
            "title": "Old",
            "description": "An old one",
            "type": "object",
            "properties": {"a": _I},
            "required": ["a"],
        },
        {"a": -3},
    ),
    "annotated": (
        obj(
            {
                "a": {
                    "type": "integer",
                    "title": "A",
                    "description": "first",
                    "default": 3,
                    "examples": [1, 2],
                    "minimum": 0,
                    "maximum": 9,
                    "deprecated": True,
                }
            }
        )
        | {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/a",
            "$comment": "none",
        },
        {"a": 5},
    ),
    "pydantic": (
        {
            "$defs": {
                "Level": {"enum": ["low", "high"], "title": "Level", "type": "string"},
                "Item": {
                    "properties": {
                        "level": {"$ref": "#/$defs/Level"},
                        "weight": {
                            "anyOf": [{"type": "number"}, {"type": "null"}],
                            "default": None,
                            "title": "Weight",
                        },
                    },
                    "required": ["level"],
                    "title": "Item",
                    "type": "object",
                },
            },
            "properties": {
                "items": {
                    "items": {"$ref": "#/$defs/Item"},
                    "maxItems": 3,
                    "title": "Items",
                    "type": "array",
                },
                "name": {"title": "Name", "type": "string"},
            },
            "required": ["items", "name"],
            "title": "Model",
            "type": "object",
        },
        {"items": [{"level": "low", "weight": None}, {"level": "high"}], "name": "n"},
    ),
    "strict-openai": (
        obj(
            {
                "name": _nullable(_S),
                "kind": {"enum": ["a", "b"]},
                "nested": obj({"flag": _B, "list": arr(_I, maxItems=4)}),
            }
        ),
        {"name": None, "kind": "a", "nested": {"flag": True, "list": [1, 2]}},
    ),
    "matrix": (
        arr(
            arr({"type": "number", "minimum": -1, "maximum": 1}, minItems=3, maxItems=3),
            minItems=3,
            maxItems=3,
        ),
        [[1, 0, 0], [0, 1, 0], [0, 0, 0.5]],
    ),
    "sudoku-row": (
        arr({"type": "integer", "minimum": 1, "maximum": 9}, minItems=9, maxItems=9),
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
    ),
    "chess-move": (
        obj(
            {
                "from": {"type": "string", "pattern": "^[a-h][1-8]$"},
                "to": {"type": "string", "pattern": "^[a-h][1-8]$"},
                "promote": {"enum": ["Q", "R", "B", "N"]},
            },
            optional=("promote",),
        ),
        {"from": "e2", "to": "e4"},
    ),
    "semantic-version": (
        {"type": "string", "pattern": r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$"},
        "1.20.3-rc.1",
    ),
    "iso-country": (
        obj({"code": {"type": "string", "minLength": 2, "maxLength": 2, "pattern": "^[A-Z]*$"}, "eu": _B}),
        {"code": "DE", "eu": True},
    ),
    "percent": (obj({"p": {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.5}}), {"p": 99.5}),
    "bank-balance": (
        obj({"cents": {"type": "integer", "minimum": -99999999, "maximum": 99999999}}),
        {"cents": -1},
    ),
    "timestamp": (
        obj({"unix_ms": {"type": "integer", "minimum": 0, "maximum": 4102444800000}}),
        {"unix_ms": 1700000000000},
    ),
    "email-triage": (
        obj(
            {
                "category": {"enum": ["billing", "bug", "other"]},
                "urgent": _B,
                "summary": {"type": "string", "maxLength": 80},
                "reply_to": _EMAIL,
            }
        ),
        {"category": "bug", "urgent": False, "summary": "It broke.", "reply_to": "x@y.zz"},
    ),
    "medical-code": (
        arr(
            obj(
                {
                    "code": {"type": "string", "pattern": r"^[A-TV-Z][0-9][0-9AB](\.[0-9A-TV-Z]{1,4})?$"},
                    "certain": _B,
                }
            ),
            minItems=1,
            maxItems=2,
        ),
        [{"code": "J45.9", "certain": True}],
    ),
    "citation": (
        obj(
            {
                "authors": arr(_SHORT, minItems=1, maxItems=3),
                "year": {"type": "integer", "minimum": 1450, "maximum": 2100},
                "doi": {"type": "string", "pattern": r"^10\.\d{4,9}/[-._;()/:a-z0-9]+$"},
            },
            optional=("doi",),
        ),
        {"authors": ["K"], "year": 1931, "doi": "10.1000/x1"},
    ),
    "yes-no": (
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
        {"answer": "no"},
    ),
    "union-of-all": (
        {"type": ["object", "array", "string", "number", "boolean", "null"], "maxLength": 3, "maxItems": 2},
        "abc",
    ),
    "empty-object": ({"type": "object", "additionalProperties": False}, {}),
    "deep-defs": (
        {
            "$defs": {
                "a": {"$ref": "#/$defs/b"},
                "b": {"$ref": "#/$defs/c"},
                "c": obj({"v": {"$ref": "#/$defs/d"}}),
                "d": {"enum": [1, 2]},
            },
            "$ref": "#/$defs/a",
        },
        {"v": 2},
    ),
    "ref-with-siblings": (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3, "maximum": 9},
        4,
    ),
    "resource-ids": (
        {
            "$id": "https://example.org/root",
            "$defs": {"id": {"$id": "item", "type": "string", "pattern": "^[a-z]{3}$"}},
            "type": "array",
            "items": {"$ref": "item"},
            "maxItems": 3,
        },
        ["abc", "xyz"],
    ),
    "mixed-list": (
        arr(
            {
                "anyOf": [
                    _COUNT,
                    {"enum": ["skip"]},
                    obj({"repeat": {"type": "integer", "minimum": 2, "maximum": 5}}),
                ]
            },
            minItems=1,
            maxItems=5,
        ),
        [3, "skip", {"repeat": 2}],
    ),
    "state-machine": (
        obj(
            {
                "initial": _SHORT,
                "states": {
                    "type": "object",
                    "additionalProperties": obj(
                        {"on": {"type": "object", "additionalProperties": _SHORT}, "final": _B},
                        optional=("final",),
                    ),
                },
            }
        ),
        {"initial": "a", "states": {"a": {"on": {"go": "b"}}, "b": {"on": {}, "final": True}}},
    ),
    "html-escape": (
        obj({"html": {"type": "string", "pattern": r"^<(b|i)>[^<>&]*</(b|i)>$"}}),
        {"html": "<b>x</b>"},
    ),
    "quoted": (obj({"csv": {"type": "string", "pattern": '^"[a-z]*"(,"[a-z]*")*$'}}), {"csv": '"a","b"'}),
    "windows-path": ({"type": "string", "pattern": r"^[A-Z]:\\(\w+\\)*\w+$"}, "C:\\dir\\file"),
    "multi-line": (obj({"poem": {"type": "string", "pattern": r"^[a-z ]+\n[a-z ]+$"}}), {"poem": "one\ntwo"}),
    "unicode-names": (obj({"имя": _SHORT, "年齢": _COUNT}), {"имя": "Яна", "年齢": 9}),
    "optional-chain": (
        obj({"a": _I, "b": _I, "c": _I, "d": _I, "e": _I}, optional=("a", "b", "c", "d", "e")),
        {"b": 1, "e": 2},
    ),
    "additional-typed": (
        {
            "type": "object",
            "properties": {"id": _COUNT},
            "required": ["id"],
            "additionalProperties": {"type": ["string", "number"]},
        },
        {"id": 1, "x": "y", "z": 0.5},
    ),
    "ipv6-list": (arr({"type": "string", "format": "ipv6"}, minItems=1, maxItems=2), ["::1"]),
    "time-slots": (
        arr(obj({"from": {"type": "string", "format": "time"}, "busy": _B}), maxItems=2),
        [{"from": "10:30:00Z", "busy": True}],
    ),
}


def written() -> Iterator[SchemaCase]:
    """Give them all, each with a value that it allows."""
    for name, (schema, example) in _TABLE.items():
        yield SchemaCase(name, schema, (example,))
