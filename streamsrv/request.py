"""What a caller asked for: valid by construction, so that nothing later has to check again."""

import math
from dataclasses import InitVar, dataclass, field
from enum import Enum

from streamsrv.errors import FieldViolation, InvalidRequestError

MAX_REQUEST_ID_BYTES = 128
RESUME_TOKEN_BYTES = 16
MAX_CHUNK_INTERVAL_S = 10.0


class Codec(Enum):
    """How events are encoded on the wire."""

    PLAIN = "plain"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a server allows in one request, where that is a matter of cost and not of sense."""

    max_stop_strings: int = 16
    max_stop_bytes: int = 256
    """Of one stop text, in UTF-8."""
    max_stop_token_ids: int = 256


def _require(ok: bool, name: str, description: str) -> None:
    if not ok:
        raise InvalidRequestError(FieldViolation(name, description))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. In order: temperature, top_k, top_p, min_p, then one draw.

    Raises:
        InvalidRequestError: a value is out of its range; the field is named as in the request message.

    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keeps the k best; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of best tokens whose probabilities reach it."""
    min_p: float = 0.0
    """Keeps tokens at least this fraction as probable as the best."""
    seed: int | None = None
    """Of the output's own generator; None draws one."""

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
            "sampling.temperature",
            f"must be from 0 (greedy) to 100, got {self.temperature:g}",
        )
        _require(self.top_k >= 0, "sampling.top_k", f"must be 0 (off) or more, got {self.top_k}")
        _require(
            0 < self.top_p <= 1, "sampling.top_p", f"must be above 0 and at most 1 (off), got {self.top_p:g}"
        )
        _require(0 <= self.min_p <= 1, "sampling.min_p", f"must be from 0 (off) to 1, got {self.min_p:g}")
        _require(
            self.seed is None or 0 <= self.seed < 2**64,
            "sampling.seed",
            f"must fit in 64 bits, got {self.seed}",
        )

    @property
    def is_greedy(self) -> bool:
        """The best token is taken, nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When an output ends. `limits` are those of the server.

    Raises:
        InvalidRequestError: a value is out of its range; the field is named as in the request message.

    """

    max_tokens: int | None = None
    """Most tokens to generate; None for what the context leaves."""
    min_tokens: int = 0
    """Tokens before an end-of-text token or a stop may come."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    limits: InitVar[RequestLimits] = RequestLimits()

    def __post_init__(self, limits: RequestLimits) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "stop.max_tokens",
            f"must be at least 1, got {self.max_tokens}; leave it out for as many as fit",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "stop.min_tokens",
            f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require(
            len(self.stop) <= limits.max_stop_strings,
            "stop.stop",
            f"at most {limits.max_stop_strings} texts are allowed, got {len(self.stop)}",
        )
        for i, text in enumerate(self.stop):
            size = len(text.encode())
            _require(
                1 <= size <= limits.max_stop_bytes,
                f"stop.stop[{i}]",
                f"must have 1 to {limits.max_stop_bytes} bytes, got {size}",
            )
        _require(
            len(self.stop_token_ids) <= limits.max_stop_token_ids,
            "stop.stop_token_ids",
            f"at most {limits.max_stop_token_ids} ids are allowed, got {len(self.stop_token_ids)}",
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the stream carries."""

    text: bool = True
    token_ids: bool = True
    text_lengths: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a call's stream is cut and encoded.

    Raises:
        InvalidRequestError: a value is out of its range; the field is named as in the request message.

    """

    codec: Codec = Codec.PLAIN
    max_tokens_per_chunk: int | None = None
    """None: whatever is ready goes out together."""
    min_chunk_interval_s: float | None = None
    """Least time between two messages with tokens, in seconds; None leaves it to the server."""
    resume_window_s: float = 0.0
    """How long the stream shall outlive its reader, in seconds; the server grants what it allows."""

    def __post_init__(self) -> None:
        _require(
            self.max_tokens_per_chunk is None or self.max_tokens_per_chunk >= 1,
            "stream.max_tokens_per_chunk",
            f"must be at least 1, got {self.max_tokens_per_chunk}; leave it out for no bound",
        )
        interval_s = self.min_chunk_interval_s or 0.0
        _require(
            0 <= interval_s <= MAX_CHUNK_INTERVAL_S,
            "stream.min_chunk_interval_ms",
            f"must be at most {MAX_CHUNK_INTERVAL_S * 1000:.0f}, got {interval_s * 1000:.0f}",
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, parsed: a prompt as token ids, and what to do with it.

    Raises:
        InvalidRequestError: the id is too long or the prompt is empty.

    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions = field(default_factory=StopConditions)
    output: OutputOptions = field(default_factory=OutputOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)
    continues_text: bool = False
    """The output goes on from a text, so that a space before its first word stays; a turn begins anew."""
    deadline_s: float | None = None
    """When the answer is of no use any more, on the server's monotonic clock in seconds."""
    resume_token: bytes = field(default=b"", repr=False)
    """The client's secret for resuming; empty: it chose none."""

    def __post_init__(self) -> None:
        size = len(self.request_id.encode())
        _require(
            size <= MAX_REQUEST_ID_BYTES,
            "request_id",
            f"must have at most {MAX_REQUEST_ID_BYTES} bytes, got {size}",
        )
        _require(
            len(self.prompt_token_ids) > 0,
            "prompt",
            "must have at least one token; give some text, ids or messages",
        )
        _require(
            len(self.resume_token) in (0, RESUME_TOKEN_BYTES),
            "resume_token",
            f"must have {RESUME_TOKEN_BYTES} bytes, got {len(self.resume_token)}; leave it out for one made "
            "by the server",
        )
