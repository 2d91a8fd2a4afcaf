"""Log elements ↔ messages, for both ends. The only file that knows zstd."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import zstandard
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError

from streamsrv.errors import StreamCorruptError
from streamsrv.logprobs import TokenLogprobs
from streamsrv.request import Codec, OutputOptions
from streamsrv.sequence import FinishReason
from streamsrv.serialised import EVENTS_TAG, ZSTD_EVENTS_TAG, response, serialised_event, token_run
from streamsrv.stream import OutputEnd, PromptTokens, StreamEnd, Token, TokenRun, Told, ToolCallMade
from streamsrv.v1 import inference_pb2 as pb

MAX_TOKENS_PER_MESSAGE = 1024
"""Keeps a message's raw size under MAX_RAW_BYTES: a token brings 256 bytes of text at most, besides what a
stop text's beginning held back."""

MAX_RAW_BYTES = 1 << 20
"""The most that a message may decompress to, as the contract says."""

_MAX_WINDOW_BYTES = 1 << 17
# Measured on real answers: 47 KB of memory a context and 1 µs a message; twice the window would take 63 KB
# for half a percent fewer bytes a token. No level gives these; see README, "Bytes on the wire".
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_GREEDY, window_log=11, hash_log=10, chain_log=10, search_log=4, min_match=4
)
# Below this size a message goes plain: the block's header eats what compressing gains. Measured on prose with
# 1, 2, 4 and 8 tokens a message: 26.5, 17.1, 11.5 and 8.5 bytes a token, and 27.4, 17.8, 11.7 and 8.5 where
# all from 12 bytes on are compressed, at 2.7 us a message of one token instead of 1.5.
_MIN_COMPRESSED_BYTES = 48

CODEC_TO_PB = {Codec.PLAIN: pb.CODEC_PLAIN, Codec.ZSTD: pb.CODEC_ZSTD}
CODEC_FROM_PB = {number: codec for codec, number in CODEC_TO_PB.items()}
FINISH_REASON_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


@dataclass(slots=True)
class ChunkTotals:
    """What encoders have made, all together."""

    num_messages: int = 0
    raw_bytes: int = 0
    """The events, serialised."""
    sent_bytes: int = 0
    """The events as they were sent, compressed or not."""

    def add(self, raw_bytes: int, sent_bytes: int) -> None:
        """Count one message."""
        self.num_messages += 1
        self.raw_bytes += raw_bytes
        self.sent_bytes += sent_bytes


def most_tokens(output: OutputOptions) -> int:
    """How many tokens a message may have: those that are told beside each one count, too."""
    return max(1, MAX_TOKENS_PER_MESSAGE // (1 + output.num_top_logprobs))


class ChunkEncoder:
    """Turns pieces of a log into the messages of one call, through one zstd frame."""

    def __init__(
        self, stream_id: str, codec: Codec, output: OutputOptions, totals: ChunkTotals | None = None
    ) -> None:
        """`totals`, where given, count what it makes."""
        self._head = pb.GenerateResponse(stream_id=stream_id).SerializeToString()
        self._output = output
        self._totals = totals
        self._codec = codec
        # Made for the first message that it is used for: a stream that waits has none.
        self._compressor: zstandard.ZstdCompressionObj | None = None

    def encode(self, position: int, elements: Seq[Told]) -> bytes:
        """The message for `elements`, the first of which stands at `position`: a serialised GenerateResponse.

        Every element must be encoded once, in order: a zstd frame cannot skip a message.
        """
        assert len(elements) <= MAX_TOKENS_PER_MESSAGE
        raw = _serialise(elements, self._output)
        sent, tag = raw, EVENTS_TAG
        if self._codec is Codec.ZSTD and len(raw) >= _MIN_COMPRESSED_BYTES:
            if self._compressor is None:
                self._compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION).compressobj()
            sent = self._compressor.compress(raw) + self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            tag = ZSTD_EVENTS_TAG
        if self._totals is not None:
            self._totals.add(len(raw), len(sent))
        return response(self._head, position, tag, sent)


