"""What is measured beside each other."""

from dataclasses import dataclass
from enum import Enum

from streamsrv.request import MAX_CHUNK_INTERVAL_S


class Server(Enum):
    """Who answers."""

    OURS = "streamsrv"
    BARE = "bare grpc.aio"
    SSE = "FastAPI SSE"


@dataclass(frozen=True, slots=True)
class Variant:
    """A server, and how it merges tokens."""

    server: Server
    tokens_per_message: int | None
    """How many it sends together; None for as many as are ready."""
    interval_ms: int = 0
    """Least time between two messages of a stream."""
    zstd: bool = True
    """Whether events may be compressed; of SSE nothing is."""

    @property
    def merging(self) -> str:
        """The merge setting in words."""
        if self.tokens_per_message is not None:
            return str(self.tokens_per_message)
        return f"ready each {self.interval_ms} ms" if self.interval_ms else "ready"

    @property
    def label(self) -> str:
        """Who answers, in words."""
        return self.server.value + ("" if self.zstd or self.server is Server.SSE else ", plain")


def ours(tokens_per_message: int | None, interval_ms: int | None = None, *, zstd: bool = True) -> Variant:
    """Our server. Chunks of an exact size are cut when all is there; the first goes at once."""
    if interval_ms is None:
        exact = tokens_per_message is not None and tokens_per_message > 1
        interval_ms = int(MAX_CHUNK_INTERVAL_S * 1000) if exact else 0
    return Variant(Server.OURS, tokens_per_message, interval_ms, zstd)


ONE, EIGHT, SIXTEEN = ours(1), ours(8), ours(16)
PLAIN_ONE, PLAIN_EIGHT = ours(1, zstd=False), ours(8, zstd=False)
READY, PACED = ours(None), ours(None, 50)
BARE_ONE, BARE_EIGHT = Variant(Server.BARE, 1), Variant(Server.BARE, 8)
SSE_ONE, SSE_EIGHT, SSE_SIXTEEN = (Variant(Server.SSE, n, zstd=False) for n in (1, 8, 16))
VARIANTS = (
    *(ONE, ours(4), EIGHT, SIXTEEN, READY, PACED, PLAIN_ONE, PLAIN_EIGHT),
    *(BARE_ONE, BARE_EIGHT, SSE_ONE, SSE_EIGHT, SSE_SIXTEEN),
)
