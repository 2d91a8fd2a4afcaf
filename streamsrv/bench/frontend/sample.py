"""What was counted in one run, and medians over rounds."""

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one variant with one number of streams."""

    seconds: float
    num_messages: int
    """Messages of gRPC, or events of SSE; those that begin and end a stream included."""
    num_tokens: int
    server_cpu_s: float
    """Processor time of the whole server process."""
    wire_bytes: int
    worker_cpu_s: float = 0.0
    """Of that, our worker's thread's: the engine, the sampling of tokens, the detokeniser."""

    @property
    def messages_per_s(self) -> float:
        """Messages in a second of the clock."""
        return self.num_messages / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second of the clock."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_core_s(self) -> float:
        """Tokens in a second of the server's processor time."""
        return self.num_tokens / self.server_cpu_s

    @property
    def cpu_us_per_message(self) -> float:
        """The server's processor time for a message, in microseconds."""
        return self.server_cpu_s / self.num_messages * 1e6

    @property
    def front_us_per_message(self) -> float:
        """The same without the worker's thread."""
        return (self.server_cpu_s - self.worker_cpu_s) / self.num_messages * 1e6

    @property
    def messages_per_core_s(self) -> float:
        """Messages in a second of the server's processor time."""
        return self.num_messages / self.server_cpu_s

    @property
    def cpu_us_per_token(self) -> float:
        """The server's processor time for a token, in microseconds."""
        return self.server_cpu_s / self.num_tokens * 1e6

    @property
    def bytes_per_token(self) -> float:
        """All that the server put on the wire, for each token."""
        return self.wire_bytes / self.num_tokens

    @property
    def tokens_per_message(self) -> float:
        """Tokens in a message, on average."""
        return self.num_tokens / self.num_messages

    @property
    def busy(self) -> float:
        """Processor time for each second of the clock: at 1 the server's processor was the limit."""
        return self.server_cpu_s / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Seq[float]) -> "Spread":
        """Describe values, of which there is at least one."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def over(cls, samples: Seq[Sample], value: Callable[[Sample], float]) -> "Spread":
        """Describe what `value` says of each sample."""
        return cls.of([value(sample) for sample in samples])

    @classmethod
    def of_ratio(cls, above: Seq[Sample], below: Seq[Sample], value: Callable[[Sample], float]) -> "Spread":
        """Describe the ratios of two variants, each within its round."""
        return cls.of([value(a) / value(b) for a, b in zip(above, below, strict=True)])
