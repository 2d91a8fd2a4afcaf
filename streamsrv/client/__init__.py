"""The Python client, asynchronous and blocking.

    async with Client("127.0.0.1:50051") as client:
        async with client.generate("The capital of France is", max_tokens=16) as stream:
            async for chunk in stream:
                print(chunk.text, end="")
        print(stream.finish_reason, stream.usage)

    with SyncClient("127.0.0.1:50051") as client:
        for text in client.generate("The capital of France is", max_tokens=16).texts():
            print(text, end="")

A stream whose connection breaks is resumed where it was.
"""

from streamsrv.client.aio import Client, Generation
from streamsrv.client.chunk import Chunk
from streamsrv.client.request import ChatMessages, PromptLike, make_prompt, make_request
from streamsrv.client.status import call_failed
from streamsrv.client.sync import SyncClient, SyncGeneration

__all__ = [
    "ChatMessages",
    "Chunk",
    "Client",
    "Generation",
    "PromptLike",
    "SyncClient",
    "SyncGeneration",
    "call_failed",
    "make_prompt",
    "make_request",
]
