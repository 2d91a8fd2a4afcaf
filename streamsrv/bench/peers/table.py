"""The table of what was compared, and the same as JSON."""

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq

from streamsrv.bench.peers.figures import Figures
from streamsrv.bench.peers.rounds import OURS, Results
from streamsrv.bench.suite.markdown import median_and_range

_NOTHING = "-"
_HEADINGS = (
    *("streams", "server", "precision", "tokens/s", "ratio", "decode tokens/s", "ratio"),
    *("first token p50, ms", "ratio", "inter-token p99, ms", "ratio", "same first token, %"),
)

_Measure = Callable[[Figures], float | None]
_MEASURES: tuple[tuple[_Measure, Callable[[float], str]], ...] = (
    (lambda figures: figures.tokens_per_s, lambda rate: f"{rate:.0f}"),
    (lambda figures: figures.decode_tokens_per_s, lambda rate: f"{rate:.0f}"),
    (lambda figures: figures.first_token_p50_s, lambda seconds: f"{1000 * seconds:.0f}"),
    (lambda figures: figures.inter_token_p99_s, lambda seconds: f"{1000 * seconds:.1f}"),
)


def peers_table(results: Results, precisions: dict[str, str], batches: Seq[int]) -> str:
    """Lay out a row for each number of streams and contestant, and one for each that could not be measured.

    A ratio is ours divided by the peer's, of each round: the median, with the least and the greatest.
    """
    rows: list[list[str]] = []
    for batch in batches:
        by_name = results.figures.get(batch, {})
        for name, precision in precisions.items():
            if not by_name.get(name):
                reason = results.failures.get(name) or results.failed_at.get(batch, {}).get(name, "")
                rows.append(
                    [str(batch), name, precision, _cell(f"not measured: {reason}"), *([_NOTHING] * 8)]
                )
                continue
            cells = [
                text
                for value, show in _MEASURES
                for text in _value_and_ratio(by_name[OURS], by_name[name], value, show, name == OURS)
            ]
            equal = statistics.mean(results.equal_firsts[batch][name])
            rows.append([str(batch), name, precision, *cells, f"{100 * equal:.0f}"])
    rule = [*(["---"] * 3), *(["--:"] * (len(_HEADINGS) - 3))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (_HEADINGS, rule, *rows))


def peers_json(results: Results, precisions: dict[str, str]) -> dict[str, object]:
    """Give every round's numbers, in seconds and tokens/s."""
    names = ("tokens_per_s", "decode_tokens_per_s", "first_token_p50_s", "inter_token_p99_s")
    runs = [
        {
            "streams": batch,
            "server": name,
            "precision": precisions[name],
            "round": number,
            **{key: getattr(figures, key) for key in names},
            "same_first_token": results.equal_firsts[batch][name][number],
        }
        for batch, by_name in results.figures.items()
        for name, rounds in by_name.items()
        for number, figures in enumerate(rounds)
    ]
    return {
        "runs": runs,
        "not_started": results.failures,
        "failed_with_streams": results.failed_at,
        "idle_cpu": results.idle_cpu,
    }


def _value_and_ratio(
    ours: Seq[Figures], theirs: Seq[Figures], value: _Measure, show: Callable[[float], str], is_ours: bool
) -> tuple[str, str]:
    values = [value(figures) for figures in theirs]
    known = [each for each in values if each is not None]
    if not known:
        return _NOTHING, _NOTHING
    # A peer that failed in a later round has fewer of them.
    pairs = [(value(a), b) for a, b in zip(ours, values, strict=False)]
    ratios = [a / b for a, b in pairs if a is not None and b]
    ratio = "1" if is_ours else median_and_range(ratios) if ratios else _NOTHING
    return show(statistics.median(known)), ratio


def _cell(text: str) -> str:
    """Keep a message from ending the cell or the row."""
    return " ".join(text.replace("|", "\\|").split())
