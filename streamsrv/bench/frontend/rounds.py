"""Interleaved rounds."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from streamsrv.bench.frontend.rig import Rig
from streamsrv.bench.frontend.sample import Sample
from streamsrv.bench.frontend.variant import Variant

Samples = dict[Variant, list[Sample]]

# Enough requests that a run takes a second or more: the kernel counts processor time in hundredths.
_LEAST_REQUESTS = 256
_LEAST_OF_A_STREAM = 64
_WARM_UP_REQUESTS = 64


def num_requests_of(num_streams: int, *, quick: bool) -> int:
    """How many requests a run sends: all streams equally often, twice at least."""
    least = max(min(_LEAST_REQUESTS, _LEAST_OF_A_STREAM * num_streams), 2 * num_streams) // (
        2 if quick else 1
    )
    return max(1, least // num_streams) * num_streams


async def measure_rounds(
    rig: Rig,
    variants: Seq[Variant],
    num_streams: int,
    num_rounds: int,
    say: Callable[[str], None],
    *,
    quick: bool,
) -> Samples:
    """Run every variant once a round, every other round backwards.

    Raises:
        BenchError: a request failed.
    """
    samples: Samples = {variant: [] for variant in variants}
    num_requests = num_requests_of(num_streams, quick=quick)
    for round_ in range(num_rounds):
        for variant in variants if round_ % 2 == 0 else reversed(variants):
            if not samples[variant]:
                await rig.run(variant, num_streams, min(num_requests, max(num_streams, _WARM_UP_REQUESTS)))
            sample = await rig.run(variant, num_streams, num_requests)
            samples[variant].append(sample)
            say(
                f"{num_streams} streams, round {round_ + 1} of {num_rounds}: {variant.label}, "
                f"{variant.merging} a message: {sample.messages_per_s:,.0f} messages/s, "
                f"{sample.tokens_per_core_s:,.0f} tokens/s a core"
            )
    return samples
