"""Contestants in turn, round after round, on the same prompts."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from streamsrv.bench.cpu_time import CpuClock
from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.checks import check_lengths, share_of_equal_firsts
from streamsrv.bench.peers.figures import Figures, PeerStream
from streamsrv.bench.peers.peer import Contestant
from streamsrv.bench.prompts import PromptMaker

OURS = "streamsrv"
"""The name of what all others are held against."""

_WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Results:
    """What was measured, by number of streams and contestant; the lists are in the order of rounds."""

    figures: dict[int, dict[str, list[Figures]]] = field(default_factory=dict)
    equal_firsts: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """The part of the prompts after which a contestant begins as ours does."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a contestant could not be started."""
    failed_at: dict[int, dict[str, str]] = field(default_factory=dict)
    """Why a contestant is not, or no longer, measured with so many streams."""
    idle_cpu: float = 0.0
    """The most that those together took whose turn it was not, in processors."""


class Rounds:
    """Lets each contestant run alone, the first of a round being another each time."""

    def __init__(self, maker: PromptMaker, max_tokens: int, results: Results) -> None:
        self._maker = maker
        self._max_tokens = max_tokens
        self._results = results
        self._next_prompt = 0

    async def run(
        self,
        contestants: dict[str, Contestant],
        batches: Seq[int],
        num_rounds: int,
        say: Callable[[str], None],
    ) -> None:
        """Run all, with a round before that warms up and is not counted.

        Raises:
            BenchError: ours failed. A peer that fails is no longer run with so many streams.
        """
        for number in range(-1, num_rounds):
            for batch in batches:
                say(f"{batch} streams, round {number + 1} of {num_rounds}")
                failed = self._results.failed_at.get(batch, {})
                names = [name for name in contestants if name not in failed]
                turn = number % len(names)
                await self._round(
                    {name: contestants[name] for name in names[turn:] + names[:turn]},
                    batch,
                    counts=number >= 0,
                )

    async def _round(self, contestants: dict[str, Contestant], batch: int, *, counts: bool) -> None:
        prompts = [self._maker.make(self._next_prompt + i) for i in range(batch)]
        self._next_prompt += batch
        max_tokens = self._max_tokens if counts else min(_WARM_UP_TOKENS, self._max_tokens)
        runs: dict[str, list[PeerStream]] = {}
        for name in contestants:
            try:
                runs[name] = await self._alone(contestants, name, prompts, max_tokens)
                check_lengths(runs[name], batch, max_tokens)
            except BenchError as error:
                if name == OURS:
                    raise
                self._results.failed_at.setdefault(batch, {})[name] = str(error)
                runs.pop(name, None)
        if not counts:
            return
        for name, streams in runs.items():
            kept = self._results.figures.setdefault(batch, {}).setdefault(name, [])
            kept.append(Figures.of(streams))
            shares = self._results.equal_firsts.setdefault(batch, {}).setdefault(name, [])
            shares.append(share_of_equal_firsts(streams, runs[OURS]))

    async def _alone(
        self, contestants: dict[str, Contestant], name: str, prompts: Seq[Seq[int]], max_tokens: int
    ) -> list[PeerStream]:
        """Let one run, and see that the others rest."""
        others = [contestant for other, contestant in contestants.items() if other != name]
        before_s = sum(map(_cpu_s, others))
        streams = await contestants[name].run(prompts, max_tokens)
        idle_s = sum(map(_cpu_s, others)) - before_s
        took_s = max((stream.last_s for stream in streams if stream.arrivals), default=0.0)
        # Times are told in hundredths of a second: of a short run nothing can be said.
        if took_s >= 1:
            self._results.idle_cpu = max(self._results.idle_cpu, idle_s / took_s)
        return streams


def _cpu_s(contestant: Contestant) -> float:
    """Processor time so far; 0 for one whose process has ended, which its own turn will show."""
    try:
        return CpuClock(contestant.pid).seconds()
    except BenchError:
        return 0.0
