import math

import pytest

from streamsrv.errors import InvalidRequestError
from streamsrv.request import GenerateRequest, RequestLimits, SamplingParams, StopConditions, StreamOptions


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"min_p": -0.5}, "sampling.min_p"),
        ({"min_p": math.nan}, "sampling.min_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(values: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("conditions", "field"),
    [
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "stop.min_tokens"),
        ({"stop": ("a", "")}, "stop.stop[1]"),
        ({"stop": ("é" * 129,)}, "stop.stop[0]"),
        ({"stop": ("a",) * 17}, "stop.stop"),
        ({"stop_token_ids": frozenset(range(257))}, "stop.stop_token_ids"),
    ],
)
def test_a_stop_condition_out_of_range_is_refused_by_name(conditions: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopConditions(**conditions)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == [field]


def test_the_bounds_on_stops_are_those_of_the_server() -> None:
    limits = RequestLimits(max_stop_strings=1, max_stop_bytes=2, max_stop_token_ids=0)
    StopConditions(stop=("ab",), limits=limits)
    for conditions, said in (
        ({"stop": ("a", "b")}, "at most 1 texts are allowed, got 2"),
        ({"stop": ("abc",)}, "must have 1 to 2 bytes, got 3"),
        ({"stop_token_ids": frozenset([1])}, "at most 0 ids are allowed, got 1"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            StopConditions(**conditions, limits=limits)
    wide = RequestLimits(max_stop_strings=99, max_stop_bytes=999, max_stop_token_ids=999)
    StopConditions(stop=("a" * 999,) * 99, stop_token_ids=frozenset(range(999)), limits=wide)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens_per_chunk": 0}, "stream.max_tokens_per_chunk"),
        ({"min_chunk_interval_s": 10.5}, "stream.min_chunk_interval_ms"),
    ],
)
def test_a_stream_option_out_of_range_is_refused_by_name(options: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StreamOptions(**options)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == [field]


def test_an_empty_prompt_and_a_long_id_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        GenerateRequest("r", ())
    with pytest.raises(InvalidRequestError, match="request_id"):
        GenerateRequest("ß" * 65, (1,))
    GenerateRequest("ß" * 64, (1,))
