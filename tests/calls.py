"""A streaming call read message by message, through the generated stub alone."""

from typing import Any, Self

import grpc

from streamsrv.chunks import ChunkDecoder
from streamsrv.client import call_failed
from streamsrv.v1 import inference_pb2 as pb

# A client with these takes few small messages before its flow control stops the server.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


class Call:
    """A call of Generate or Resume, and what it has received."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.decoder = ChunkDecoder()
        self.start = pb.StreamStart()
        self.stream_id = ""
        self.ids: list[int] = []
        self.text = ""
        self.num_tokens = 0
        self.usage: pb.Usage | None = None

    @property
    def ended(self) -> bool:
        """Whether its StreamEnd has come."""
        return self.usage is not None

    async def read(self) -> bool:
        """Take one message; False at the end.

        Raises:
            CallFailedError: the call ended with a status that is not OK.
            StreamCorruptError: something is missing, repeated or out of order.

        """
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise call_failed(error) from None
        if not isinstance(message, pb.GenerateResponse):
            return False
        if message.WhichOneof("payload") == "start":
            self.start, self.stream_id = message.start, message.stream_id
        for event in self.decoder.decode(message).events:
            self.ids += event.tokens.token_ids
            if event.HasField("tokens"):
                self.num_tokens += event.num_positions or 1
            self.text += event.tokens.text + event.output_end.text
            if event.HasField("stream_end"):
                self.usage = event.stream_end.usage
        return True

    async def rest(self) -> Self:
        """Read to the end."""
        while await self.read():
            pass
        return self
