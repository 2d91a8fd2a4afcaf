"""The engines' settings."""

import math

import pytest

from engines.options import EngineOptions


def test_the_defaults_are_valid() -> None:
    EngineOptions()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_threads", 0),
        ("max_context", 0),
        ("cache_gib", 0.0),
        ("cache_gib", -1.0),
        ("cache_gib", math.nan),
        ("cache_gib", math.inf),
        ("memory_share", 0.0),
        ("memory_share", 1.1),
        ("memory_share", math.nan),
        ("cache_folder_gib", -0.1),
        ("cache_folder_gib", math.nan),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be"):
        EngineOptions(**{field: value})  # type: ignore[arg-type]
