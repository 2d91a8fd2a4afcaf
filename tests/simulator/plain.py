"""The simplest scheduler: first come, first served, nothing shared."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class PlainSequence:
    """Counts of one sequence."""

    number: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PlainPart:
    """A sequence's part in a step."""

    number: int
    num_new: int
    samples: bool


class PlainScheduler:
    """Running sequences first: those that need one token, those that need more, prompts; then the others.

    Each kind comes in the order of arrival.
    """

    def __init__(self, num_blocks: int, block_size: int, max_running: int, max_step_tokens: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self.waiting: list[PlainSequence] = []
        self.running: list[PlainSequence] = []

    def add(self, number: int, num_tokens: int) -> None:
        """Queue a sequence; they come by rising number."""
        self.waiting.append(PlainSequence(number, num_tokens, num_tokens))

    def finish(self, number: int) -> None:
        """End a sequence."""
        self.waiting = [s for s in self.waiting if s.number != number]
        self.running = [s for s in self.running if s.number != number]

    def schedule(self) -> list[PlainPart]:
        """Form a step; each part is counted as computed."""
        budget = self._max_step_tokens
        chosen: list[tuple[PlainSequence, int]] = []
        order = sorted(
            self.running,
            key=lambda s: (s.num_tokens - s.num_computed > 1, s.num_computed < s.num_prompt_tokens),
        )
        for sequence in order:
            if budget == 0:
                break
            if sequence not in self.running:
                continue
            num_new = self._piece(sequence, budget)
            needed = self._blocks_for(sequence.num_computed + num_new)
            while needed - sequence.num_blocks > self._num_free() and sequence in self.running:
                last = self.running.pop()
                last.num_blocks = last.num_computed = 0
                self.waiting.insert(0, last)
                chosen = [(s, n) for s, n in chosen if s is not last]
            if sequence not in self.running:
                continue
            sequence.num_blocks = max(needed, sequence.num_blocks)
            chosen.append((sequence, num_new))
            budget -= num_new
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            needed = self._blocks_for(sequence.num_tokens)
            if needed > self._num_free():
                break
            self.waiting.pop(0)
            sequence.num_blocks = needed
            self.running = sorted([*self.running, sequence], key=lambda s: s.number)
            num_new = self._piece(sequence, budget)
            chosen.append((sequence, num_new))
            budget -= num_new
        parts = []
        for sequence, num_new in chosen:
            sequence.num_computed += num_new
            samples = sequence.num_computed == sequence.num_tokens
            sequence.num_tokens += samples
            parts.append(PlainPart(sequence.number, num_new, samples))
        return parts

    def _num_free(self) -> int:
        return self._num_blocks - sum(s.num_blocks for s in self.running)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _piece(self, sequence: PlainSequence, budget: int) -> int:
        left = sequence.num_tokens - sequence.num_computed
        num_new = min(left, budget)
        return num_new - 1 if left - num_new == 1 and num_new > 2 else num_new
