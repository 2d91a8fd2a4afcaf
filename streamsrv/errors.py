"""What the server can refuse or fail with. No grpc in here: `service` maps each class to a status."""

from collections.abc import Mapping
from dataclasses import dataclass

from engines.api import StreamsrvError


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request."""

    field: str
    """Path in the request message, such as "sampling.top_p"."""
    description: str
    """What was given, what is allowed."""


class SettingsError(StreamsrvError):
    """A flag, variable or file setting is wrong; the message names where it came from."""

    reason = "SETTINGS_INVALID"


class InvalidRequestError(StreamsrvError):
    """A request has bad fields. Never raised past the edge: a parsed request is valid."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class MalformedRequestError(StreamsrvError):
    """The bytes of a request are no message of the contract."""

    reason = "MALFORMED_REQUEST"


class UnauthenticatedError(StreamsrvError):
    """A call without a key that is let in."""

    reason = "UNAUTHENTICATED"


class PromptTooLongError(InvalidRequestError):
    """A prompt, or a prompt and its output together, do not fit in the context."""

    reason = "PROMPT_TOO_LONG"


class ModelNotFoundError(StreamsrvError):
    """A request names a model that is not served."""

    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, served: tuple[str, ...], *, names: str = "served") -> None:
        """`served` are those that there are; `names` says what they are."""
        super().__init__(f"no model {model!r} here; {names}: {', '.join(served) or 'none at this moment'}")
        self.model = model
        self.served = served


class ModelLoadError(StreamsrvError):
    """A model of the folder cannot be loaded; those that are served are not touched."""

    reason = "MODEL_LOAD_FAILED"

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(f"the model {model!r} cannot be loaded: {cause}")
        self.model = model
        self.cause = cause


class RequestIdInUseError(StreamsrvError):
    """A request id is that of a stream which still lives."""

    reason = "REQUEST_ID_IN_USE"

    def __init__(self, request_id: str, stream_id: str) -> None:
        super().__init__(
            f"request id {request_id!r} belongs to stream {stream_id}, which has not ended; "
            "cancel that stream or choose another id"
        )
        self.request_id = request_id
        self.stream_id = stream_id


class OverloadedError(StreamsrvError):
    """A bound on what may wait, or be kept, is reached."""

    reason = "OVERLOADED"

    def __init__(self, what: str, used: int, limit: int, *, subject: str, retry_after_s: float) -> None:
        """`what` is counted by `used` and `limit`; `subject` is the bounded party, for QuotaFailure."""
        super().__init__(f"{used} {what} and {limit} may; try again in {retry_after_s:g} s")
        self.used = used
        self.limit = limit
        self.subject = subject
        self.retry_after_s = retry_after_s


class TooManyWaitingError(OverloadedError):
    """Too many requests, or too many tokens of prompts, wait already."""

    reason = "TOO_MANY_WAITING"


class CallerShareUsedError(OverloadedError):
    """Too many of one caller's requests wait already."""

    reason = "CALLER_SHARE_USED"


class LogMemoryFullError(OverloadedError):
    """The streams that can still be read fill the memory that they may."""

    reason = "LOG_MEMORY_FULL"


class DrainingError(StreamsrvError):
    """The server is stopping and takes no new requests."""

    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the server is stopping; send the request to another, or again in a moment")


class StoppedError(StreamsrvError):
    """The server stopped before the stream had ended."""

    reason = "SERVER_STOPPED"

    def __init__(self) -> None:
        super().__init__("the server stopped before the output was complete; send the request again")


class WorkerLostError(StreamsrvError):
    """The worker that ran the request failed; its streams are lost."""

    reason = "WORKER_LOST"

    def __init__(self, cause: str) -> None:
        super().__init__(f"the worker failed in mid-stream ({cause}); send the request again")
        self.cause = cause


class DeadlinePassedError(StreamsrvError):
    """The request's deadline came before its output was complete."""

    reason = "DEADLINE_PASSED"

    def __init__(self, *, started: bool) -> None:
        state = "its output was complete" if started else "it could start"
        super().__init__(f"the request's deadline passed before {state}; allow more time or fewer tokens")