class ChunkDecoder:
    """Reads the messages of one call, and sees to it that nothing is missing, repeated or out of order."""

    def __init__(self, position: int | None = None) -> None:
        """`position` is the first one wanted; None takes what the StreamStart says."""
        self._next_position = position
        self._begun = False
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()

    @property
    def next_position(self) -> int | None:
        """The position that the next message must have; None where nothing has said it yet."""
        return self._next_position

    def decode(self, response: pb.GenerateResponse) -> pb.EventList:
        """The events of a message; none for a StreamStart, or for a payload of a later version.

        Raises:
            StreamCorruptError: the message does not follow on the one before, or cannot be decompressed
                within the contract's bounds.
        """
        kind = response.WhichOneof("payload")
        if (kind == "start") is self._begun:
            fault = "has a second StreamStart" if self._begun else "does not begin with a StreamStart"
            raise StreamCorruptError(f"a call of stream {response.stream_id} {fault}")
        self._begun = True
        if self._next_position is None:
            self._next_position = response.seq
        if response.seq != self._next_position:
            raise StreamCorruptError(
                f"stream {response.stream_id} jumped to position {response.seq}, "
                f"expected {self._next_position}"
            )
        if kind == "events":
            events = response.events
        elif kind == "zstd_events":
            try:
                events = pb.EventList.FromString(self._decompress(response.zstd_events))
            except DecodeError as error:
                raise StreamCorruptError(f"a message holds no events: {error}") from error
        else:
            events = pb.EventList()
        for event in events.events:
            self._next_position += event.num_positions if event.HasField("num_positions") else 1
        return events

    def _decompress(self, data: bytes) -> bytes:
        # decompressobj has no bound on its output. Four bytes can stand for a block of one window, so eight
        # at a time overshoot the bound by no more than two or three windows.
        pieces: list[bytes] = []
        size = 0
        try:
            for begin in range(0, len(data), 8):
                piece = self._decompressor.decompress(data[begin : begin + 8])
                size += len(piece)
                if size > MAX_RAW_BYTES:
                    raise StreamCorruptError(
                        f"a message of {len(data)} bytes decompresses to more than {MAX_RAW_BYTES}"
                    )
                pieces.append(piece)
        except zstandard.ZstdError as error:
            raise StreamCorruptError(f"a message cannot be decompressed: {error}") from error
        return b"".join(pieces)


def _serialise(elements: Seq[Told], output: OutputOptions) -> bytes:
    """The EventList, serialised: one event after the other, each behind its tag and size."""
    if len(elements) == 1 and isinstance(element := elements[0], TokenRun):
        return token_run(output, 0, *element)
    events: list[bytes] = []
    run: list[Token] = []
    for element in elements:
        if isinstance(element, Token):
            if run and run[0].output_index != element.output_index:
                events.append(_tokens_event(run, output))
                run = []
            run.append(element)
            continue
        if run:
            events.append(_tokens_event(run, output))
            run = []
        if isinstance(element, TokenRun):
            events.append(token_run(output, 0, *element))
        else:
            event = pb.Event()
            _fill_event(event, element, output)
            events.append(serialised_event(event.SerializeToString()))
    if run:
        events.append(_tokens_event(run, output))
    return b"".join(events)


def _fill_event(
    event: pb.Event, element: PromptTokens | ToolCallMade | OutputEnd | StreamEnd, output: OutputOptions
) -> None:
    match element:
        case OutputEnd():
            _fill_output_end(event.output_end, element, output)
        case StreamEnd():
            usage = event.stream_end.usage
            for name in element.__slots__:
                setattr(usage, name, getattr(element, name))
        case PromptTokens():
            prompt = event.prompt_tokens
            prompt.token_ids.extend(element.token_ids)
            prompt.text = element.text if output.text and output.echo else ""
            for known in element.logprobs or ():
                prompt.logprobs.append(known.logprob)
                _add_top(prompt.top_logprobs, known)
        case ToolCallMade():
            event.tool_call.output_index = element.output_index
            call = event.tool_call.call
            call.id, call.name = element.call.id, element.call.name
            call.arguments_json = element.call.arguments_json


def _tokens_event(run: Seq[Token], output: OutputOptions) -> bytes:
    texts = [token.text for token in run]
    ids = [token.token_id for token in run]
    lengths = [len(text.encode()) for text in texts] if output.text_lengths else ()
    logprobs = pb.TokenRun()
    if output.wants_logprobs:
        for token in run:
            assert token.logprobs is not None, "a token without the logprobs that were asked for"
            logprobs.logprobs.append(token.logprobs.logprob)
            _add_top(logprobs.top_logprobs, token.logprobs)
    rest = logprobs.SerializeToString() if output.wants_logprobs else b""
    return token_run(output, run[0].output_index, ids, "".join(texts), lengths, rest)


def _add_top(tops: RepeatedCompositeFieldContainer[pb.TopLogprobs], known: TokenLogprobs) -> None:
    if known.top is not None:
        tops.add(token_ids=known.top.token_ids, logprobs=known.top.logprobs, texts=known.top.texts)


def _fill_output_end(message: pb.OutputEnd, end: OutputEnd, output: OutputOptions) -> None:
    message.output_index = end.output_index
    message.finish_reason = FINISH_REASON_TO_PB[end.finish.reason]
    message.text = end.finish.text if output.text else ""
    matched = end.finish.matched
    if isinstance(matched, str):
        message.matched_stop = matched
    elif matched is not None:
        message.matched_token_id = matched
