"""One message's events."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from streamsrv.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message's events."""

    position: int
    """Of its first element in the stream."""
    events: tuple[pb.Event, ...]
    num_bytes: int
    """Of the gRPC message as received, with its 5-byte prefix and without HTTP/2's framing."""
    text: str
    """Text of the first output, to be appended."""
    token_ids: Seq[int]
    """Ids of the first output's tokens."""
    num_tokens: int
    """Tokens of all outputs."""

    @classmethod
    def of(cls, position: int, events: tuple[pb.Event, ...], num_bytes: int) -> "Chunk":
        """Sum up events, the first of which stands at `position`."""
        texts: list[str] = []
        token_ids: list[int] = []
        num_tokens = 0
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "tokens":
                num_tokens += event.num_positions if event.HasField("num_positions") else 1
                if event.tokens.output_index == 0:
                    texts.append(event.tokens.text)
                    token_ids += event.tokens.token_ids
            elif kind == "output_end" and event.output_end.output_index == 0:
                texts.append(event.output_end.text)
        return cls(position, events, num_bytes, "".join(texts), token_ids, num_tokens)
