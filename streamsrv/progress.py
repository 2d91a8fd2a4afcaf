"""How far a request has come, and when."""

from dataclasses import dataclass

from engines.api import StreamsrvError
from streamsrv.sequence import Finish


@dataclass(slots=True)
class Progress:
    """When a request got where, in seconds on the worker's clock; None for what has not happened."""

    arrived_s: float
    """When its call reached the server."""
    started_s: float | None = None
    """When the first step that computed some of it began."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    """When its last token, its cancel or its fault was known; its stream may be read for longer."""
    num_output_tokens: int = 0
    """Tokens generated so far, over all outputs."""
    outcome: Finish | StreamsrvError | None = None
    """How it ended."""

    @property
    def queue_time_s(self) -> float | None:
        """How long it waited for its first step."""
        return None if self.started_s is None else self.started_s - self.arrived_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """How long its first token took."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def duration_s(self) -> float | None:
        """How long it took in all."""
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    @property
    def reason(self) -> str:
        """Why it ended: a finish reason's name, or an error's reason; empty while it has not."""
        return "" if self.outcome is None else reason_of(self.outcome)


def reason_of(outcome: Finish | StreamsrvError) -> str:
    """Name a way to end as the wire names it: FinishReason without its prefix, or ErrorInfo.reason."""
    return outcome.reason if isinstance(outcome, StreamsrvError) else outcome.reason.name
