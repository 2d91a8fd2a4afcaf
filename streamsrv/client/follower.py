"""Decides what the client of a generation does next. Messages, failures, times and chance come in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from streamsrv.chunks import ChunkDecoder
from streamsrv.client.chunk import Chunk
from streamsrv.client.output import Output, output_index_of
from streamsrv.errors import CallFailedError, StreamCorruptError, StreamIncompleteError
from streamsrv.v1 import inference_pb2 as pb

# What gRPC puts before each message.
_MESSAGE_PREFIX_BYTES = 5
# Waits double from the first to the longest; chance takes up to a half of each, so that the clients of a
# server that comes back do not all come at once.
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
# A connection that held for so long was a good one, whatever it brought.
_STEADY_S = 5.0
# What transports say of themselves, and also proxies between; the server gives a reason with each of its own.
_TRANSPORT_CODES = frozenset({"UNAVAILABLE", "INTERNAL", "CANCELLED"})
_NOT_THERE = frozenset({"STREAM_NOT_FOUND", "STREAM_EXPIRED"})
# The stream lives, but this client cannot read it.
_UNREADABLE = frozenset({"POSITION_EVICTED", "POSITION_IN_FUTURE"})
_TRY_AGAIN_CODES = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


@dataclass(frozen=True, slots=True)
class NextCall:
    """A call to make, after a wait."""

    request: pb.GenerateRequest | pb.ResumeRequest
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing can be done any more."""

    error: CallFailedError


class FollowState(Enum):
    """What is under way."""

    SENDING = "sending"
    """A Generate, of which nothing has come yet."""
    FINDING = "finding"
    """A Resume by request id: a Generate was lost before its first message, and may have arrived."""
    READING = "reading"
    """A call that has begun."""
    RESUMING = "resuming"
    """A Resume of a stream that was read before, of which nothing has come yet."""
    COMPLETE = "complete"
    FAILED = "failed"


