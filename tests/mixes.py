"""Requests of every kind, drawn at random, and whether two runs of them tell the same.

What a plain run chose its tokens from is kept, so that a token that differs can be held against rounding.
"""

import copy
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engines.api import FloatArray, StepResult
from streamsrv import output, step_taking, worker
from streamsrv.client import Client
from streamsrv.client.output import Output as ToldOutput
from streamsrv.errors import CallFailedError
from streamsrv.logprobs import RowLogprobs
from streamsrv.output import Brought, Output
from streamsrv.request import SamplingParams
from streamsrv.sampling import RowSampling, choose_in_full, sample
from streamsrv.scheduler import Scheduler
from streamsrv.sequence import SequenceStatus
from streamsrv.step import Step
from streamsrv.v1 import inference_pb2 as pb

TOLERANCE = 1e-4
"""Largest difference of two log probabilities in float32 that counts as none."""
TIE = 2e-4
"""How far rounding in float32 may move a logit."""
_NUM_NOISES = 400
_MOST_PREEMPTIONS = 60


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: str | Seq[int]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """All that a request was told."""

    outputs: Seq[ToldOutput]
    prompt_ids: list[int]
    prompt_text: str
    prompt_logprobs: list[float]
    prompt_top: list[pb.TopLogprobs]
    usage: pb.Usage | None
    error: str | None


async def tell(client: Client, ask: Ask) -> Told:
    """Generate, and keep everything."""
    stream, error = client.generate(ask.prompt, **ask.options), None
    try:
        await stream.text()
    except CallFailedError as failure:
        error = f"{failure.code} {failure.server_reason}"
    return Told(
        stream.outputs,
        [token_id for piece in stream.prompt for token_id in piece.token_ids],
        "".join(piece.text for piece in stream.prompt),
        [logprob for piece in stream.prompt for logprob in piece.logprobs],
        [top for piece in stream.prompt for top in piece.top_logprobs],
        stream.usage,
        error,
    )


# ---------------------------------------------------------------------------------------------------------
# What tokens were chosen from


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of logits after its changes, and how it became a token."""

    logits: FloatArray
    params: SamplingParams
    point: float

    def is_tied(self, other: int, tie: float = TIE) -> bool:
        """Whether errors of at most `tie` in each logit can make it another token."""
        if self.params.is_greedy:
            return bool(self.logits.max() - self.logits[other] <= 2 * tie)
        draw = np.random.default_rng(0)
        for _ in range(_NUM_NOISES):
            noise = draw.uniform(-tie, tie, len(self.logits)).astype(np.float32)
            # All the way to one side for the token itself, as it is the one that matters.
            noise[other] = tie if draw.random() < 0.5 else -tie
            if choose_in_full(self.logits + noise, self.params, self.point) == other:
                return True
        return False


@dataclass(slots=True)
class Choices:
    """What an output's tokens were chosen from, by the output's index and the token's place."""

    of: dict[int, dict[int, Choice]] = field(default_factory=lambda: defaultdict(dict))


@contextmanager
def recorded() -> Iterator[Choices]:
    """Keep what tokens are chosen from: of one request at a time, on one worker."""
    choices, pending = Choices(), deque[Choice]()

    def recording(result: StepResult, rows: Seq[RowSampling], at: Seq[int], helpers: Executor) -> list[int]:
        for row, i in zip(rows, at, strict=True):
            logits = result.logits[i].copy()
            row.change(logits)
            greedy = row.params.is_greedy
            point = 0.0 if greedy else float(copy.deepcopy(row.generator).random())
            pending.append(Choice(logits, row.params, point))
        return sample(result, rows, at, helpers)

    accept = Output.accept

    def accepting(self: Output, brought: Brought, token_id: int, known: RowLogprobs | None) -> bool:
        place = self.sequence.num_output_tokens + len(brought.token_ids)
        choices.of[self.index][place] = pending.popleft()
        return accept(self, brought, token_id, known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_taking, "sample", recording)
        patch.setattr(output.Output, "accept", accepting)
        yield choices
    assert not pending


