"""A stream is a log; a consumer is a cursor."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeGuard

from engines.api import StreamsrvError
from streamsrv.chat import ToolCall
from streamsrv.detokenizer import Detokenizer
from streamsrv.errors import PositionEvictedError, PositionInFutureError, RequestIdInUseError
from streamsrv.logprobs import TokenLogprobs
from streamsrv.progress import Progress
from streamsrv.request import OutputOptions
from streamsrv.sequence import Finish


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, and the text that became certain with it."""

    output_index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    """None where none were asked for."""


class TokenRun(NamedTuple):  # which takes half the time to make
    """Generated tokens of the only output, a position each, and the text that became certain with them."""

    token_ids: Seq[int]
    text: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A piece of the prompt, for requests that ask for it; before any output."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each token; None where none were asked for."""


@dataclass(frozen=True, slots=True)
class ToolCallMade:
    """A call of a tool that an output made."""

    output_index: int
    call: ToolCall


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
    num_cached_prompt_tokens: int = 0
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0


Element: TypeAlias = Token | PromptTokens | ToolCallMade | OutputEnd | StreamEnd
Entry: TypeAlias = Element | int
"""What a log holds at a position; an id alone is a token of the only output, whose text readers make.

The text of many tokens takes hardly longer to make than that of one, and nobody has to have it before."""
Told: TypeAlias = Element | TokenRun
"""What a reader takes."""


class LogMemory:
    """What all logs hold together, against a limit. Purely a count: whoever owns the logs acts on it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the logs hold as much as they may."""
        return self.used_bytes >= self.limit_bytes


# A Token, its slot in the list, its id and an empty str, measured with sys.getsizeof on CPython 3.11.
_ELEMENT_BYTES = 150


# An id in a list of them; its text is the vocabulary's.
_ID_BYTES = 36


# A TokenLogprobs with its float; for each of its others an id, a float and their slots.
_LOGPROBS_BYTES = 88
_TOP_BYTES = 72


def _size_bytes(element: Entry) -> int:
    if type(element) is int:
        return _ID_BYTES
    match element:
        case Token(text=text, logprobs=None):
            return _ELEMENT_BYTES + len(text)
        case Token(text=text, logprobs=known):
            return _ELEMENT_BYTES + len(text) + _logprobs_bytes(known)
        case PromptTokens(token_ids, text, logprobs):
            known_bytes = sum(map(_logprobs_bytes, logprobs)) if logprobs else 0
            return _ELEMENT_BYTES + 36 * len(token_ids) + len(text) + known_bytes
        case ToolCallMade(call=call):
            return _ELEMENT_BYTES + len(call.name) + len(call.arguments_json)
        case _:
            return _ELEMENT_BYTES


def _sizes_bytes(entries: list[Entry]) -> int:
    return _ID_BYTES * len(entries) if _are_ids(entries) else sum(map(_size_bytes, entries))


def _are_ids(entries: list[Entry]) -> TypeGuard[list[int]]:
    """Whether entries in a row, one at least, are bare ids: nothing else comes between two of them."""
    return type(entries[0]) is int and type(entries[-1]) is int


def _logprobs_bytes(known: TokenLogprobs | None) -> int:
    if known is None:
        return 0
    return _LOGPROBS_BYTES + (_TOP_BYTES * len(known.top.token_ids) if known.top is not None else 0)


