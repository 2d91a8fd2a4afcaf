"""The same text as the OpenAI API streams it: server-sent events over HTTP/1.1."""

import json
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq

_HEADERS = (
    b"HTTP/1.1 200 OK\r\n"
    b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)
_GZIP_WINDOW = 31  # zlib's way to ask for a gzip header and the greatest window


def sse_response(
    pieces: Seq[str], *, model: str, finish_reason: str, num_prompt_tokens: int, gzip: bool = False
) -> bytes:
    """Form a whole response that carries `pieces`, an event each, and at the end the usage.

    The lines are `chat.completion.chunk` objects in the form of the API's reference, each an HTTP chunk of
    its own, as a server sends what has to arrive at once. An empty piece (a token that ends within a
    character) makes no event. With `gzip` the events pass through one gzip stream that is flushed after each.
    """
    response = [_HEADERS + (b"content-encoding: gzip\r\n\r\n" if gzip else b"\r\n")]
    compressor = zlib.compressobj(wbits=_GZIP_WINDOW) if gzip else None
    for event in sse_events(pieces, model, finish_reason, num_prompt_tokens):
        data = event
        if compressor is not None:
            data = compressor.compress(event) + compressor.flush(zlib.Z_SYNC_FLUSH)
        response.append(_http_chunk(data))
    if compressor is not None:
        response.append(_http_chunk(compressor.flush()))
    return b"".join([*response, _http_chunk(b"")])


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sse_events(
    pieces: Seq[str],
    model: str,
    finish_reason: str,
    num_prompt_tokens: int,
    num_completion_tokens: int | None = None,
) -> Iterator[bytes]:
    """Form the events of a response, one after the other; `pieces` are a token each if not said otherwise."""
    num_tokens = len(pieces) if num_completion_tokens is None else num_completion_tokens
    yield _event(model, {"role": "assistant", "content": ""}, None)
    for piece in pieces:
        if piece:
            yield _event(model, {"content": piece}, None)
    yield _event(model, {}, finish_reason)
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    yield _line({**_head(model), "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(model: str, delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _line({**_head(model), "choices": [choice]})


def _head(model: str) -> dict[str, object]:
    # Ids and times of the usual length.
    return {
        "id": "chatcmpl-9f8e7d6c5b4a39281706f5e4d3c2b1a0",
        "object": "chat.completion.chunk",
        "created": 1767225600,
        "model": model,
        "system_fingerprint": "fp_44709d6fcb",
    }


def _line(value: dict[str, object]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