# ---------------------------------------------------------------------------------------------------------
# Comparing


@dataclass(slots=True)
class Count:
    """How two runs compare, over many requests."""

    num_asked: int = 0
    num_failed: int = 0
    """Requests that end with an error, both times."""
    num_tokens: int = 0
    """Compared, the tied ones among them."""
    num_tied: int = 0
    """Tokens that differ where rounding may decide; what follows them is not compared."""
    num_preempted: int = 0
    num_cached: int = 0
    num_accepted: int = 0
    """Guesses."""


def compare(plain: Told, choices: Choices, other: Told, count: Count) -> None:
    """Hold another run's answer to a request against the plain run's."""
    count.num_asked += 1
    assert other.error == plain.error
    count.num_failed += plain.error is not None
    assert (other.prompt_ids, other.prompt_text) == (plain.prompt_ids, plain.prompt_text)
    _close(other.prompt_logprobs, plain.prompt_logprobs)
    _close_tops(other.prompt_top, plain.prompt_top)
    num_tied_before = count.num_tied
    if plain.error is None:
        assert len(other.outputs) == len(plain.outputs)
        for one, another in zip(plain.outputs, other.outputs, strict=True):
            _compare_outputs(one, choices.of[one.index], another, count)
    if other.usage is None or plain.usage is None:
        assert plain.error is not None
        return
    assert other.usage.num_prompt_tokens == plain.usage.num_prompt_tokens
    if count.num_tied == num_tied_before:
        assert other.usage.num_completion_tokens == plain.usage.num_completion_tokens
    count.num_cached += other.usage.num_cached_prompt_tokens
    count.num_accepted += other.usage.num_accepted_tokens


def _compare_outputs(plain: ToldOutput, choices: dict[int, Choice], other: ToldOutput, count: Count) -> None:
    pairs = list(zip(plain.token_ids, other.token_ids, strict=False))
    tied = next((i for i, (one, another) in enumerate(pairs) if one != another), None)
    num = len(pairs) if tied is None else tied
    count.num_tokens += num
    if plain.logprobs or other.logprobs:
        _close(other.logprobs[:num], plain.logprobs[:num])
    _close_tops(other.top_logprobs[:num], plain.top_logprobs[:num])
    if tied is not None:
        assert tied in choices, f"token {tied} was forced, and is another one"
        assert choices[tied].is_tied(other.token_ids[tied]), (
            f"token {tied} is {other.token_ids[tied]} instead of {plain.token_ids[tied]}: {choices[tied]}"
        )
        count.num_tied += 1
        return
    assert other.token_ids == plain.token_ids
    assert other.text == plain.text
    assert (other.finish_reason, other.matched) == (plain.finish_reason, plain.matched)
    assert other.tool_calls == plain.tool_calls


def _close(some: Seq[float], others: Seq[float]) -> None:
    assert len(some) == len(others)
    np.testing.assert_allclose(some, others, rtol=0, atol=TOLERANCE)


def _close_tops(some: Seq[pb.TopLogprobs], others: Seq[pb.TopLogprobs]) -> None:
    assert len(some) == len(others)
    for one, another in zip(some, others, strict=True):
        _close(one.logprobs, another.logprobs)
        of_other = dict(zip(another.token_ids, another.logprobs, strict=True))
        for token_id, logprob in zip(one.token_ids, one.logprobs, strict=True):
            # Of those that are equal within rounding any may come last.
            assert abs(of_other.get(token_id, another.logprobs[-1]) - logprob) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------
# Preempting


def preempting(draw: random.Random, part: float) -> type[Scheduler]:
    """Make a scheduler that now and then takes the blocks from any of the running sequences."""

    class Preempting(Scheduler):
        def schedule(self, *args: Any, **options: Any) -> Step | None:
            # Without a bound a long prompt in small pieces would hardly ever come to its end.
            if self._running and self.num_preemptions < _MOST_PREEMPTIONS and draw.random() < part:
                sequence = draw.choice(self._running)
                assert sequence.status is SequenceStatus.RUNNING
                self._preempt(sequence)
            return super().schedule(*args, **options)

    return Preempting


