"""A stream is a log; a consumer is a cursor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from engines.api import StreamsrvError
from streamsrv.errors import RequestIdInUseError
from streamsrv.sequence import Finish


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, and the text that became certain with it."""

    output_index: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The end of one output."""

    output_index: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of the stream, with what it cost."""

    num_prompt_tokens: int
    num_completion_tokens: int


Element: TypeAlias = Token | OutputEnd | StreamEnd


class StreamLog:
    """Everything a stream has said, each element at its position, counted from 0.

    Positions never change. Memory is bounded by the request's own bound on tokens; what every reader is
    done with can be dropped before that. Ends once: with a StreamEnd, or with an error.
    """

    def __init__(self) -> None:
        self._elements: list[Element] = []
        self._oldest = 0
        self._ended = False
        self._error: StreamsrvError | None = None
        self.on_change: Callable[[], None] | None = None
        """Called after each append and at the end; the consumer's way to be woken."""

    @property
    def oldest_position(self) -> int:
        """The first position still held."""
        return self._oldest

    @property
    def next_position(self) -> int:
        """The position of the element that will come next."""
        return self._oldest + len(self._elements)

    @property
    def ended(self) -> bool:
        """Nothing will be appended any more."""
        return self._ended

    @property
    def error(self) -> StreamsrvError | None:
        """Why the stream ended without a StreamEnd."""
        return self._error

    def append(self, *elements: Element) -> None:
        """Add elements; a StreamEnd ends the log."""
        assert not self._ended, "a stream went on after its end"
        self._elements.extend(elements)
        self._ended = isinstance(elements[-1], StreamEnd)
        self._changed()

    def fail(self, error: StreamsrvError) -> None:
        """End the log with an error. What was appended before can still be read."""
        assert not self._ended, "a stream ended twice"
        self._ended = True
        self._error = error
        self._changed()

    def read(self, position: int, most: int | None = None) -> list[Element]:
        """The elements from `position` on, `most` of them at most; empty at the log's end."""
        assert self._oldest <= position <= self.next_position, "a position that the log does not hold"
        begin = position - self._oldest
        return self._elements[begin : None if most is None else begin + most]

    def drop_before(self, position: int) -> None:
        """Let go of everything before `position`."""
        assert position <= self.next_position
        if position > self._oldest:
            del self._elements[: position - self._oldest]
            self._oldest = position

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


@dataclass(frozen=True, slots=True)
class Stream:
    """A request's stream, as the registry knows it."""

    stream_id: str
    request_id: str
    sequence_id: int
    log: StreamLog


class StreamRegistry:
    """The streams that live, by their own id and by their request's."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}
        self._by_request: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, stream: Stream) -> None:
        """Register a stream.

        Raises:
            RequestIdInUseError: a stream that lives has the same request id; it is left alone.

        """
        other = self._by_request.get(stream.request_id)
        if other is not None:
            raise RequestIdInUseError(stream.request_id, other.stream_id)
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream
        self._by_request[stream.request_id] = stream

    def remove(self, stream: Stream) -> None:
        """Forget a stream; its request id is free again."""
        del self._by_id[stream.stream_id]
        del self._by_request[stream.request_id]

    def by_stream_id(self, stream_id: str) -> Stream | None:
        """The stream with this id."""
        return self._by_id.get(stream_id)

    def by_request_id(self, request_id: str) -> Stream | None:
        """The stream with this request id."""
        return self._by_request.get(request_id)
