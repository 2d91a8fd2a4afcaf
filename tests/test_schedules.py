"""Random schedules: no starvation, no leak, no block used twice, right tokens, progress always."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import CacheSpec
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import Scheduler
from streamsrv.sequence import Sequence
from tests.simulator.load import Arrival, Plan
from tests.simulator.model import VOCABULARY
from tests.simulator.plain import PlainScheduler
from tests.simulator.simulation import Simulation, simulate


@pytest.mark.parametrize("first", range(0, 2_000, 500))
def test_a_few_thousand_random_schedules_end_as_they_should(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(2_000, 102_000, 10_000))
def test_a_hundred_thousand_random_schedules_end_as_they_should(first: int) -> None:
    for seed in range(first, first + 10_000):
        simulate(seed)


few_tokens = st.integers(0, VOCABULARY - 1)
arrival = st.builds(
    Arrival,
    st.floats(0, 9),
    st.lists(few_tokens, min_size=1, max_size=24).map(tuple),
    st.integers(1, 8),
    num_outputs=st.integers(1, 3),
    priority=st.sampled_from([-100, 0, 1, 100]),
    caller=st.sampled_from(["", "a"]),
    salt=st.sampled_from(["", "x"]),
    use_prefix_cache=st.booleans(),
    wants_prompt_logits=st.booleans(),
    abort_s=st.none() | st.floats(0, 20),
)
plan = st.builds(
    Plan,
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    max_running=st.integers(1, 4),
    max_step_tokens=st.integers(4, 20),
    prefix_cache=st.booleans(),
    whole_rows=st.just(False),
) | st.builds(
    Plan,
    num_blocks=st.integers(1, 6),
    block_size=st.just(32),
    max_running=st.integers(1, 4),
    max_step_tokens=st.integers(4, 20),
    prefix_cache=st.booleans(),
    whole_rows=st.just(True),
)


@given(plan, st.lists(arrival, max_size=8), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_schedule_ends_as_it_should(
    plan: Plan, arrivals: list[Arrival], rng: random.Random, guesses: bool
) -> None:
    fitting = [a for a in arrivals if len(a.prompt) + a.max_tokens <= plan.most_tokens]
    Simulation(plan, fitting, rng, guesses=guesses).run()


def steps_differ(seed: int) -> str:
    """Run the scheduler beside the plain one; what is different, if anything."""
    rng = random.Random(seed)
    block_size, num_blocks, max_running = rng.randint(1, 5), rng.randint(1, 12), rng.randint(1, 5)
    max_step_tokens = max_running + rng.randint(0, 12)
    scheduler = Scheduler(
        CacheSpec(num_blocks, block_size, 0), max_running=max_running, max_step_tokens=max_step_tokens
    )
    plain = PlainScheduler(num_blocks, block_size, max_running, max_step_tokens)
    live: dict[int, Sequence] = {}
    number = 0
    for now in range(60):
        while now < 20 and rng.random() < 0.3:
            prompt = rng.randint(1, 20)
            if (room := num_blocks * block_size - prompt) > 0:
                output = rng.randint(1, min(11, room))
                request = GenerateRequest("", (1,) * prompt, stop=StopConditions(output))
                live[number] = Sequence(number, request, max_tokens=output, eos_token_ids=frozenset())
                scheduler.add(live[number], now_s=float(now))
                plain.add(number, prompt)
                number += 1
        ended = [n for n in live if rng.random() < 0.01]
        step = scheduler.schedule() if not ended else None
        if step is not None:
            theirs = [(part.number, part.num_new, part.samples) for part in plain.schedule()]
            ours = [(part.sequence.sequence_id, part.num_new, part.samples) for part in step.parts]
            if ours != theirs:
                return f"step {now}: {ours} instead of {theirs}"
            scheduler.update(step, [0] * len(step.sampled))
            ended = [s.sequence_id for s in step.sampled if s.num_output_tokens >= s.max_tokens]
        for n in ended:
            scheduler.finish(live.pop(n))
            plain.finish(n)
    return ""


def test_with_one_caller_and_nothing_shared_it_does_what_the_plain_scheduler_does() -> None:
    for seed in range(1_000):
        assert steps_differ(seed) == ""


SMALL = Plan(16, 4, max_running=1, max_step_tokens=8, prefix_cache=False, whole_rows=False)


def starts_of(arrivals: list[Arrival], plan: Plan = SMALL) -> list[int]:
    """In which order requests of one output start, as indices."""
    simulation = Simulation(plan, arrivals, random.Random(0), guesses=False)
    simulation.run()
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at_s)
    return [order[sequence.sequence_id] for sequence in simulation.started]


def test_the_lowest_priority_starts_while_the_highest_keeps_coming() -> None:
    low = Arrival(0.0, (1, 2, 3), 4, priority=-100)
    # A request takes four steps of half a second, and one comes each second: the line grows without end.
    others = [Arrival(float(i), (1, 2, 3), 4, priority=100) for i in range(400)]
    place = starts_of([*others, low]).index(400)
    # It rises by one level a second: whoever comes 200 seconds after it comes behind it.
    assert 195 <= place <= 201


def test_one_start_in_eight_goes_to_the_oldest_however_many_new_callers_come() -> None:
    greedy = [Arrival(0.0, (1, 2, 3), 4, caller="greedy") for _ in range(12)]
    others = [Arrival(1 + i / 10, (1, 2, 3), 4, caller=f"new {i}") for i in range(60)]
    starts = starts_of([*greedy, *others])
    places = [place for place, index in enumerate(starts) if index < len(greedy)]
    assert places[0] == 0
    assert max(after - before for before, after in pairwise(places)) <= 8


def test_callers_get_equal_shares_however_many_requests_each_has() -> None:
    many = [Arrival(0.0, (1, 2, 3), 4, caller="many") for _ in range(24)]
    few = [Arrival(0.1, (1, 2, 3), 4, caller="few") for _ in range(6)]
    starts = starts_of([*many, *few])
    last_of_few = max(place for place, index in enumerate(starts) if index >= len(many))
    assert last_of_few <= 15


def test_shares_are_counted_in_tokens_and_not_in_requests() -> None:
    long = [Arrival(0.0, (1,) * 40, 4, caller="long") for _ in range(5)]
    short = [Arrival(0.0, (1,) * 6, 4, caller="short") for _ in range(20)]
    starts = starts_of([*long, *short])
    second_long = [place for place, index in enumerate(starts) if index < len(long)][1]
    assert 4 <= second_long <= 8


def test_the_higher_priority_starts_first() -> None:
    levels = [0, 5, -5, 100, -100, 0]
    arrivals = [Arrival(0.0, (1, 2, 3), 2, priority=level) for level in levels]
    assert starts_of(arrivals) == [3, 1, 0, 5, 2, 4]


def test_a_near_deadline_goes_first_among_equals() -> None:
    arrivals = [Arrival(0.0, (1, 2), 2, deadline_s=deadline_s) for deadline_s in (None, 29.0, 20.0, 900.0)]
    assert starts_of(arrivals) == [2, 1, 0, 3]


def test_who_has_no_deadline_is_not_held_up_by_those_with_one_for_good() -> None:
    patient = Arrival(0.0, (1, 2, 3), 4)
    hasty = [Arrival(i / 2, (1, 2, 3), 4, deadline_s=i / 2 + 60.0) for i in range(100)]
    starts = starts_of([patient, *hasty])
    assert 0 in starts[:8]
