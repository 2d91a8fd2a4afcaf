"""Random schedules on a virtual clock, with an engine that remembers what is in every cell of its cache.

The model's next token depends on all tokens before it and on nothing else, so any mistake with blocks (one
used twice, one found that holds something else, one read before it is written) is an error of the engine,
or another output than that of a run alone.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engines.api import CacheSpec, StepBatch
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import MAX_PROMPT_LOGITS, Scheduled, Scheduler, SchedulerCounters, Step
from streamsrv.sequence import Sequence, SequenceStatus

VOCABULARY = 5  # few, so that prompts meet and guesses come true
_MASK = (1 << 61) - 1


def chain(state: int, token_id: int) -> int:
    """What a cell holds: a digest of its token and of all before it."""
    return (state * 6364136223846793005 + token_id * 1442695040888963407 + 1013904223) & _MASK


def next_token(state: int) -> int:
    """The token after those with this digest."""
    return (state >> 23) % VOCABULARY


@dataclass(frozen=True, slots=True)
class Plan:
    """A server: its cache and its bounds."""

    num_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    prefix_cache: bool
    whole_rows: bool

    @property
    def most_tokens(self) -> int:
        """Tokens that a sequence may have."""
        return self.block_size if self.whole_rows else self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_outputs: int = 1
    priority: int = 0
    caller: str = ""
    salt: str = ""
    use_prefix_cache: bool = True
    wants_prompt_logits: bool = False
    deadline_s: float | None = None
    abort_s: float | None = None


@dataclass(eq=False, slots=True)
class Run:
    """A sequence in the simulation, and what its run alone gives."""

    sequence: Sequence
    arrival: Arrival
    origin: int
    states: list[int] = field(default_factory=list)
    prompt_rows: int = 0
    started_step: int | None = None
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
        self.cells = [0] * (plan.num_blocks * plan.block_size)
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
                origin = chain(7, -1 - len(arrival.salt) if shares else first) & _MASK
                run = Run(sequence, arrival, origin)
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
        preemptions = self.counters.num_preemptions
        step = self.scheduler.schedule(guesses)
        if step is None:
            return None
        self.num_steps += 1
        self._check_step(step, self.counters.num_preemptions > preemptions)
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

    def _check_step(self, step: Step, has_preempted: bool) -> None:
        plan, batch = self.plan, step.batch
        assert 0 < batch.num_tokens <= plan.max_step_tokens
        assert 0 < batch.num_sequences <= plan.max_running
        assert len({part.sequence.sequence_id for part in step.parts}) == len(step.parts)
        assert sum(part.num_prompt_rows for part in step.parts) <= MAX_PROMPT_LOGITS
        assert len(batch.logit_rows) == sum(p.num_prompt_rows + p.num_sampled_rows for p in step.parts)
        in_step = {part.sequence.sequence_id for part in step.parts}
        for run in self.runs.values():
            sequence = run.sequence
            if sequence.status is SequenceStatus.RUNNING:
                if run.started_step is None:
                    run.started_step = self.num_steps
                    self.started.append(sequence)
                if sequence.num_uncomputed == 1 and sequence.num_output_tokens:
                    assert sequence.sequence_id in in_step, "a running stream did not get its token"
        for part in step.parts:
            sequence = part.sequence
            assert sequence.num_output_tokens + part.num_sampled_rows <= sequence.max_tokens
            left = sequence.num_uncomputed - part.num_new
            assert left != 1 or part.num_new <= 2, "the last piece has one token"
        if has_preempted and not plan.whole_rows:
            assert self.scheduler.num_running

    def _compute(self, step: Step) -> list[list[int]]:
        """Take the step as an engine does: the digests at the rows to sample from, for each part."""
        batch, size = step.batch, self.plan.block_size
        cells = self.cells
        for copy in batch.copies:
            assert self.plan.whole_rows
            source, target = copy.source * size, copy.target * size
            cells[target : target + copy.num_tokens] = cells[source : source + copy.num_tokens]
        tokens = batch.token_ids.tolist()
        begins, past_lens = batch.query_begins.tolist(), batch.past_lens.tolist()
        blocks, block_begins = batch.block_ids.tolist(), batch.block_begins.tolist()
        wanted = batch.logit_rows.tolist()
        after = [0] * len(tokens)
        writes: dict[int, int] = {}
        reads: set[int] = set()
        for b, part in enumerate(step.parts):
            run = self.runs[part.sequence.sequence_id]
            past, own = past_lens[b], blocks[block_begins[b] : block_begins[b + 1]]
            places = [block * size + i for block in own for i in range(size)]
            assert [cells[p] for p in places[:past]] == run.states[:past], "the past is not in the cache"
            reads.update(places[:past])
            state = run.states[past - 1] if past else run.origin
            for i, place in zip(range(begins[b], begins[b + 1]), places[past:], strict=False):
                state = chain(state, tokens[i])
                assert place not in writes, "two sequences write the same cell"
                writes[place] = after[i] = state
            assert len(places) >= past + begins[b + 1] - begins[b], "too few blocks"
        assert not reads & writes.keys(), "a cell is read and written in one step"
        for place, state in writes.items():
            cells[place] = state
        if self.plan.whole_rows:
            self._clobber_unused(batch)
        rows = iter(wanted)
        result = []
        for b, part in enumerate(step.parts):
            past, n = past_lens[b], part.sequence.num_prompt_tokens
            for _ in range(part.num_prompt_rows):
                run = self.runs[part.sequence.sequence_id]
                row = next(rows) - begins[b] + past
                assert row == part.sequence.num_prompt_logits + _
                assert row < n - 1
            sampled = [next(rows) for _ in range(part.num_sampled_rows)]
            assert not sampled or sampled[-1] == begins[b + 1] - 1
            result.append([after[row] for row in sampled])
        assert next(rows, None) is None
        return result

    def _clobber_unused(self, batch: StepBatch) -> None:
        """Write rubbish behind each row's new tokens, as an engine does in rows that it passes over."""
        size = self.plan.block_size
        for block, past, begin, end in zip(
            batch.block_ids.tolist(),
            batch.past_lens.tolist(),
            batch.query_begins[:-1].tolist(),
            batch.query_begins[1:].tolist(),
            strict=True,
        ):
            if past + end - begin < size:
                self.cells[block * size + past + end - begin] = -1

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


