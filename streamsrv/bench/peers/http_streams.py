"""Streams of llama.cpp's HTTP server: POST /completion, answered by server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from urllib.parse import urlsplit

from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.figures import PeerStream

_RUN_S = 900.0


async def run_http(url: str, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
    """Send all prompts at the same time, each on a connection of its own, and read the streams.

    Raises:
        BenchError: the server refused one, or broke it off.
    """
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_RUN_S):
            return list(await asyncio.gather(*(_stream(url, ids, max_tokens, began_s) for ids in prompts)))
    except TimeoutError:
        raise BenchError(f"its streams did not end in {_RUN_S:g} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise BenchError(f"a stream broke off: {error}") from None


async def _stream(url: str, prompt: Seq[int], max_tokens: int, began_s: float) -> PeerStream:
    token_ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(_request(address.netloc, prompt, max_tokens))
        async for event in _events(reader):
            if "error" in event:
                raise BenchError(f"the server refused a prompt: {event['error']}")
            ids = event.get("tokens", [])
            if isinstance(ids, list) and ids:
                token_ids += ids
                arrivals.append((time.perf_counter() - began_s, len(ids)))
    finally:
        writer.close()
    return PeerStream(tuple(token_ids), tuple(arrivals))


def _request(host: str, prompt: Seq[int], max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, object]]:
    """Parse a response with chunked framing, or one without that the end of the connection ends."""
    status = (await reader.readline()).decode().strip()
    is_chunked = False
    while line := (await reader.readline()).strip():
        is_chunked = is_chunked or line.lower() == b"transfer-encoding: chunked"
    if " 200 " not in f"{status} ":
        raise BenchError(f"the server answered {status or 'nothing'}")
    text = b""
    async for piece in _chunks(reader) if is_chunked else _pieces(reader):
        *events, text = (text + piece).split(b"\n\n")
        for event in events:
            if event.startswith((b"data: {", b"error: {")):
                name, _, value = event.partition(b": ")
                parsed = json.loads(value)
                yield {"error": parsed} if name == b"error" else parsed


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
