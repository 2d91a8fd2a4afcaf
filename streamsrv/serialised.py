"""Messages of the contract written straight in protobuf's wire format: those that are sent for every token.

Making the message objects and letting them serialise themselves takes three times as long for one token.
Source: protobuf's "Encoding"; a tag is the field's number times 8 plus its wire type, 2 for what has a size.
The field numbers are inference.proto's; the tests hold the bytes against the generated classes.
"""

from streamsrv.request import OutputOptions
from streamsrv.stream import Token

EVENTS_TAG, ZSTD_EVENTS_TAG = b"\x22", b"\x2a"
"""Of GenerateResponse.events and .zstd_events."""
_SEQ_TAG = b"\x10"
_EVENT_TAG = b"\x0a"
_TOKENS_TAG = b"\x12"
_OUTPUT_INDEX_TAG, _TOKEN_IDS_TAG, _TEXT_TAG, _TEXT_LENGTHS_TAG = b"\x08", b"\x12", b"\x1a", b"\x22"
_SMALL = tuple(bytes((value,)) for value in range(128))


def response(head: bytes, position: int, tag: bytes, payload: bytes) -> bytes:
    """A GenerateResponse: `head` is one with its stream_id alone, `tag` says what the payload is."""
    seq = _SEQ_TAG + _varint(position) if position else b""
    return b"".join((head, seq, tag, _varint(len(payload)), payload))


def one_token(token: Token, output: OutputOptions) -> bytes:
    """The EventList of a single token that is told without probabilities."""
    run = _OUTPUT_INDEX_TAG + _varint(token.output_index) if token.output_index else b""
    if output.token_ids:
        run += _sized(_TOKEN_IDS_TAG, _varint(token.token_id))
    if output.text:
        text = token.text.encode()
        if text:
            run += _sized(_TEXT_TAG, text)
        if output.text_lengths:
            run += _sized(_TEXT_LENGTHS_TAG, _varint(len(text)))
    return _sized(_EVENT_TAG, _sized(_TOKENS_TAG, run))


def _sized(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    if value < 16384:
        return bytes((value & 127 | 128, value >> 7))
    return bytes((value & 127 | 128,)) + _varint(value >> 7)