class StreamLog:
    """Everything a stream has said, each element at its position, counted from 0.

    Positions never change. The beginning can be dropped. Ends once: with a StreamEnd, or with an error.
    Where it holds bare token ids, the text held back at its end belongs to the OutputEnd: readers add it.
    """

    def __init__(self, memory: LogMemory) -> None:
        self._memory = memory
        self._elements: list[Entry] = []
        self._oldest = 0
        self._ended = False
        self._discarded = False
        self._error: StreamsrvError | None = None
        self.detokenizer: Detokenizer | None = None
        """Makes the text of bare token ids; it has taken those before the oldest position."""
        self.on_change: Callable[[], None] | None = None
        """Called after each append and at the end; the reader's way to be woken."""
        self.is_quiet = False
        """The reader wants to be woken by the end alone."""

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

    def append(self, *elements: Entry) -> None:
        """Add elements; a StreamEnd ends the log."""
        assert not self._ended, "a stream went on after its end"
        if self._discarded:
            self._oldest += len(elements)
        else:
            self._elements.extend(elements)
            self._memory.used_bytes += sum(map(_size_bytes, elements))
        self._ended = isinstance(elements[-1], StreamEnd)
        self._changed()

    def append_ids(self, token_ids: Seq[int]) -> None:
        """`append` for bare token ids, which come by the step."""
        assert not self._ended, "a stream went on after its end"
        if self._discarded:
            self._oldest += len(token_ids)
        else:
            self._elements += token_ids
            self._memory.used_bytes += _ID_BYTES * len(token_ids)
        if self.on_change is not None and not self.is_quiet:
            self.on_change()

    def fail(self, error: StreamsrvError) -> None:
        """End the log with an error. What was appended before can still be read."""
        assert not self._ended, "a stream ended twice"
        self._ended = True
        self._error = error
        self._changed()

    @property
    def size_bytes(self) -> int:
        """What it holds, as `LogMemory` counts it."""
        return sum(map(_size_bytes, self._elements))

    def check_position(self, position: int) -> None:
        """Refuse a position that cannot be read from.

        Raises:
            PositionEvictedError: it was held once.
            PositionInFutureError: nothing has been said there yet.

        """
        if position < self._oldest:
            raise PositionEvictedError(position, self._oldest)
        if position > self.next_position:
            raise PositionInFutureError(position, self._oldest, self.next_position)

    def detokenizer_at(self, position: int) -> Detokenizer | None:
        """Make what makes the text from `position` on; None where there are no bare ids."""
        if self.detokenizer is None:
            return None
        detokenizer = self.detokenizer.copy()
        detokenizer.push_all(_ids(self._elements[: position - self._oldest]))
        return detokenizer

    def read(self, position: int, most: int | None = None) -> list[Entry]:
        """The elements from `position` on, `most` of them at most; empty at the log's end."""
        begin = position - self._oldest
        assert 0 <= begin <= len(self._elements), "a position that the log does not hold"
        return self._elements[begin : None if most is None else begin + most]

    def drop_before(self, position: int, detokenizer: Detokenizer | None = None) -> None:
        """Let go of everything before `position`; whoever has what makes the text from there on gives it."""
        count = position - self._oldest
        if count <= 0:
            return
        assert count <= len(self._elements), "a position that the log does not hold"
        dropped = self._elements[:count]
        del self._elements[:count]
        self._memory.used_bytes -= _sizes_bytes(dropped)
        self._oldest = position
        if detokenizer is not None:
            self.detokenizer = detokenizer
        elif self.detokenizer is not None:
            self.detokenizer.push_all(_ids(dropped))

    def discard(self) -> None:
        """Let go of everything, and hold nothing that is still to come: nobody will read it."""
        self.detokenizer = None
        self.drop_before(self.next_position)
        self._discarded = True

    def _changed(self) -> None:
        if self.on_change is not None and (self._ended or not self.is_quiet):
            self.on_change()


def _ids(entries: Seq[Entry]) -> list[int]:
    return [entry for entry in entries if isinstance(entry, int)]


class Reader:
    """A cursor in a stream's log: the one that receives it now."""

    def __init__(self, stream: "Stream", position: int, on_change: Callable[[], None]) -> None:
        self.stream = stream
        self.position = position
        """The first position that has not been taken."""
        self.replaced = False
        """Another reader took the stream over."""
        self._on_change = on_change
        self._has_prompt = stream.output.echo or stream.output.prompt_logprobs
        self._is_resumable = stream.is_resumable
        self._detokenizer = stream.log.detokenizer_at(position)

    def take(self, most: int) -> list[Told]:
        """Take what comes next, of `most` positions at most; empty if nothing is there yet."""
        log = self.stream.log
        entries = log.read(self.position, most)
        if not entries:
            return []
        if self._has_prompt:
            # A piece of a prompt is as large as a message should be.
            prompt = next((i for i, e in enumerate(entries) if isinstance(e, PromptTokens)), None)
            entries = entries if prompt is None else entries[: prompt + 1]
        told = [self._run(entries)] if _are_ids(entries) else self._told(entries)
        self.position += len(entries)
        if not self._is_resumable:
            log.drop_before(self.position, self._detokenizer)
        return told

    def _told(self, entries: list[Entry]) -> list[Told]:
        """Make the text of bare token ids, and of the end behind them."""
        told, ids = list[Told](), list[int]()
        for entry in entries:
            if isinstance(entry, int):
                ids.append(entry)
                continue
            if ids:
                told.append(self._run(ids))
                ids = []
            if isinstance(entry, OutputEnd) and self._detokenizer is not None:
                finish = replace(entry.finish, text=self._detokenizer.flush())
                told.append(OutputEnd(entry.output_index, finish))
            else:
                told.append(entry)
        if ids:
            told.append(self._run(ids))
        return told

    def _run(self, token_ids: list[int]) -> Told:
        assert self._detokenizer is not None, "bare token ids, and nothing that makes their text"
        return TokenRun(token_ids, self._detokenizer.push_all(token_ids))

    @property
    def at_end(self) -> bool:
        """Whether everything has been taken and nothing will come."""
        return self.stream.log.ended and self.position == self.stream.log.next_position

    def wake(self) -> None:
        """Tell the reader that something has changed."""
        self._on_change()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    name: str
    """The authenticated identity, else the peer's address without its port."""
    authenticated: bool = False


