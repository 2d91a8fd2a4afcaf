"""A schema with its name, and the words to write one in."""

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value as `json.loads` gives it."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """One schema."""

    name: str
    schema: Json
    examples: tuple[Json, ...] = ()
    """Values that it allows, with names in the order of its properties."""

    @property
    def text(self) -> str:
        """The schema as a caller sends it."""
        return json.dumps(self.schema)


def obj(properties: dict[str, Json], *, optional: tuple[str, ...] = (), closed: bool = True) -> Json:
    """Write the schema of an object whose properties are required unless named as optional."""
    schema: Json = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }
    return schema | {"additionalProperties": False} if closed else schema


def arr(items: Json, **bounds: int) -> Json:
    """Write the schema of an array."""
    return {"type": "array", "items": items, **bounds}
