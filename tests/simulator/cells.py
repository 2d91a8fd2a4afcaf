"""Caches that remember what is in every cell, so that what is read can be checked."""

from typing import Protocol

from engines.api import StepBatch
from engines.linear import Rows, Run
from tests.simulator.model import VOCABULARY, chain


class Cells(Protocol):
    """A cache that takes steps."""

    def compute(self, batch: StepBatch, pasts: list[list[int]], origins: list[int]) -> list[int]:
        """Take a step: the digest at each row of logits.

        `pasts` are the digests that the sequences' past cells should hold, `origins` those of no token.

        Raises:
            AssertionError: they hold something else, or two sequences are in each other's way.

        """
        ...


class PagedCells:
    """Cells in blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._cells = [0] * (num_blocks * block_size)

    def compute(self, batch: StepBatch, pasts: list[list[int]], origins: list[int]) -> list[int]:
        """Take a step: all reads see what was there before it."""
        assert not batch.copies, "blocks are shared, not copied"
        size, cells = self._block_size, self._cells
        tokens, begins = batch.token_ids.tolist(), batch.query_begins.tolist()
        blocks, block_begins = batch.block_ids.tolist(), batch.block_begins.tolist()
        after: list[int] = []
        writes: dict[int, int] = {}
        reads: set[int] = set()
        for b, past in enumerate(pasts):
            assert len(past) == batch.past_lens[b]
            own = blocks[block_begins[b] : block_begins[b + 1]]
            places = [block * size + i for block in own for i in range(size)]
            new = places[len(past) : len(past) + begins[b + 1] - begins[b]]
            assert len(new) == begins[b + 1] - begins[b], "too few blocks"
            read = places[: len(past)]
            assert [cells[place] for place in read] == past, "the past is not in the cache"
            reads.update(read)
            state = past[-1] if past else origins[b]
            for token_id, place in zip(tokens[begins[b] : begins[b + 1]], new, strict=True):
                state = chain(state, token_id)
                assert place not in writes, "two sequences write the same cell"
                writes[place] = state
                after.append(state)
        assert reads.isdisjoint(writes), "a cell is read and written in one step"
        for place, state in writes.items():
            cells[place] = state
        return [after[row] for row in batch.logit_rows.tolist()]


class RowCells:
    """Cells in physical rows, moved and computed as `engines.linear` says."""

    def __init__(self, num_blocks: int, max_len: int) -> None:
        self._rows = Rows(
            num_blocks,
            max_len,
            vocab_size=VOCABULARY,
            max_piece=7,
            max_logit_rows=5,
            max_batch=max(1, num_blocks - 1),
        )
        self._cells = [[0] * max_len for _ in range(num_blocks + 1)]

    def compute(self, batch: StepBatch, pasts: list[list[int]], origins: list[int]) -> list[int]:
        """Take a step: moves first, then run after run."""
        plan = self._rows.plan(batch)
        for move in plan.moves:
            self._cells[move.target][: move.num_cells] = self._cells[move.source][: move.num_cells]
        origin_of = {}
        for block, past, origin in zip(batch.block_ids.tolist(), pasts, origins, strict=True):
            row = self._rows.row_of(block)
            assert self._cells[row][: len(past)] == past, "the past is not in the cache"
            origin_of[row] = origin
        results: dict[int, int] = {}
        for run in plan.runs:
            after = self._run(run, origin_of)
            for row, result in zip(run.logit_rows.tolist(), run.results.tolist(), strict=False):
                assert result not in results
                results[result] = after[row]
        return [results[row] for row in range(len(batch.logit_rows))]

    def _run(self, run: Run, origin_of: dict[int, int]) -> list[int]:
        after = []
        begins, tokens = run.write_indices.tolist(), run.token_ids.tolist()
        for row, (begin, new) in enumerate(zip(begins, tokens, strict=True), run.first_row):
            cells = self._cells[row]
            state = cells[begin - 1] if begin else origin_of.get(row, 0)
            for place, token_id in enumerate(new, begin):
                state = cells[place] = chain(state, token_id)
                after.append(state)
        return after
