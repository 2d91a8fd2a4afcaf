"""What the server can refuse or fail with. No grpc in here: `service` maps each class to a status."""

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


class PromptTooLongError(InvalidRequestError):
    """A prompt, or a prompt and its output together, do not fit in the context."""

    reason = "PROMPT_TOO_LONG"


class ModelNotFoundError(StreamsrvError):
    """A request names a model that is not served."""

    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(f"no model {model!r} here; served: {', '.join(served)}")
        self.model = model
        self.served = served


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
    """Too many requests wait already."""

    reason = "TOO_MANY_WAITING"

    def __init__(self, num_waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting and {limit} may; try again in {retry_after_s:g} s"
        )
        self.num_waiting = num_waiting
        self.limit = limit
        self.retry_after_s = retry_after_s


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
    """No stream has this id, or no longer."""

    reason = "STREAM_NOT_FOUND"


class NotSupportedError(StreamsrvError):
    """The call is declared but this version does not do it."""

    reason = "NOT_SUPPORTED"


class CallFailedError(StreamsrvError):
    """A client's view: a call ended with a status that is not OK."""

    reason = "CALL_FAILED"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        server_reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """The status code's name, such as "UNAVAILABLE"."""
        self.server_reason = server_reason
        """`google.rpc.ErrorInfo.reason`; empty where the server did not get to say it."""
        self.violations = violations
        self.retry_after_s = retry_after_s
        """How long the server asks to wait before trying again, in seconds."""


class StreamCorruptError(StreamsrvError):
    """A client's view: a stream broke the contract (a gap, a repetition, a message out of bounds)."""

    reason = "STREAM_CORRUPT"
