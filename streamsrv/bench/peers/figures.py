"""What a run of several streams brought, and in how much time."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from streamsrv.bench.percentiles import percentiles


@dataclass(frozen=True, slots=True)
class PeerStream:
    """One stream: its tokens, and when they came, in seconds from the beginning of the run."""

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    """(when, how many tokens), in the order of time."""

    @property
    def first_s(self) -> float:
        """When its first token came."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """When its last token came."""
        return self.arrivals[-1][0]


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers."""

    tokens_per_s: float
    """Output tokens of all streams, from the first request to the last token."""
    decode_tokens_per_s: float | None
    """While every stream had its first token and none had its last; None if there was no such time."""
    first_token_p50_s: float
    inter_token_p99_s: float | None
    """Of the times between two tokens of a stream; None if no stream has two."""

    @classmethod
    def of(cls, streams: Seq[PeerStream]) -> "Figures":
        """Count the streams of one run; each has a token."""
        num_tokens = sum(len(stream.token_ids) for stream in streams)
        gaps = [gap for stream in streams for gap in _gaps(stream)]
        return cls(
            tokens_per_s=num_tokens / max(stream.last_s for stream in streams),
            decode_tokens_per_s=_decode_rate(streams),
            first_token_p50_s=percentiles([stream.first_s for stream in streams], (50,))[0],
            inter_token_p99_s=percentiles(gaps, (99,))[0] if gaps else None,
        )


def _gaps(stream: PeerStream) -> list[float]:
    """List the times before each token but the first.

    Tokens of one message came together: the first of them waited for all the time since the message before,
    the others for none. So nobody gains by sending more at a time.
    """
    gaps: list[float] = []
    before_s = None
    for at_s, num_tokens in stream.arrivals:
        if before_s is not None:
            gaps.append(at_s - before_s)
        gaps += [0.0] * (num_tokens - 1)
        before_s = at_s
    return gaps


def _decode_rate(streams: Seq[PeerStream]) -> float | None:
    begin_s = max(stream.first_s for stream in streams)
    end_s = min(stream.last_s for stream in streams)
    if end_s <= begin_s:
        return None
    arrivals = (arrival for stream in streams for arrival in stream.arrivals)
    return sum(num for at_s, num in arrivals if begin_s < at_s <= end_s) / (end_s - begin_s)