def random_plan(rng: random.Random) -> Plan:
    """A small server, so that it is short of everything."""
    max_running = rng.randint(1, 6)
    whole_rows = rng.random() < 0.35
    return Plan(
        num_blocks=rng.randint(1, 8) if whole_rows else rng.randint(2, 24),
        block_size=rng.choice([32, 64]) if whole_rows else rng.choice([1, 2, 4, 4, 8]),
        max_running=max_running,
        max_step_tokens=max_running + rng.choice([0, 1, 3, 8, 30]),
        prefix_cache=rng.random() < 0.85,
        whole_rows=whole_rows,
    )


def random_arrivals(plan: Plan, rng: random.Random) -> list[Arrival]:
    """Requests that share beginnings, of several callers, priorities and salts."""
    stems = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(2)]
    callers = ["", "a", "b"][: rng.randint(1, 3)]
    salts = ["", "x"][: rng.randint(1, 2)]
    levels = [0] if rng.random() < 0.4 else [-100, -3, 0, 2, 100]
    spread = rng.choice([0.0, 3.0, 20.0])
    arrivals = []
    for _ in range(rng.randint(1, 9)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 8))]
        prompt = prompt[: plan.most_tokens - 1] if plan.most_tokens > 1 else prompt[:1]
        room = plan.most_tokens - len(prompt)
        if room < 1:
            continue
        at_s = rng.random() * spread
        arrivals.append(
            Arrival(
                at_s,
                tuple(prompt),
                max_tokens=rng.randint(1, min(room, 12)),
                num_outputs=rng.choice([1, 1, 1, 2, 4]),
                priority=rng.choice(levels),
                caller=rng.choice(callers),
                salt=rng.choice(salts),
                use_prefix_cache=rng.random() < 0.85,
                wants_prompt_logits=rng.random() < 0.1,
                deadline_s=at_s + rng.random() * 40 if rng.random() < 0.15 else None,
                abort_s=at_s + rng.random() * 15 if rng.random() < 0.15 else None,
            )
        )
    return arrivals


def simulate(seed: int) -> Simulation:
    """Run one random schedule to its end."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    simulation = Simulation(plan, random_arrivals(plan, rng), rng, guesses=rng.random() < 0.6)
    simulation.run()
    return simulation
