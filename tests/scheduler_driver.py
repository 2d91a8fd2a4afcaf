"""A scheduler driven by hand, with the scripted engine, which checks every block that it is given."""

from engines.scripted import ScriptedEngine
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import Scheduler, Step
from streamsrv.sequence import Sequence

SCRIPT = "one two three four five six seven eight nine ten"


def make_sequence(
    number: int,
    prompt: int | tuple[int, ...],
    output: int,
    *,
    group: int | None = None,
    use_prefix_cache: bool = True,
    salt: str = "",
    wants_prompt_logits: bool = False,
) -> Sequence:
    """A sequence with a prompt of some ids, or the first so many from 3 on, and so many tokens to come."""
    ids = prompt if isinstance(prompt, tuple) else tuple(range(3, 3 + prompt))
    return Sequence(
        number,
        GenerateRequest(f"r{number}", ids, stop=StopConditions(max_tokens=output)),
        max_tokens=output,
        eos_token_ids=frozenset(),
        group_id=group,
        use_prefix_cache=use_prefix_cache,
        cache_salt=salt,
        wants_prompt_logits=wants_prompt_logits,
    )


class Driver:
    """A scheduler with a scripted context, stepped by hand."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_step_tokens: int,
        *,
        prefix_cache: bool = False,
        whole_rows: bool = False,
    ) -> None:
        engine = ScriptedEngine(SCRIPT, num_blocks=num_blocks, block_size=block_size)
        self.context = engine.create_context()
        self.replies = [*engine.script_ids, engine.eos_token_id]
        self.scheduler = Scheduler(
            self.context.cache,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            whole_rows=whole_rows,
        )
        self.finished: list[Sequence] = []

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences."""
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> Step | None:
        """Take a step, if there is anything to compute."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        logits = self.context.step(step.batch).logits
        tokens, row = list[int](), 0
        for part in step.parts:
            row += part.num_prompt_rows
            if part.samples:
                tokens.append(int(logits[row].argmax()))
                row += 1
        self.scheduler.update(step, tokens)
        for sequence in step.sampled:
            if sequence.num_output_tokens >= sequence.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)
        self.scheduler.check_integrity()
        return step

    def run(self) -> int:
        """Step until everybody has ended; how many tokens were computed."""
        num_tokens = 0
        while (step := self.step()) is not None:
            num_tokens += step.batch.num_tokens
        return num_tokens
