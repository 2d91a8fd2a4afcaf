"""Messages of the contract written straight in protobuf's wire format: those that are sent for every token.

Making the message objects and letting them serialise themselves takes three times as long for one token, and
twice as long for eight.
Source: protobuf's "Encoding"; a tag is the field's number times 8 plus its wire type, 2 for what has a size.
The field numbers are inference.proto's; the tests hold the bytes against the generated classes.
"""

from collections.abc import Sequence as Seq

from streamsrv.request import OutputOptions

EVENTS_TAG, ZSTD_EVENTS_TAG = b"\x22", b"\x2a"
"""Of GenerateResponse.events and .zstd_events."""
_SEQ_TAG = b"\x10"
_EVENT_TAG = b"\x0a"
_NUM_POSITIONS_TAG, _TOKENS_TAG = b"\x08", b"\x12"
_OUTPUT_INDEX_TAG, _TOKEN_IDS_TAG, _TEXT_TAG, _TEXT_LENGTHS_TAG = b"\x08", b"\x12", b"\x1a", b"\x22"
_SMALL = tuple(bytes((value,)) for value in range(128))


def response(head: bytes, position: int, tag: bytes, payload: bytes) -> bytes:
    """A GenerateResponse: `head` is one with its stream_id alone, `tag` says what the payload is."""
    seq = _SEQ_TAG + _varint(position) if position else b""
    return b"".join((head, seq, tag, _varint(len(payload)), payload))


def token_run(
    output: OutputOptions,
    output_index: int,
    token_ids: Seq[int],
    text: str,
    text_lengths: Seq[int] = (),
    logprobs: bytes = b"",
) -> bytes:
    """An event of an EventList: tokens of one output; `logprobs` is a TokenRun with those alone."""
    run = _OUTPUT_INDEX_TAG + _varint(output_index) if output_index else b""
    if output.token_ids:
        run += _sized(_TOKEN_IDS_TAG, b"".join([_VARINTS[token_id] for token_id in token_ids]))
    if output.text and text:
        run += _sized(_TEXT_TAG, text.encode())
    if output.text and text_lengths:
        run += _sized(_TEXT_LENGTHS_TAG, b"".join(map(_varint, text_lengths)))
    count = len(token_ids)
    positions = _NUM_POSITIONS_TAG + _varint(count) if count > 1 else b""
    return serialised_event(positions + _sized(_TOKENS_TAG, run + logprobs))


def serialised_event(event: bytes) -> bytes:
    """An event of an EventList: `event` is its message."""
    return _sized(_EVENT_TAG, event)


def _sized(tag: bytes, value: bytes) -> bytes:
    size = len(value)
    return tag + (_SMALL[size] if size < 128 else _varint(size)) + value


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    if value < 16384:
        return bytes((value & 127 | 128, value >> 7))
    return bytes((value & 127 | 128,)) + _varint(value >> 7)


class _Varints(dict[int, bytes]):
    """Token ids as they are written. No more of them than a vocabulary has."""

    def __missing__(self, value: int) -> bytes:
        self[value] = written = _varint(value)
        return written


_VARINTS = _Varints()
