"""What one output of a generation has told so far."""

from dataclasses import dataclass, field

from streamsrv.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Output:
    """One output, as far as it was received."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens, where they were asked for."""
    top_logprobs: list[pb.TopLogprobs] = field(default_factory=list)
    """The most probable tokens at each one's place, where they were asked for."""
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    """`STOP`, `LENGTH` or `CANCELLED`, once it has ended."""
    matched: int | str | None = None
    """The token id or the text that stopped it, if one did."""
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self._texts)

    def take(self, event: pb.Event) -> None:
        """Take an event that is about it."""
        match event.WhichOneof("kind"):
            case "tokens":
                run = event.tokens
                self._texts.append(run.text)
                self.token_ids += run.token_ids
                self.logprobs += run.logprobs
                self.top_logprobs += run.top_logprobs
            case "tool_call":
                self.tool_calls.append(event.tool_call.call)
            case "output_end":
                end = event.output_end
                self._texts.append(end.text)
                self.finish_reason = pb.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_")
                matched = end.WhichOneof("matched")
                self.matched = getattr(end, matched) if matched else None


def output_index_of(event: pb.Event) -> int | None:
    """Tell which output an event is about; None where it is about none."""
    kind = event.WhichOneof("kind")
    if kind in ("tokens", "tool_call", "output_end"):
        index: int = getattr(event, kind).output_index
        return index
    return None
