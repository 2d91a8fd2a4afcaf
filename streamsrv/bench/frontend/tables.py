"""The samples as tables, and held against the goals."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from streamsrv.bench.frontend.rounds import Samples
from streamsrv.bench.frontend.sample import Sample, Spread
from streamsrv.bench.frontend.variant import (
    BARE_EIGHT,
    BARE_ONE,
    EIGHT,
    ONE,
    PACED,
    READY,
    SIXTEEN,
    SSE_EIGHT,
    SSE_ONE,
    SSE_SIXTEEN,
    Variant,
)
from streamsrv.bench.suite.markdown import section

GOAL_STREAMS = 256
"""The number of streams that the goals are about."""


def spread_text(spread: Spread, form: str = ",.0f") -> str:
    """The median, with the least and the greatest behind it."""
    low, high = format(spread.least, form), format(spread.greatest, form)
    return f"**{spread.median:{form}}** ({low}-{high})"


def speed_section(measured: Mapping[int, Samples], text: str) -> str:
    """Lay out what every variant reached, by number of streams."""
    rows = []
    for num_streams, samples in measured.items():
        for variant, own in samples.items():
            if own:
                rows.append([f"{num_streams:,}", variant.label, variant.merging, *_cells(own)])
    return section(
        "Messages and tokens of one processor",
        text,
        (
            *("streams", "server", "tokens a message", "mean", "messages/s", "tokens/s"),
            *(
                "CPU us a message",
                "without the worker",
                "CPU us a token",
                "tokens/s a core",
                "wire bytes a token",
                "core busy",
            ),
        ),
        rows,
    )


def _cells(samples: Seq[Sample]) -> list[str]:
    def median(value: Callable[[Sample], float], form: str) -> str:
        return format(Spread.over(samples, value).median, form)

    return [
        median(lambda s: s.tokens_per_message, ".2f"),
        spread_text(Spread.over(samples, lambda s: s.messages_per_s)),
        median(lambda s: s.tokens_per_s, ",.0f"),
        median(lambda s: s.cpu_us_per_message, ".1f"),
        median(lambda s: s.front_us_per_message, ".1f"),
        median(lambda s: s.cpu_us_per_token, ".1f"),
        spread_text(Spread.over(samples, lambda s: s.tokens_per_core_s)),
        median(lambda s: s.bytes_per_token, ".1f"),
        median(lambda s: 100 * s.busy, ".0f") + "%",
    ]


def goal_section(samples: Samples, num_streams: int) -> str:
    """Hold the samples of one number of streams against the goals."""
    rows = []

    def ratio(what: str, above: Variant, below: Variant, value: Callable[[Sample], float], goal: str) -> None:
        if samples.get(above) and samples.get(below):
            spread = Spread.of_ratio(samples[above], samples[below], value)
            rows.append([what, spread_text(spread, ".2f"), goal])

    def share(what: str, own: Variant, floor: Variant, goal: str) -> None:
        of_floor = f"share of the bare handler's, {what}"
        ratio(f"messages/s, {of_floor}", own, floor, lambda s: s.messages_per_s, goal)
        ratio(
            f"messages a second of processor time, {of_floor}",
            own,
            floor,
            lambda s: s.messages_per_core_s,
            "",
        )
        ratio(f"the same without the worker's thread, {what}", own, floor, _inverse_front, "")

    share("one token a message", ONE, BARE_ONE, "at least 0.6")
    share("eight", EIGHT, BARE_EIGHT, "at least 0.5")
    for name, variant in (("eight", EIGHT), ("sixteen", SIXTEEN), ("ready", READY), ("each 50 ms", PACED)):
        if own := samples.get(variant):
            spread = Spread.over(own, lambda s: s.tokens_per_core_s)
            rows.append([f"tokens/s a core, {name}", spread_text(spread), "at least 100,000"])
            ratio(
                f"the same, as a multiple of SSE at one token an event, {name}",
                *(variant, SSE_ONE, lambda s: s.tokens_per_core_s, "at least 5"),
            )
    for name, variant, same, goal in (
        ("one token", ONE, SSE_ONE, "at least 5"),
        ("eight", EIGHT, SSE_EIGHT, "at least 15"),
        ("sixteen", SIXTEEN, SSE_SIXTEEN, "at least 20"),
    ):
        value = _inverse_bytes
        ratio(f"bytes of SSE at one token an event / ours at {name}", variant, SSE_ONE, value, goal)
        if same is not SSE_ONE:
            ratio(f"bytes of SSE at {name} an event / ours at {name}", variant, same, value, "")
    return section(
        f"Against the goals, {num_streams:,} streams",
        "Each ratio is taken within a round; the median of the rounds, with the least and the greatest.",
        ("what", "measured", "goal"),
        rows,
    )


def _inverse_front(sample: Sample) -> float:
    return 1 / sample.front_us_per_message


def _inverse_bytes(sample: Sample) -> float:
    return 1 / sample.bytes_per_token
