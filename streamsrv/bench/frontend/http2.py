"""As much of HTTP/2 as counting the answers of a gRPC server takes. Bytes in, counts out: no connection here.

Source: RFC 9113 (frames), RFC 7541 (headers, sent as literals that nothing is remembered of).
"""

import struct
from collections.abc import Sequence as Seq

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_MAX_WINDOW = 2**31 - 1
_HEAD_BYTES = 9


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Form a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def opening() -> bytes:
    """What a client begins with: windows as large as they can be, so that flow control stops nobody."""
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _MAX_WINDOW)
    update = struct.pack(">I", _MAX_WINDOW - 65535)
    return PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, update)


def request(stream_id: int, headers: Seq[tuple[str, str]], body: bytes) -> bytes:
    """Form a request. Names, values and the body must be short: under 127 bytes, and one frame."""
    block = b"".join([b"\x00" + _literal(name) + _literal(value) for name, value in headers])
    return frame(_HEADERS, _END_HEADERS, stream_id, block) + frame(_DATA, _END_STREAM, stream_id, body)


def _literal(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


class AnswerCounter:
    """Counts the streams that the server of one connection has ended."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """All that came."""
        self.num_ended = 0
        """Streams that ended in order."""
        self.num_reset = 0
        """Streams that were broken off."""
        self.gone = False
        """The server wants to hear no more."""
        self._rest = b""

    def receive(self, data: bytes) -> bytes:
        """Take bytes; returns what has to be answered to them."""
        self.num_bytes += len(data)
        data = self._rest + data
        begin, answer = 0, b""
        while len(data) - begin >= _HEAD_BYTES:
            end = begin + _HEAD_BYTES + int.from_bytes(data[begin : begin + 3])
            if len(data) < end:
                break
            kind, flags = data[begin + 3], data[begin + 4]
            if kind in (_DATA, _HEADERS):
                self.num_ended += flags & _END_STREAM
            elif kind == _RST_STREAM:
                # With NO_ERROR it follows an answer that was complete.
                self.num_reset += data[begin + _HEAD_BYTES : end] != bytes(4)
            elif kind == _SETTINGS and not flags & _ACK:
                answer += frame(_SETTINGS, _ACK, 0)
            elif kind == _PING and not flags & _ACK:
                answer += frame(_PING, _ACK, 0, data[begin + _HEAD_BYTES : end])
            elif kind == _GOAWAY:
                self.gone = True
            begin = end
        self._rest = data[begin:]
        return answer
