"""Whether what a contestant says makes sense, before its speed is counted."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.figures import PeerStream
from streamsrv.bench.peers.peer import Contestant

KNOWN = {
    "The capital of France is": " Paris",
    "The sun rises in the east and sets in the": " west",
    "A, B, C, D, E,": " F",
    "def add(a, b):\n    return a +": " b",
}
"""Prompts, and how the demo model goes on: it gives these at least 0.7, so that no rounding changes it."""


async def check_known(contestant: Contestant, tokenizer: Tokenizer, known: Mapping[str, str] = KNOWN) -> None:
    """Ask for what is known.

    Raises:
        BenchError: it goes on otherwise.
    """
    for prompt, expected in known.items():
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        (stream,) = await contestant.run([ids], 4)
        check_lengths([stream], 1, 4)
        text = tokenizer.decode(stream.token_ids)
        if not text.startswith(expected):
            raise BenchError(f"its output is not sane: after {prompt!r} came {text!r}, not {expected!r}")


def check_lengths(streams: Seq[PeerStream], num_streams: int, max_tokens: int) -> None:
    """Check that each stream has exactly the tokens asked for.

    Raises:
        BenchError: one has fewer or more, or they did not come as they were counted.
    """
    lengths = {len(stream.token_ids) for stream in streams}
    arrived = {sum(num for _, num in stream.arrivals) for stream in streams}
    if len(streams) != num_streams or lengths != {max_tokens} or arrived != {max_tokens}:
        raise BenchError(
            f"it gave {len(streams)} outputs of {_span(lengths)} tokens, "
            f"and {num_streams} of {max_tokens} were asked for"
        )


def share_of_equal_firsts(streams: Seq[PeerStream], ours: Seq[PeerStream]) -> float:
    """Count the prompts after which both begin with the same token, as a part of all."""
    equal = [a.token_ids[0] == b.token_ids[0] for a, b in zip(streams, ours, strict=True)]
    return sum(equal) / len(equal)


def _span(lengths: set[int]) -> str:
    if len(lengths) <= 1:
        return str(next(iter(lengths), 0))
    return f"{min(lengths)} to {max(lengths)}"
