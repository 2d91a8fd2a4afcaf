"""What a bench says to its load processes, and what they say to it."""

import pickle
from dataclasses import dataclass
from typing import Any, TypeAlias

from streamsrv.bench.endpoint import Endpoint
from streamsrv.bench.load import LoadPlan, LoadRun
from streamsrv.bench.relay import ByteCount
from streamsrv.bench.schedule import OpenPlan
from streamsrv.bench.workload import Workload

Plan: TypeAlias = LoadPlan | OpenPlan

HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a load is one process's: of all requests, each `num_shares`-th."""

    number: int
    """From 0."""
    num_shares: int

    def __post_init__(self) -> None:
        """Check what the command line has checked already."""
        assert 0 <= self.number < self.num_shares

    def of(self, count: int) -> int:
        """Give this share of a number of things, so that all shares together are the number."""
        return len(range(self.number, count, self.num_shares))

    def index(self, own_index: int) -> int:
        """Give the number, among all requests, of one of this share's."""
        return self.number + self.num_shares * own_index


@dataclass(frozen=True, slots=True)
class Job:
    """The first message: all that stays the same."""

    endpoint: Endpoint
    workload: Workload
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """Put a share of a load on the server."""

    plan: Plan
    share: Share
    first_index: int
    """The number of the load's first request."""
    begin_s: float
    """When all processes begin, by `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run now, and answer it with what was seen. A run that begins later ends at once."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to a job: requests can be made."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What has ended since the last one."""

    num_requests: int
    num_tokens: int
    num_failed: int
    num_unavailable: int
    """Of those that failed: whose server could not be reached, or was about to stop."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a run."""

    run: LoadRun
    cpu_s: float
    """Processor time of the process during the run."""
    wire: ByteCount | None
    """On its connection; None if it was not to be had."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer where something cannot be done."""

    message: str


def encode(message: Any) -> bytes:
    """Make a frame: the length of what follows, and the message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    """Read the length of what follows a header."""
    return int.from_bytes(header, "little")


def decode(body: bytes) -> Any:
    """Read a message."""
    return pickle.loads(body)  # noqa: S301 (from our own parent or child, through a pipe of ours)
