"""One request, read to its end with the time of its first token."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from streamsrv.client import Client
from streamsrv.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a request."""

    first_token_s: float
    """From the call to the first token."""
    decode_s: float
    """From the first token to the end."""
    token_ids: tuple[int, ...]
    usage: pb.Usage

    @property
    def decode_rate(self) -> float:
        """Tokens/s behind the first one."""
        return (len(self.token_ids) - 1) / self.decode_s


async def ask(client: Client, request: pb.GenerateRequest) -> Asked:
    """Send a request and read its stream.

    Raises:
        CallFailedError: the server refused it.
    """
    began_s = time.perf_counter()
    async with client.send(request) as stream:
        async for _ in stream:
            pass
    took_s = time.perf_counter() - began_s
    assert stream.first_token_s is not None, "a stream without a token"
    assert stream.usage is not None, "a stream without its end"
    return Asked(stream.first_token_s, took_s - stream.first_token_s, stream.token_ids, stream.usage)


async def ask_all(client: Client, requests: Iterable[pb.GenerateRequest]) -> list[Asked]:
    """Send requests at the same time."""
    return list(await asyncio.gather(*(ask(client, request) for request in requests)))
