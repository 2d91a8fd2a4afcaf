"""A call that streams, as those see it who log, count or trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from engines.api import StreamsrvError
from streamsrv.request import GenerateRequest
from streamsrv.stream import Caller, Stream

DISCONNECTED = "DISCONNECTED"
"""The reason of a call that ended because its client had gone."""


class CallKind(Enum):
    """What was called."""

    GENERATE = "Generate"
    RESUME = "Resume"


@dataclass(slots=True)
class Call:
    """One call of Generate or Resume: what is known of it so far.

    Times are on the pools' clock, in seconds.
    """

    kind: CallKind
    caller: Caller
    arrived_s: float
    request_id: str = ""
    """As the caller gave it, unchecked."""
    is_chat: bool = False
    """The prompt is a conversation."""
    prompt: str = ""
    """The prompt's text, only where it shall be logged."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """The caller's W3C trace context, as it came."""
    model: str = ""
    """A name that is served; empty until the request has named one."""
    request: GenerateRequest | None = None
    position: int = 0
    """Where in the stream the call begins."""
    stream: Stream | None = None
    """Set when the call was let in."""
    reason: str = ""
    """Why it ended: a finish reason's name, an error's reason, or DISCONNECTED."""
    error: StreamsrvError | None = None
    """What it ended with, where that is a status other than OK."""
    ended_s: float = 0.0


class CallObserver(Protocol):
    """Is told of calls, on the loop's thread. Its methods must be quick, and must not raise."""

    def call_accepted(self, call: Call) -> None:
        """A call was let in: it has a stream and reads it."""
        ...

    def call_ended(self, call: Call) -> None:
        """A call has ended, whether it was let in or refused."""
        ...
