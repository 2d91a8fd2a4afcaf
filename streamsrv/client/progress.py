"""What a generation has told so far."""

from collections.abc import Sequence as Seq

from streamsrv.client.follower import Follower
from streamsrv.client.output import Output
from streamsrv.v1 import inference_pb2 as pb


class Progress:
    """What a generation has told so far; the part that both of the clients' generations share."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    @property
    def request_id(self) -> str:
        """The request's name: the one given, or one made up."""
        return self._follower.request_id

    @property
    def stream_id(self) -> str:
        """The stream's tag; empty before its first message."""
        return self._follower.stream_id

    @property
    def position(self) -> int:
        """The first position of the stream that was not received."""
        return self._follower.position

    @property
    def received_text(self) -> str:
        """The first output's text so far."""
        return self._follower.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first output's tokens so far."""
        return self._follower.token_ids

    @property
    def finish_reason(self) -> str | None:
        """`STOP`, `LENGTH` or `CANCELLED`, once the first output has ended."""
        return self._follower.outputs[0].finish_reason

    @property
    def matched(self) -> int | str | None:
        """The token id or the text that stopped the first output, if one did."""
        return self._follower.outputs[0].matched

    @property
    def outputs(self) -> Seq[Output]:
        """All outputs, as far as they were received, in the order of their index."""
        return self._follower.outputs

    @property
    def prompt(self) -> Seq[pb.PromptTokens]:
        """The prompt's pieces, where the request asked for an echo or for its log probabilities."""
        return self._follower.prompt

    @property
    def usage(self) -> pb.Usage | None:
        """What it cost, once the stream has ended."""
        return self._follower.usage

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return self._follower.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of gRPC messages received, over all calls."""
        return self._follower.num_bytes

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the call to the first token."""
        return self._follower.first_token_s

    @property
    def num_resumes(self) -> int:
        """How often the stream was picked up again after its connection had broken."""
        return self._follower.num_resumes

    @property
    def num_resends(self) -> int:
        """How often the request was sent again because the server did not know the one that was lost.

        With several servers behind one address, that one may run on elsewhere, unread, until its window ends.
        """
        return self._follower.num_resends