@contextmanager
def preempted_at_random(draw: random.Random, part: float = 0.2) -> Iterator[None]:
    """Let the workers that begin now preempt before such a part of the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Scheduler", preempting(draw, part))
        yield


# ---------------------------------------------------------------------------------------------------------
# Drawing

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["river", "town"]},
        "size": {"type": "integer"},
        "at": {"type": "string"},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6}},
    {"regex": r"[a-f]{3,9}-\d+"},
    {"regex": r"(the |river |town )+\."},
    {"choices": ["the river", "the town", "a boat"]},
    {"lark": 'start: "x" | "(" start ")" | start "+" start'},
)


@dataclass(frozen=True, slots=True)
class Words:
    """What prompts are made of."""

    beginnings: Seq[str]
    """Shared by many."""
    ends: Seq[str]
    vocab_size: int


def draw_ask(draw: random.Random, words: Words, *, max_tokens: int = 40) -> Ask:
    """Draw a request of any kind. It always has a seed, so that it can be asked again."""
    prompt = "".join(
        [*draw.choices(["", *words.beginnings]), *draw.choices(words.ends, k=draw.randint(1, 3))]
    )
    most = draw.randint(1, max_tokens)
    options: dict[str, Any] = {
        "temperature": draw.choice([0, 0, 0, 0.6, 1, 1.7]),
        "seed": draw.getrandbits(63),
        "max_tokens": most,
    }

    def perhaps(part: float, **more: Any) -> None:
        if draw.random() < part:
            options.update(more)

    def token_ids(most: int) -> list[int]:
        return draw.sample(range(3, words.vocab_size), draw.randint(1, most))

    perhaps(0.2, top_k=draw.randint(1, 40))
    perhaps(0.2, top_p=draw.uniform(0.3, 1))
    perhaps(0.1, min_p=draw.uniform(0, 0.3))
    perhaps(0.1, typical_p=draw.uniform(0.3, 1))
    perhaps(0.2, repetition_penalty=draw.choice([0.8, 1.1, 1.5]))
    perhaps(0.15, presence_penalty=draw.uniform(-1, 2))
    perhaps(0.15, frequency_penalty=draw.uniform(-0.5, 1))
    perhaps(0.15, logit_bias={token_id: draw.uniform(-5, 5) for token_id in token_ids(6)})
    perhaps(0.15, banned_token_ids=token_ids(50))
    perhaps(0.05, allowed_token_ids=token_ids(100))
    perhaps(0.25, num_outputs=draw.randint(2, 4))
    perhaps(0.3, logprobs=True)
    perhaps(0.2, num_top_logprobs=draw.randint(1, 6))
    perhaps(0.2, prompt_logprobs=True)
    perhaps(0.2, echo=True)
    perhaps(0.6, ignore_eos=True)
    perhaps(0.2, min_tokens=draw.randint(0, most))
    perhaps(0.2, stop_token_ids=token_ids(9))
    perhaps(0.2, include_stop=True)
    perhaps(0.2, use_prefix_cache=False)
    perhaps(0.3, cache_salt=draw.choice(["one", "another"]))
    perhaps(0.2, prompt_lookup=False)
    perhaps(0.3, priority=draw.randint(-2, 3))
    perhaps(0.3, max_tokens_per_chunk=draw.randint(1, 5))
    perhaps(0.5, zstd=False)
    if draw.random() < 0.3:
        for name in ("min_tokens", "stop_token_ids", "ignore_eos"):
            options.pop(name, None)
        options |= draw.choice(CONSTRAINTS)
    else:
        perhaps(0.25, stop=draw.choices([" the", "e", "at", "\n", "ing", ". "], k=draw.randint(1, 2)))
    return Ask(prompt, options)
