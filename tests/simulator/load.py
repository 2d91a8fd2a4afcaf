"""What a simulated server is like, and what comes to it."""

import random
from dataclasses import dataclass

from tests.simulator.model import VOCABULARY


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
