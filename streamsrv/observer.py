"""What a pool tells whoever keeps count of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from streamsrv.scheduler import SchedulerCounters
from streamsrv.stream import Stream


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of a worker, and what it brought to the requests that took part."""

    duration_s: float
    """Time on the worker's own thread: computing, sampling, detokenising."""
    num_sequences: int
    num_tokens: int
    """Tokens computed, those of prompts included."""
    num_output_tokens: int
    """Tokens sampled."""
    num_prompt_tokens: int = 0
    """Length of the prompts whose first token came with this step."""
    queue_times_s: tuple[float, ...] = ()
    """Of each request that was computed for the first time."""
    times_to_first_token_s: tuple[float, ...] = ()
    """Of each request that got its first token."""
    token_gaps_s: Mapping[float, int] = field(default_factory=dict)
    """Times since the token before, each with the number of requests that have it: nearly always one time
    for all, because a step brings a token to each."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool stands at this moment."""

    num_running: int
    """Requests that own blocks."""
    num_waiting: int
    """Requests that own none."""
    num_streams: int
    """Streams that can be read."""
    num_readers: int
    """Streams that are being read."""
    log_bytes: int
    """Memory of what streams hold for their readers."""
    log_limit_bytes: int
    num_blocks: int
    """Blocks of the caches of all workers that have one."""
    num_used_blocks: int
    num_ready_workers: int
    counters: SchedulerCounters
    """What the schedulers of all workers have done, since the start."""
    num_restarts: int
    """How often a worker's lost context was to be made again, since the start."""


class PoolObserver(Protocol):
    """Is told what happens, on the loop's thread. Its methods must be quick, and must not raise."""

    def step_taken(self, step: StepReport) -> None:
        """A worker has taken a step."""
        ...

    def request_ended(self, stream: Stream) -> None:
        """A request has ended, in whatever way; `stream.progress` says how."""
        ...


class Unobserved:
    """Nobody keeps count."""

    def step_taken(self, step: StepReport) -> None:
        """Do nothing."""

    def request_ended(self, stream: Stream) -> None:
        """Do nothing."""