class StreamNotFoundError(StreamsrvError):
    """This server never had a stream of this name, or the caller may not read it."""

    reason = "STREAM_NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no stream {name!r} that this call may read; check id and resume_token")


class StreamExpiredError(StreamsrvError):
    """The stream was here; its resume window is over, or it never had one."""

    reason = "STREAM_EXPIRED"

    def __init__(self, stream_id: str) -> None:
        super().__init__(
            f"stream {stream_id} can no longer be read: its resume window is over; send the request again, "
            "with the text received so far as part of the prompt to go on from there"
        )
        self.stream_id = stream_id


class StreamElsewhereError(StreamsrvError):
    """The stream's id was given by another server instance."""

    reason = "STREAM_OF_ANOTHER_INSTANCE"

    def __init__(self, stream_id: str, instance_id: str) -> None:
        super().__init__(
            f"stream {stream_id} belongs to another server instance, this one is {instance_id}: ask that one "
            "or send the request again with the text received so far as part of the prompt"
        )
        self.stream_id = stream_id
        self.instance_id = instance_id


class PositionEvictedError(StreamsrvError):
    """The log holds this position no longer."""

    reason = "POSITION_EVICTED"

    def __init__(self, position: int, oldest_position: int) -> None:
        super().__init__(
            f"position {position} is no longer held, the oldest is {oldest_position}; resume from there if "
            "what lies between was received"
        )
        self.position = position
        self.oldest_position = oldest_position


class PositionInFutureError(StreamsrvError):
    """The stream has not got to this position."""

    reason = "POSITION_IN_FUTURE"

    def __init__(self, position: int, oldest_position: int, next_position: int) -> None:
        super().__init__(
            f"position {position} is not there yet; the stream holds {oldest_position} and up, and goes on "
            f"at {next_position}"
        )
        self.position = position
        self.oldest_position = oldest_position
        self.next_position = next_position


class ReaderReplacedError(StreamsrvError):
    """Another call resumed the stream that this one was reading."""

    reason = "READER_REPLACED"

    def __init__(self) -> None:
        super().__init__("another call has taken this stream over with Resume; read it there")


class ConsumerStalledError(StreamsrvError):
    """The reader took nothing for too long."""

    reason = "CONSUMER_STALLED"

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the client took nothing for {limit_s:g} s; read faster, or resume within the window if one was "
            "granted"
        )
        self.limit_s = limit_s


class CallFailedError(StreamsrvError):
    """A client's view: a call ended with a status that is not OK."""

    reason = "CALL_FAILED"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        server_reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.message = message
        self.code = code
        """The status code's name, such as "UNAVAILABLE"."""
        self.server_reason = server_reason
        """`google.rpc.ErrorInfo.reason`; empty where the server did not get to say it."""
        self.metadata = dict(metadata or {})
        """`google.rpc.ErrorInfo.metadata`, such as the `stream_id` that has a request id already."""
        self.violations = violations
        self.retry_after_s = retry_after_s
        """How long the server asks to wait before trying again, in seconds."""


class StreamIncompleteError(CallFailedError):
    """A client's view: a stream ended before its output was complete, and cannot be resumed.

    It has the code, the reason and the rest of the status that ended it, and what was received until then.
    """

    reason = "STREAM_INCOMPLETE"

    def __init__(
        self,
        cause: CallFailedError,
        *,
        stream_id: str,
        position: int,
        outputs: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        super().__init__(
            cause.code,
            f"{cause.message} (stream {stream_id}, received up to position {position})",
            server_reason=cause.server_reason,
            metadata=cause.metadata,
            violations=cause.violations,
            retry_after_s=cause.retry_after_s,
        )
        self.stream_id = stream_id
        self.position = position
        """The first position that was not received."""
        self.outputs = outputs
        """The text and the tokens of each output up to there."""
        self.text, self.token_ids = outputs[0]
        """The first output's, up to there: prompt and tokens, as ids, are the prompt to go on from."""


class StreamCorruptError(StreamsrvError):
    """A client's view: a stream broke the contract (a gap, a repetition, a message out of bounds)."""

    reason = "STREAM_CORRUPT"
