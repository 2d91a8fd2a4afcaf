import random
import statistics

import numpy as np
import pytest

from streamsrv.bench.lengths import Fixed, Lengths, LogNormal, Uniform, parse_lengths
from streamsrv.errors import SettingsError


def drawn(lengths: Lengths, count: int) -> list[int]:
    generator = random.Random(1)
    return [lengths.draw(generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("200", Fixed(200)),
        ("50-400", Uniform(50, 400)),
        ("7-7", Uniform(7, 7)),
        ("lognormal:200:0.6", LogNormal(200, 0.6)),
        ("lognormal:200:0.6:16-2000", LogNormal(200, 0.6, 16, 2000)),
    ],
)
def test_each_form_is_read_and_shown_as_it_was_written(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--flag") == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--flag is ; it must be one number"),
        ("-1", "--flag is -1; it must be one number"),
        ("0", "a length must be a whole number from 1 to"),
        ("0-9", "a length must be a whole number from 1 to"),
        ("4294967296", "a length must be a whole number from 1 to 4294967295"),
        ("9-3", "must not be above the second"),
        ("1.5", "it must be one number"),
        ("normal:200:0.6", "it must be one number"),
        ("lognormal:200", "it must be one number"),
        ("lognormal:200:x", "its sigma must be a number from 0 to 10"),
        ("lognormal:200:nan", "its sigma must be a number from 0 to 10"),
        ("lognormal:200:0.6:16", "its range must be as 16-2000 is"),
        ("lognormal:200:0.6:20-16", "must not be above the second"),
    ],
)
def test_other_forms_are_refused_with_those_that_are_allowed(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_lengths(text, "--flag")
    assert sentence in str(error.value)


def test_a_range_is_drawn_whole_and_evenly() -> None:
    counts = np.bincount(drawn(Uniform(5, 14), 20_000), minlength=15)
    assert counts[:5].sum() == 0
    assert counts[5:].sum() == 20_000
    assert np.all(np.abs(counts[5:] - 2_000) < 5 * np.sqrt(2_000))


def test_a_lognormal_has_its_median_and_its_spread() -> None:
    values = drawn(LogNormal(200, 0.6), 20_000)
    assert statistics.median(values) == pytest.approx(200, rel=0.03)
    logarithms = np.log(values)
    assert float(np.std(logarithms)) == pytest.approx(0.6, rel=0.03)
    assert float(np.percentile(values, 84.13)) == pytest.approx(200 * np.exp(0.6), rel=0.04)


def test_a_lognormal_stays_within_its_bounds() -> None:
    values = drawn(LogNormal(200, 2.0, 100, 300), 1_000)
    assert (min(values), max(values)) == (100, 300)
    assert min(drawn(LogNormal(1, 10.0), 1_000)) == 1
    assert max(drawn(LogNormal(4_000_000_000, 10.0), 1_000)) == 2**32 - 1


def test_a_lognormal_without_spread_is_its_median() -> None:
    assert set(drawn(LogNormal(37, 0.0), 10)) == {37}


def test_lengths_keep_to_what_a_flag_allows() -> None:
    lengths = parse_lengths("lognormal:90:5", "--prompt-tokens", 100)
    assert max(drawn(lengths, 1_000)) == 100
    for text in ("101", "1-101", "lognormal:101:1", "lognormal:9:1:1-101", 5_000 * "9"):
        with pytest.raises(SettingsError, match="a length must be a whole number from 1 to 100"):
            parse_lengths(text, "--prompt-tokens", 100)