class Stream:
    """A request's stream: its log, and who may read it."""

    def __init__(
        self,
        stream_id: str,
        request_id: str,
        log: StreamLog,
        *,
        caller: Caller,
        output: OutputOptions,
        num_prompt_tokens: int,
        resume_window_s: float = 0.0,
        resume_token: bytes = b"",
        arrived_s: float = 0.0,
    ) -> None:
        """Without a `resume_window_s` the stream ends with its one reader, and has no token.

        `arrived_s` is when its request came, on the worker's clock.
        """
        self.stream_id = stream_id
        self.request_id = request_id
        self.log = log
        self.caller = caller
        self.output = output
        self.num_prompt_tokens = num_prompt_tokens
        self.resume_window_s = resume_window_s
        self.resume_token = resume_token
        self.progress = Progress(arrived_s)
        self.reader: Reader | None = None
        self.dismissed = False
        """It was cancelled: nobody needs to wait until it has been read."""
        self.num_taken = 0
        """The largest position that a reader has got to."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.progress.num_output_tokens

    @property
    def is_delivered(self) -> bool:
        """Whether it says no more, the reader has gone, and all that it said was taken or is not wanted."""
        taken = self.dismissed or self.num_taken == self.log.next_position
        return self.reader is None and self.log.ended and taken

    @property
    def is_resumable(self) -> bool:
        """Whether it outlives its reader."""
        return self.resume_window_s > 0

    def attach(self, position: int, on_change: Callable[[], None]) -> Reader:
        """Make a reader at `position`; one that is there is replaced, and woken to notice.

        Raises:
            PositionEvictedError: the log holds that position no longer.
            PositionInFutureError: the log has not got there.

        """
        self.log.check_position(position)
        self.log.is_quiet = False
        if self.reader is not None:
            replaced = self.reader
            self.detach(replaced)
            replaced.replaced = True
            replaced.wake()
        reader = Reader(self, position, on_change)
        self.reader = reader
        self.log.on_change = on_change
        return reader

    def detach(self, reader: Reader) -> bool:
        """Let a reader go; False if it was replaced before."""
        self.num_taken = max(self.num_taken, reader.position)
        if self.reader is not reader:
            return False
        self.reader = None
        self.log.on_change = None
        return True


class StreamRegistry:
    """The streams that live or can still be read, by their own id and by their request's.

    The request ids of an authenticated caller are its own, so that nobody else can learn or take them. All
    others share theirs: an address tells nobody apart for sure.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}
        self._by_request: dict[tuple[Caller | None, str], Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._by_id.values())

    def check_request_id(self, caller: Caller, request_id: str) -> None:
        """Refuse a request id that is taken.

        Raises:
            RequestIdInUseError: another stream has the same request id.

        """
        other = self.by_request_id(caller, request_id)
        if other is not None:
            raise RequestIdInUseError(request_id, other.stream_id)

    def add(self, stream: Stream) -> None:
        """Register a stream.

        Raises:
            RequestIdInUseError: another stream has the same request id; it is left alone.

        """
        self.check_request_id(stream.caller, stream.request_id)
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream
        self._by_request[_request_key(stream.caller, stream.request_id)] = stream

    def remove(self, stream: Stream) -> None:
        """Forget a stream; its memory and its request id are free again."""
        stream.log.discard()
        del self._by_id[stream.stream_id]
        del self._by_request[_request_key(stream.caller, stream.request_id)]

    def by_stream_id(self, stream_id: str) -> Stream | None:
        """Find the stream with this id."""
        return self._by_id.get(stream_id)

    def by_request_id(self, caller: Caller, request_id: str) -> Stream | None:
        """Find the stream that has this request id among those that the caller's ids are told apart from."""
        return self._by_request.get(_request_key(caller, request_id))


def _request_key(caller: Caller, request_id: str) -> tuple[Caller | None, str]:
    return caller if caller.authenticated else None, request_id
