"""One line in the log for each call that streams."""

import logging

from streamsrv.call import Call, CallKind
from streamsrv.log_format import FieldValue, fields

log = logging.getLogger(__name__)

# An id that is too long is refused, and what is refused is logged, too.
_MAX_CHARACTERS = 128


class CallLog:
    """Writes a line at INFO when a call ends; a CallObserver. Outputs are never logged."""

    def call_accepted(self, call: Call) -> None:
        """Do nothing."""

    def call_ended(self, call: Call) -> None:
        """Write the line."""
        if log.isEnabledFor(logging.INFO):
            log.info(call.kind.value, extra=fields(_values(call)))


def _values(call: Call) -> dict[str, FieldValue]:
    stream = call.stream
    values: dict[str, FieldValue] = {
        "stream_id": stream.stream_id if stream else None,
        "request_id": _shortened(stream.request_id if stream else call.request_id) or None,
        "model": call.model or None,
        "caller": _shortened(call.caller.name),
        "prompt_tokens": stream.num_prompt_tokens if stream else None,
        "output_tokens": stream.num_output_tokens if stream else None,
        "reason": call.reason,
        "queue_time_s": None,
        "time_to_first_token_s": None,
        "duration_s": round(call.ended_s - call.arrived_s, 6),
    }
    if call.kind is CallKind.RESUME:
        values["position"] = call.position
    elif stream is not None:
        values["queue_time_s"] = _rounded(stream.progress.queue_time_s)
        values["time_to_first_token_s"] = _rounded(stream.progress.time_to_first_token_s)
    if call.prompt:
        values["prompt"] = call.prompt
    return values


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
