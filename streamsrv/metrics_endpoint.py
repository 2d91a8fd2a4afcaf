"""Answers Prometheus over plain HTTP, on a port of its own."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from streamsrv.config import Address
from streamsrv.errors import SettingsError

log = logging.getLogger(__name__)

_PATH = "/metrics"
# A scraper sends a few hundred bytes at once, and there are few of them. Whatever else comes to the port must
# not cost more than this.
_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 16


@asynccontextmanager
async def metrics_endpoint(registry: CollectorRegistry, address: Address) -> AsyncIterator[int]:
    """Listen on an address; gives the port.

    It runs on the server's own loop, so that what it reads does not change meanwhile: a scrape takes about a
    millisecond.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    endpoint = _Endpoint(registry)
    try:
        # Without reuse_port: a second server on the port must fail.
        server = await asyncio.start_server(
            endpoint.answer, address.host, address.port, limit=_MAX_HEAD_BYTES, family=_family(address)
        )
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address} for metrics: {error.strerror or error}; choose another with "
            "--metrics-listen, or port 0 for a free one"
        ) from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await endpoint.close()


def _family(address: Address) -> socket.AddressFamily:
    # One socket: port 0 would be another port for each address of a name.
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET


class _Endpoint:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request, answer it and close the connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            if len(self._connections) <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_TIMEOUT_S):
                    writer.write(self._response(await _read_head(reader)))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # whoever it was has gone, or sends nothing
        finally:
            del self._connections[task]
            writer.close()

    async def close(self) -> None:
        """Cut off whoever is still there."""
        tasks = list(self._connections)
        for writer in self._connections.values():
            writer.transport.abort()  # its task ends by itself; asyncio would log one that is cancelled
        await asyncio.gather(*tasks)

    def _response(self, head: str | None) -> bytes:
        line = (head or "").split("\r\n", 1)[0].split(" ")
        if head is None or len(line) != 3 or not line[2].startswith("HTTP/1."):
            return _message("400 Bad Request", "this port answers HTTP requests for /metrics\n")
        method, target, _ = line
        if target.partition("?")[0] != _PATH:
            return _message("404 Not Found", f"metrics are at {_PATH}\n")
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", "use GET\n", extra="Allow: GET, HEAD\r\n")
        encode, content_type = choose_encoder(_header(head, "accept"))
        try:
            body = encode(self._registry)
        except Exception:
            log.exception("metrics could not be collected")
            return _message("500 Internal Server Error", "the server's log has the details\n")
        return _message("200 OK", body, content_type, with_body=method == "GET")


async def _read_head(reader: asyncio.StreamReader) -> str | None:
    """Read up to the empty line that ends a request's head; None if it is too long."""
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        return None


def _header(head: str, name: str) -> str:
    for line in head.split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _message(
    status: str,
    body: bytes | str,
    content_type: str = "text/plain; charset=utf-8",
    *,
    extra: str = "",
    with_body: bool = True,
) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n"
        f"{extra}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (data if with_body else b"")
