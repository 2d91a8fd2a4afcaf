"""300 JSON schemas of the kinds that are in public use: made one after another, and written out."""

from tests.schemas.case import Json, SchemaCase
from tests.schemas.systematic import systematic
from tests.schemas.written import written

SCHEMAS: tuple[SchemaCase, ...] = (*systematic(), *written())
"""All of them; each name once."""

__all__ = ["SCHEMAS", "Json", "SchemaCase"]
