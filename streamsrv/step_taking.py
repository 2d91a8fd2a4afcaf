"""Taking a step on the worker's thread: compute, sample, and turn tokens into what streams say."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from engines.api import ExecutionContext, StepBatch, StepResult
from streamsrv.output import Brought, Output
from streamsrv.sampling import needs_full_row, sample
from streamsrv.scheduler import Scheduled, Step


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken: what it brought, and its time on the worker's thread."""

    step: Step
    outputs: list[Output]
    """Of each of the step's parts."""
    brought: list[Brought]
    """To each of the outputs that sampled, or learnt of their prompt."""
    tokens: list[list[int]]
    """What each of the step's sampled sequences goes on with."""
    began_s: float
    ended_s: float


@dataclass(slots=True)
class _Rows:
    """A part's rows of logits."""

    output: Output
    part: Scheduled
    first: int
    first_sampled: int
    """The row that its next token is sampled from; those of its guesses follow."""
    brought: Brought


def take_step(
    context: ExecutionContext,
    step: Step,
    outputs: list[Output],
    clock: Callable[[], float],
    helpers: Executor,
) -> Taken:
    """Take a step. `outputs` are those of its parts; `helpers` make masks while the engine computes."""
    began_s = clock()
    rows: list[_Rows] = []
    first = 0
    for output, part in zip(outputs, step.parts, strict=True):
        first_sampled = first + part.num_prompt_rows
        end = first_sampled + part.num_sampled_rows
        if end > first:
            rows.append(_Rows(output, part, first, first_sampled, Brought(output)))
        first = end
    masks = [helpers.submit(r.output.make_mask) for r in rows if r.part.samples and r.output.is_constrained]
    result = context.step(_with_full_rows(step.batch, rows, context.num_candidates))
    for mask in masks:
        mask.result()
    for r in rows:
        if r.part.num_prompt_rows:
            logits = result.logits[r.first : r.first_sampled]
            r.brought.elements.append(r.output.read_prompt(logits))
    _sample_all(result, rows, helpers)
    # A sequence that has taken part gets a token, even where none could be chosen: it ends with that.
    tokens = [r.brought.token_ids or [0] for r in rows if r.part.samples]
    return Taken(step, outputs, [r.brought for r in rows], tokens, began_s, clock())


def _with_full_rows(batch: StepBatch, rows: list[_Rows], num_candidates: int) -> StepBatch:
    """Say which rows are wanted in full, of an engine that gives candidates."""
    if not num_candidates:
        return batch
    in_full = np.zeros(len(batch.logit_rows), np.bool_)
    for r in rows:
        sampling = r.output.row_sampling()
        in_full[r.first : r.first_sampled] = True
        in_full[r.first_sampled : r.first_sampled + r.part.num_sampled_rows] = (
            r.output.wants_logprobs
            or needs_full_row(sampling, num_candidates, will_have_mask=r.output.is_constrained)
        )
    return replace(batch, full_rows=in_full)


def _sample_all(result: StepResult, rows: list[_Rows], helpers: Executor) -> None:
    """Choose each output's tokens: the next one, and as long as its guesses are those, the ones after them.

    What a guess was verified against is drawn as if it had been the only row of its step. So guesses change
    nothing about an output.
    """
    depth, going = 0, [r for r in rows if r.part.samples]
    while going:
        at = [r.first_sampled + depth for r in going]
        sampling = [r.output.row_sampling(len(r.brought.token_ids)) for r in going]
        # Before the rows are changed.
        known = [r.output.row_logprobs(result.logits[i]) for r, i in zip(going, at, strict=True)]
        token_ids = sample(result, sampling, at, helpers)
        going = [
            r
            for r, token_id, logprobs in zip(going, token_ids, known, strict=True)
            if r.output.accept(r.brought, token_id, logprobs)
            and depth < len(r.part.guesses)
            and token_id == r.part.guesses[depth]
        ]
        depth += 1
    for r in rows:
        lookup, num_new = r.output.lookup, len(r.brought.token_ids)
        if lookup is not None and num_new:
            num_guessed = len(r.part.guesses)
            lookup.learn(num_guessed, min(num_new - 1, num_guessed), r.output.sequence.num_tokens + num_new)