class Follower:
    """Follows one generation over as many calls as it takes; holds what was received.

    One call at a time: `begin` says the first; each message of it goes to `received`, its end to `ended` or
    `failed`, and the latter says the next. A request is sent again only where the server refused it or, if
    nothing of it was received, does not know it (any more): see `num_resends`.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        max_retries: int,
        began_s: float,
        deadline_s: float | None,
        random: Callable[[], float],
    ) -> None:
        """`request` is as from `make_resumable`; its resume window, 0 for off, bounds each reconnection.

        `max_retries` bounds the calls after the first until there is a first message. `random` gives numbers
        from 0 to 1; times are in seconds of one clock.
        """
        self.state = FollowState.SENDING
        self.start: pb.StreamStart | None = None
        """The stream's first message."""
        self.stream_id = ""
        num_outputs = request.num_outputs if request.HasField("num_outputs") else 1
        self.outputs = [Output(index) for index in range(num_outputs)]
        self.prompt: list[pb.PromptTokens] = []
        """The prompt's pieces, where they were asked for."""
        self.usage: pb.Usage | None = None
        self.num_tokens = 0
        self.num_bytes = 0
        self.first_token_s: float | None = None
        self.num_resumes = 0
        self.num_resends = 0
        self._request = request
        self._window_s = request.stream.resume_window_ms / 1000
        self._max_retries = max_retries
        self._began_s = began_s
        self._deadline_s = deadline_s
        self._random = random
        self._decoder = ChunkDecoder(0)
        self._num_retries = 0
        self._num_lost = 0  # calls that were lost before their first message
        self._in_use: CallFailedError | None = None  # another stream, or ours, has the request's id
        self._lost_s: float | None = None  # since when nothing has come
        self._num_waits = 0
        self._connected_s = 0.0
        self._may_run = True
        self._num_strays = 0  # Resume calls that were given up, and may arrive yet

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self._request.request_id

    @property
    def position(self) -> int:
        """The first position that was not received."""
        return self._decoder.next_position or 0

    @property
    def text(self) -> str:
        """The first output's text so far."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first output's tokens so far."""
        return tuple(self.outputs[0].token_ids)

    @property
    def cancel_request(self) -> pb.CancelRequest | None:
        """What ends the generation on the server; None where closing the call does, or it has ended."""
        if not self._window_s or not self._may_run or self.usage is not None:
            return None
        if self.start is None:
            return pb.CancelRequest(request_id=self.request_id)
        return pb.CancelRequest(stream_id=self.stream_id)

    def remaining_s(self, now_s: float) -> float | None:
        """Time until the deadline; None where there is none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - now_s)

    def begin(self) -> NextCall:
        """The first call."""
        return NextCall(self._request)

    def received(self, message: pb.GenerateResponse, now_s: float) -> Chunk | None:
        """Take a message of the current call; what it tells, or None if that is nothing.

        Raises:
            StreamCorruptError: it breaks the contract.
        """
        num_bytes = message.ByteSize() + _MESSAGE_PREFIX_BYTES
        self.num_bytes += num_bytes
        if self.start is not None and message.stream_id != self.stream_id:
            raise StreamCorruptError(f"stream {self.stream_id} got a message of stream {message.stream_id}")
        position = self.position
        events = self._decoder.decode(message)
        if self.state is not FollowState.READING:
            self._call_begins(message, now_s)
            return None
        if not events.events:
            return None
        self._lost_s = None
        chunk = Chunk.of(position, tuple(events.events), num_bytes)
        self._take(chunk, now_s)
        return chunk

    def ended(self) -> None:
        """Take the end of the current call with status OK.

        Raises:
            StreamCorruptError: the stream has not ended.
        """
        if self.usage is None:
            raise StreamCorruptError(
                f"stream {self.stream_id or self.request_id} ended with status OK but without a StreamEnd"
            )
        self.state = FollowState.COMPLETE

    def failed(self, error: CallFailedError, now_s: float) -> NextCall | GiveUp | None:
        """Take the end of the current call with any other status; None if nothing is missing."""
        if self.usage is not None:  # only the status was lost
            self.state = FollowState.COMPLETE
            return None
        step = self._failed_before(error, now_s) if self.start is None else self._failed_after(error, now_s)
        if isinstance(step, GiveUp):
            self.state = FollowState.FAILED
            # Every other end is the stream's own, or leaves it to another reader.
            self._may_run = is_broken(error) or error.server_reason in _UNREADABLE
        return step

    # -----------------------------------------------------------------------------------------------------

    def _call_begins(self, message: pb.GenerateResponse, now_s: float) -> None:
        if self.start is None:
            self.start, self.stream_id = message.start, message.stream_id
            self._window_s = message.start.resume_window_ms / 1000
        if self.state is not FollowState.SENDING:
            self.num_resumes += 1
        self._connected_s = now_s
        self.state = FollowState.READING

    def _take(self, chunk: Chunk, now_s: float) -> None:
        self.num_tokens += chunk.num_tokens
        if self.first_token_s is None and chunk.num_tokens:
            self.first_token_s = now_s - self._began_s
        for event in chunk.events:
            index, kind = output_index_of(event), event.WhichOneof("kind")
            if index is not None:
                if index >= len(self.outputs):
                    raise StreamCorruptError(
                        f"stream {self.stream_id} has an output {index}, of {len(self.outputs)} asked for"
                    )
                self.outputs[index].take(event)
            elif kind == "prompt_tokens":
                self.prompt.append(event.prompt_tokens)
            elif kind == "stream_end":
                self.usage = event.stream_end.usage

    def _failed_before(self, error: CallFailedError, now_s: float) -> NextCall | GiveUp:
        """Nothing has been received."""
        if self.state is FollowState.FINDING and error.server_reason in (
            "STREAM_NOT_FOUND",
            "STREAM_EXPIRED",
        ):
            if self._in_use is not None:
                return GiveUp(self._in_use)  # a stream has the id, and it is not ours
            self.num_resends += 1
            return self._send()
        if self.state is FollowState.SENDING and error.server_reason == "REQUEST_ID_IN_USE":
            # Before any call was lost it is not ours; after that, the lost one can have arrived late.
            if not self._num_lost or self._num_retries >= self._max_retries:
                return GiveUp(error)
            self._in_use = error
            self._num_retries += 1
            return self._find()
        lost = self._window_s > 0 and is_broken(error)
        wait_s = _wait_s(self._num_retries, self._random())
        if error.retry_after_s is not None and error.code in _TRY_AGAIN_CODES:
            wait_s += error.retry_after_s
        elif not lost:
            return GiveUp(error)
        too_late = self._deadline_s is not None and now_s + wait_s >= self._deadline_s
        if self._num_retries >= self._max_retries or too_late:
            return GiveUp(error)
        self._num_retries += 1
        if lost:
            self._num_lost += 1
            self._num_strays += self.state is FollowState.FINDING
        if lost or self.state is FollowState.FINDING:
            return self._find(wait_s)
        return self._send(wait_s)

    def _failed_after(self, error: CallFailedError, now_s: float) -> NextCall | GiveUp:
        """Something has been received."""
        if not self._may_resume(error):
            return self._give_up(error)
        if self._lost_s is None or (
            self.state is FollowState.READING and now_s - self._connected_s >= _STEADY_S
        ):
            self._lost_s = now_s
            self._num_waits = 0
        window_end_s = self._lost_s + self._window_s
        wait_s = max(_wait_s(self._num_waits, self._random()), error.retry_after_s or 0.0)
        # The last attempt is made when the window ends: the server's began later, when it noticed.
        wait_s = min(wait_s, window_end_s - now_s)
        if wait_s <= 0 or (self._deadline_s is not None and now_s + wait_s >= self._deadline_s):
            return self._give_up(error)
        self._num_waits += 1
        return self._resume(wait_s)

    def _may_resume(self, error: CallFailedError) -> bool:
        if not self._window_s:
            return False
        if is_broken(error):
            self._num_strays += self.state is FollowState.RESUMING
            return True
        if error.server_reason == "CONSUMER_STALLED":
            return True
        if error.server_reason == "READER_REPLACED" and self._num_strays:
            # A call of ours that was given up has arrived late, and nobody reads it.
            self._num_strays -= 1
            return True
        return self.state is FollowState.RESUMING and error.retry_after_s is not None

    def _give_up(self, error: CallFailedError) -> GiveUp:
        return GiveUp(
            StreamIncompleteError(
                error,
                stream_id=self.stream_id,
                position=self.position,
                outputs=tuple((output.text, tuple(output.token_ids)) for output in self.outputs),
            )
        )

    def _send(self, after_s: float = 0.0) -> NextCall:
        self.state = FollowState.SENDING
        self._decoder = ChunkDecoder(0)
        return NextCall(self._request, after_s)

    def _find(self, after_s: float = 0.0) -> NextCall:
        self.state = FollowState.FINDING
        self._decoder = ChunkDecoder(0)
        return NextCall(
            pb.ResumeRequest(
                request_id=self.request_id,
                resume_token=self._request.resume_token,
                stream=self._request.stream,
            ),
            after_s,
        )

    def _resume(self, after_s: float) -> NextCall:
        assert self.start is not None
        self.state = FollowState.RESUMING
        self._decoder = ChunkDecoder(self.position)
        return NextCall(
            pb.ResumeRequest(
                stream_id=self.stream_id,
                resume_token=self.start.resume_token,
                position=self.position,
                stream=self._request.stream,
            ),
            after_s,
        )


def is_broken(error: CallFailedError) -> bool:
    """Whether a call was ended by what lies between client and server, not by the server."""
    return error.code in _TRANSPORT_CODES and not error.server_reason


def _wait_s(num_waits: int, chance: float) -> float:
    longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(num_waits, 30))
    return longest * (0.5 + 0.5 * chance)
