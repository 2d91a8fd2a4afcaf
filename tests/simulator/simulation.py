"""Random schedules on a virtual clock, with an engine that remembers what is in every cell of its cache.

Any mistake with blocks (one used twice, one found that holds something else, one read before it is written)
is an error of the engine, or another output than that of a run alone.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields

import numpy as np

from engines.api import CacheSpec
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import MAX_EXTRA_ROWS, Scheduled, Scheduler, SchedulerCounters, Step
from streamsrv.sequence import Sequence, SequenceStatus
from streamsrv.step import form_batch
from tests.simulator.cells import Cells, PagedCells, RowCells
from tests.simulator.load import Arrival, Plan, random_arrivals, random_plan
from tests.simulator.model import VOCABULARY, chain, next_token, origin


@dataclass(eq=False, slots=True)
class Run:
    """A sequence in the simulation, and what its run alone gives."""

    sequence: Sequence
    arrival: Arrival
    origin: int
    states: list[int] = field(default_factory=list)
    prompt_rows: int = 0
    started: bool = False
    num_overtaken: int = 0
    """How many started that rank behind it, while it stood in line."""
    last_token_step: int | None = None
    ended: bool = False

    def extend(self) -> None:
        """Keep the digests level with the tokens."""
        tokens, states = self.sequence.token_ids, self.states
        state = states[-1] if states else self.origin
        for token_id in tokens[len(states) :]:
            state = chain(state, token_id)
            states.append(state)


class Simulation:
    """A server under a random load, until all is done; it checks itself after every step."""

    def __init__(self, plan: Plan, arrivals: Seq[Arrival], rng: random.Random, *, guesses: bool) -> None:
        self.plan = plan
        self.rng = rng
        self.guesses = guesses
        self.scheduler = Scheduler(
            CacheSpec(plan.num_blocks, plan.block_size, 0),
            max_running=plan.max_running,
            max_step_tokens=plan.max_step_tokens,
            prefix_cache=plan.prefix_cache,
            whole_rows=plan.whole_rows,
        )
        self.cells: Cells = (RowCells if plan.whole_rows else PagedCells)(plan.num_blocks, plan.block_size)
        self.pending = sorted(arrivals, key=lambda a: a.at_s)
        self.runs: dict[int, Run] = {}
        self.all_runs: list[Run] = []
        self.now_s = 0.0
        self.num_steps = 0
        self.started: list[Sequence] = []

    @property
    def counters(self) -> SchedulerCounters:
        """The scheduler's."""
        return self.scheduler.counters

    def run(self) -> None:
        """Simulate until everybody has ended, and check that nothing is left."""
        work = sum((len(a.prompt) + a.max_tokens) * a.num_outputs for a in self.pending)
        bound = 50 + 40 * work
        while self.pending or self.runs:
            self.now_s += self.rng.random()
            self._arrive()
            self._end_some()
            step = self._step()
            if step is None:
                assert not self.runs, "sequences wait for a step that never comes"
                if self.pending:
                    self.now_s = max(self.now_s, self.pending[0].at_s)
            assert self.num_steps < bound, "no progress"
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_work
        assert scheduler.num_free_blocks == self.plan.num_blocks
        assert scheduler.schedule() is None

    def _arrive(self) -> None:
        while self.pending and self.pending[0].at_s <= self.now_s:
            arrival = self.pending.pop(0)
            request = GenerateRequest(
                "", arrival.prompt, stop=StopConditions(arrival.max_tokens), deadline_s=arrival.deadline_s
            )
            first = len(self.all_runs)
            for index in range(arrival.num_outputs):
                sequence = Sequence(
                    first + index,
                    request,
                    max_tokens=arrival.max_tokens,
                    eos_token_ids=frozenset(),
                    group_id=first,
                    priority=arrival.priority,
                    use_prefix_cache=arrival.use_prefix_cache,
                    cache_salt=arrival.salt,
                    wants_prompt_logits=arrival.wants_prompt_logits and index == 0,
                )
                # Equal tokens of those who must not share give different cells, so that sharing shows.
                shares = arrival.use_prefix_cache and self.plan.prefix_cache
                run = Run(sequence, arrival, origin(-1 - len(arrival.salt) if shares else first))
                run.extend()
                self.runs[sequence.sequence_id] = run
                self.all_runs.append(run)
                self.scheduler.add(sequence, caller=arrival.caller, now_s=arrival.at_s)

    def _end_some(self) -> None:
        """End those that are cancelled or too late, as a worker does between two steps."""
        for run in list(self.runs.values()):
            ends = [t for t in (run.arrival.abort_s, run.arrival.deadline_s) if t is not None]
            if ends and min(ends) <= self.now_s:
                self._end(run)

    def _end(self, run: Run) -> None:
        self.scheduler.finish(run.sequence)
        assert run.sequence.status is SequenceStatus.FINISHED
        assert not run.sequence.block_ids
        run.ended = True
        del self.runs[run.sequence.sequence_id]

    def _step(self) -> Step | None:
        guesses = self._guess() if self.guesses else {}
        step = self.scheduler.schedule(guesses)
        if step is None:
            return None
        self.num_steps += 1
        self._check_step(step)
        self._check_batch(step)
        states = self._compute(step)
        accepted: list[int | list[int]] = []
        done: list[Run] = []
        for part, rows in zip(step.parts, states, strict=True):
            run = self.runs[part.sequence.sequence_id]
            if part.samples:
                tokens = self._verify(part, rows)
                accepted.append(tokens[0] if len(tokens) == 1 and self.rng.random() < 0.5 else tokens)
        self.scheduler.update(step, accepted)
        for part in step.parts:
            run = self.runs[part.sequence.sequence_id]
            run.extend()
            run.prompt_rows += part.num_prompt_rows
            if part.samples:
                run.last_token_step = self.num_steps
            if run.sequence.num_output_tokens >= run.sequence.max_tokens:
                done.append(run)
        for run in done:
            self._check_output(run)
            self._end(run)
        self.scheduler.check_integrity()
        return step

    def _note_overtaken(self, started: Sequence) -> None:
        """Count for those who wait: seven of eight may pass each that ranks before them, and themselves."""
        for run in self.runs.values():
            if run.sequence.status is SequenceStatus.WAITING and started.rank > run.sequence.rank:
                run.num_overtaken += 1
                ahead = sum(other.sequence.rank <= run.sequence.rank for other in self.all_runs)
                assert run.num_overtaken <= 7 * (ahead + 5), "starved"

    def _guess(self) -> dict[int, list[int]]:
        """Guess for some, right or wrong, more than is allowed at times."""
        guesses = {}
        for sequence_id, run in self.runs.items():
            if self.rng.random() < 0.5:
                state, own = run.states[-1], []
                for _ in range(self.rng.randrange(6)):
                    token_id = next_token(state)
                    if self.rng.random() < 0.3:
                        token_id = self.rng.randrange(VOCABULARY)
                    own.append(token_id)
                    state = chain(state, token_id)
                guesses[sequence_id] = own
        return guesses

    def _check_step(self, step: Step) -> None:
        plan, batch = self.plan, step.batch
        assert 0 < batch.num_tokens <= plan.max_step_tokens
        assert 0 < batch.num_sequences <= plan.max_running
        assert len({part.sequence.sequence_id for part in step.parts}) == len(step.parts)
        assert sum(part.num_prompt_rows + part.num_drafts for part in step.parts) <= MAX_EXTRA_ROWS
        assert len(batch.logit_rows) == sum(p.num_prompt_rows + p.num_sampled_rows for p in step.parts)
        in_step = {part.sequence.sequence_id for part in step.parts}
        for run in self.runs.values():
            sequence = run.sequence
            if sequence.status is SequenceStatus.RUNNING:
                if not run.started:
                    run.started = True
                    self.started.append(sequence)
                    self._note_overtaken(sequence)
                if sequence.num_uncomputed == 1 and sequence.num_output_tokens:
                    assert sequence.sequence_id in in_step, "a running stream did not get its token"
        for part in step.parts:
            sequence = part.sequence
            assert sequence.num_output_tokens + part.num_sampled_rows <= sequence.max_tokens
            left = sequence.num_uncomputed - part.num_new
            assert left != 1 or part.num_new <= 2, "the last piece has one token"

    @staticmethod
    def _check_batch(step: Step) -> None:
        """See that parts that are known to be alike are laid out as any others."""
        for column in fields(plain := form_batch(step.parts, step.batch.copies)):
            ours, theirs = getattr(step.batch, column.name), getattr(plain, column.name)
            assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)

    def _compute(self, step: Step) -> list[list[int]]:
        """Take the step as an engine does: the digests at the rows to sample from, for each part."""
        batch, runs = step.batch, [self.runs[part.sequence.sequence_id] for part in step.parts]
        pasts = [run.states[:past] for run, past in zip(runs, batch.past_lens.tolist(), strict=True)]
        states = iter(self.cells.compute(batch, pasts, [run.origin for run in runs]))
        sampled = []
        for part, run in zip(step.parts, runs, strict=True):
            first = part.sequence.num_prompt_logits
            for index in range(first, first + part.num_prompt_rows):
                assert next(states) == run.states[index], "a row of another token than the prompt's next"
                assert index < part.sequence.num_prompt_tokens - 1
            sampled.append([next(states) for _ in range(part.num_sampled_rows)])
            if part.samples:
                assert sampled[-1][0] == run.states[-1], "a row of another token than the last"
        assert next(states, None) is None
        return sampled

    def _verify(self, part: Scheduled, states: list[int]) -> list[int]:
        """The guesses that are what the model says, and its token after them; at times certain ones more."""
        tokens = []
        for guess, state in zip([*part.guesses, None], states, strict=True):
            tokens.append(next_token(state))
            if tokens[-1] != guess:
                break
        sequence = part.sequence
        room = sequence.max_tokens - sequence.num_output_tokens - len(tokens)
        if self.guesses and room > 0 and self.rng.random() < 0.1:
            state = self.runs[sequence.sequence_id].states[-1]
            for token_id in tokens:
                state = chain(state, token_id)
            for _ in range(self.rng.randint(1, min(room, 3))):
                tokens.append(next_token(state))
                state = chain(state, tokens[-1])
        return tokens

    def _check_output(self, run: Run) -> None:
        sequence, state = run.sequence, run.origin
        for token_id in run.arrival.prompt:
            state = chain(state, token_id)
        for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
            assert token_id == next_token(state), "another output than alone"
            state = chain(state, token_id)
        assert sequence.num_output_tokens == sequence.max_tokens
        if sequence.wants_prompt_logits:
            assert run.prompt_rows == sequence.num_prompt_tokens - 1
            assert sequence.num_cached_tokens == 0
        assert sequence.num_cached_tokens <= max(0, sequence.num_prompt_tokens - 2)


def simulate(seed: int) -> Simulation:
    """Run one random schedule to its end."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    simulation = Simulation(plan, random_arrivals(plan, rng), rng, guesses=rng.random() < 0.6)
    simulation.run()
    return simulation
