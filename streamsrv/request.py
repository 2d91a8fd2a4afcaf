"""What a caller asked for: valid by construction, so that nothing later has to check again."""

import math
from dataclasses import InitVar, dataclass, field
from enum import Enum

from streamsrv.chat import Tool
from streamsrv.constraint.spec import ConstraintSpec
from streamsrv.errors import FieldViolation, InvalidRequestError
from streamsrv.tool_call_format import ToolCallFormat

MAX_REQUEST_ID_BYTES = 128
RESUME_TOKEN_BYTES = 16
MAX_CHUNK_INTERVAL_S = 10.0
MAX_CACHE_SALT_BYTES = 128


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
    max_outputs: int = 16
    """Outputs of one request."""
    max_top_logprobs: int = 20
    """Tokens that can be asked for beside each one."""
    max_logit_biases: int = 1024
    """Biases, banned tokens and allowed tokens, each."""
    max_constraint_bytes: int = 65536
    """Of a schema, a regular expression, a grammar or all choices, in UTF-8."""


def _require(ok: bool, name: str, description: str) -> None:
    if not ok:
        raise InvalidRequestError(FieldViolation(name, description))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen.

    In order: logit_bias, repetition_penalty, presence and frequency penalties, banned and allowed tokens and
    what a constraint allows, temperature, top_k, top_p, min_p, typical_p, then one draw. `limits` are those
    of the server.

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
    """Of the outputs' own generators; None draws one."""
    typical_p: float = 1.0
    """Keeps the tokens whose surprise is closest to the expected one until their probabilities reach it."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or the output, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Is taken from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Is taken from a token's logit as often as the token is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """What is added to single tokens' logits."""
    banned_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: frozenset[int] = frozenset()
    """The only ones that may be chosen; empty allows all."""
    limits: InitVar[RequestLimits] = RequestLimits()

    def __post_init__(self, limits: RequestLimits) -> None:
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
        _require(
            0 < self.typical_p <= 1,
            "sampling.typical_p",
            f"must be above 0 and at most 1 (off), got {self.typical_p:g}",
        )
        _require(
            0 < self.repetition_penalty <= 100,
            "sampling.repetition_penalty",
            f"must be above 0 and at most 100; 1 is off; got {self.repetition_penalty:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                -100 <= value <= 100, f"sampling.{name}", f"must be from -100 to 100; 0 is off; got {value:g}"
            )
        for name in ("logit_bias", "banned_token_ids", "allowed_token_ids"):
            size = len(getattr(self, name))
            _require(
                size <= limits.max_logit_biases,
                f"sampling.{name}",
                f"at most {limits.max_logit_biases} tokens are allowed, got {size}",
            )
        seen: set[int] = set()
        for i, (token_id, bias) in enumerate(self.logit_bias):
            _require(
                token_id not in seen, f"sampling.logit_bias[{i}]", f"token {token_id} has a bias already"
            )
            seen.add(token_id)
            _require(
                -1000 <= bias <= 1000,
                f"sampling.logit_bias[{i}].bias",
                f"must be from -1000 to 1000, got {bias:g}",
            )
        _require(
            not self.allowed_token_ids or bool(self.allowed_token_ids - self.banned_token_ids),
            "sampling.allowed_token_ids",
            "every allowed token is banned, too",
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
    logprobs: bool = False
    """Each token's log probability, before any change by SamplingParams."""
    num_top_logprobs: int = 0
    """The most probable tokens at each place, too."""
    prompt_logprobs: bool = False
    """The prompt's tokens with theirs."""
    echo: bool = False
    """The prompt's tokens and text."""
    limits: InitVar[RequestLimits] = RequestLimits()

    def __post_init__(self, limits: RequestLimits) -> None:
        """Check the number."""
        _require(
            self.num_top_logprobs <= limits.max_top_logprobs,
            "output.num_top_logprobs",
            f"must be at most {limits.max_top_logprobs}, got {self.num_top_logprobs}",
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether anything about the outputs' probabilities is wanted."""
        return self.logprobs or self.num_top_logprobs > 0


@dataclass(frozen=True, slots=True)
class ToolParsing:
    """How calls of tools are found in a request's outputs."""

    format: ToolCallFormat
    tools: tuple[Tool, ...]
    num_earlier_calls: int = 0
    """In the conversation so far: ids go on from there."""
    in_thought: bool = False
    """The prompt has begun a thought, in which calls are only thought of."""


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """When a request is computed, and what it may reuse.

    Raises:
        InvalidRequestError: a value is out of its range; the field is named as in the request message.

    """

    priority: int = 0
    """The higher first, where not all can be computed."""
    use_prefix_cache: bool = True
    cache_salt: str = ""
    """Only requests of equal salt share what they computed."""
    prompt_lookup: bool = True

    def __post_init__(self) -> None:
        _require(
            -100 <= self.priority <= 100,
            "scheduling.priority",
            f"must be from -100 to 100, got {self.priority}",
        )
        size = len(self.cache_salt.encode())
        _require(
            size <= MAX_CACHE_SALT_BYTES,
            "scheduling.cache_salt",
            f"must have at most {MAX_CACHE_SALT_BYTES} bytes, got {size}",
        )


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
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    num_outputs: int = 1
    constraint: ConstraintSpec | None = None
    """What every output must match."""
    tool_parsing: ToolParsing | None = None
    """How calls of tools are found in the outputs; None leaves their text as it is."""
    continues_text: bool = False
    """The output goes on from a text, so that a space before its first word stays; a turn begins anew."""
    deadline_s: float | None = None
    """When the answer is of no use any more, on the server's monotonic clock in seconds."""
    resume_token: bytes = field(default=b"", repr=False)
    """The client's secret for resuming; empty: it chose none."""
    limits: InitVar[RequestLimits] = RequestLimits()

    def __post_init__(self, limits: RequestLimits) -> None:
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
        if self.constraint is not None:
            stop = self.stop
            for name, is_given in (
                ("min_tokens", stop.min_tokens > 0),
                ("stop", bool(stop.stop)),
                ("stop_token_ids", bool(stop.stop_token_ids)),
                ("ignore_eos", stop.ignore_eos),
            ):
                _require(
                    not is_given,
                    f"stop.{name}",
                    "cannot be combined with a constraint, which alone says where an output may end",
                )
        _require(
            1 <= self.num_outputs <= limits.max_outputs,
            "num_outputs",
            f"must be from 1 to {limits.max_outputs}, got {self.num_outputs}",
        )
        _require(
            len(self.resume_token) in (0, RESUME_TOKEN_BYTES),
            "resume_token",
            f"must have {RESUME_TOKEN_BYTES} bytes, got {len(self.resume_token)}; leave it out for one made "
            "by the server",
        )
