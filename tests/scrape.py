"""What Prometheus sees of a server."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families


async def http(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Send some bytes; the head and the body of what comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        data = await reader.read()
    finally:
        writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


class Scrape:
    """One scrape of a server with one model: call it with a sample's name and its other labels."""

    def __init__(self, text: str) -> None:
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "model"}
                self._samples[sample.name, tuple(sorted(labels.items()))] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """Give a sample's value; 0 where there is none."""
        return self._samples.get((f"streamsrv_{name}", tuple(sorted(labels.items()))), 0.0)

    @classmethod
    async def of(cls, port: int | None) -> "Scrape":
        """Ask the server whose metrics are on this port."""
        assert port is not None, "the server was started without metrics"
        head, body = await http(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK"), head
        return cls(body.decode())
