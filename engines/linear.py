"""How an engine whose cache has one row for each sequence takes a ragged step.

To the scheduler a row is a block as long as the longest sequence. An engine computes a batch over a
contiguous range of rows only, so `Rows` decides which physical row holds which block, and turns a step
into row moves and runs: one for all sequences with one new token, and one or more for each sequence with
several. Nothing here knows an engine's library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.api import EngineError, IntArray, StepBatch

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `num_cells` cells of one physical row to another, in every layer, keys and values."""

    source: int
    target: int
    num_cells: int


@dataclass(frozen=True, slots=True)
class Run:
    """One call of the graph: B physical rows from `first_row` on, with S new tokens each."""

    first_row: int
    num_rows: int
    """B."""
    token_ids: Indices
    """[B, S]"""
    position_ids: Indices
    """[B, S]"""
    write_indices: Indices
    """[B] the cell, and position, of each row's first new token."""
    logit_rows: Indices
    """[R] indices into the B * S tokens; at least one."""
    results: Indices
    """[up to R] for each of the leading logit rows, its place among the step's; the others are padding."""

    @property
    def is_decode(self) -> bool:
        """Whether each row has one new token."""
        return len(self.token_ids) == self.token_ids.size


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step takes: all moves in order, then all runs in order."""

    moves: tuple[Move, ...]
    runs: tuple[Run, ...]


class Rows:
    """Which physical row holds which block, and how many of its cells are in use.

    There is one row more than blocks. The spare one, which holds no block, makes an exchange of two rows
    two copies: one row goes to the spare, the other to its place, and what it leaves is the spare.

    A row inside a run's range that has no token of the step is a hole. It computes a dummy token at its
    first unused cell, or the last one. That harms no sequence: a cell is read by tokens at its position or
    beyond, and the token at its position is written into it first.
    """

    def __init__(
        self,
        num_blocks: int,
        max_len: int,
        *,
        vocab_size: int,
        max_piece: int,
        max_logit_rows: int,
        max_batch: int,
        min_batch: int = 1,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        """Begin with empty rows, block n in row n.

        Args:
            num_blocks: blocks of the cache; the engine has one row more.
            max_len: cells of a row.
            vocab_size: token ids are below it.
            max_piece: most tokens of one sequence in one run.
            max_logit_rows: most rows of logits of one run.
            max_batch: most rows of a run.
            min_batch: fewest rows of a run in which each has one token, and fewest logit rows of any run
                that gives results.
            batch_sizes: the only numbers of rows that such a run may have; its logit rows are then as many.

        Raises:
            ValueError: the bounds leave no way to run a step.

        """
        num_rows = num_blocks + 1
        widest = min(max_batch, max_logit_rows, num_rows)
        sizes = sorted(size for size in set(batch_sizes or ()) if min_batch <= size <= widest)
        if batch_sizes is not None and not sizes:
            raise ValueError(f"no batch size of {list(batch_sizes)} is in {min_batch} .. {widest}")
        if min(num_blocks, max_len, max_piece, min_batch) < 1 or min_batch > widest:
            raise ValueError(
                f"{num_blocks} blocks of {max_len} cells, pieces of {max_piece} tokens, "
                f"{min_batch} to {widest} rows: each must be at least 1"
            )
        self._num_blocks = num_blocks
        self._max_len = max_len
        self._vocab_size = vocab_size
        self._max_piece = max_piece
        self._max_logit_rows = max_logit_rows
        self._min_batch = min_batch
        self._batch_sizes = sizes
        self._max_batch = sizes[-1] if sizes else widest
        # The spare row counts as that of a block beyond the others.
        self._row_of = np.arange(num_rows)
        self._block_of = np.arange(num_rows)
        self._lengths = np.zeros(num_rows, np.int64)
        """Cells in use, by row; 0 in the spare."""

    @property
    def num_rows(self) -> int:
        """Physical rows: one for each block, and one more."""
        return self._num_blocks + 1

    def row_of(self, block: int) -> int:
        """Tell the physical row that holds a block."""
        return int(self._row_of[block])

    def plan(self, batch: StepBatch) -> Plan:
        """Decide how to take a step, as if it were taken at once.

        Raises:
            EngineError: the step makes no sense; nothing has changed.

        """
        begins, past = batch.query_begins, batch.past_lens
        counts = begins[1:] - begins[:-1]
        self._check(batch, counts)
        moves: list[Move] = []
        runs: list[Run] = []
        wanted = batch.logit_rows
        for copy in batch.copies:
            source, target = self._row_of[[copy.source, copy.target]].tolist()
            moves.append(Move(source, target, copy.num_tokens))
            self._lengths[target] = copy.num_tokens
        self._lengths[self._row_of[batch.block_ids]] = past
        if not past.all():
            self._lower(batch.block_ids[past == 0])
        if batch.num_tokens == batch.num_sequences:  # one token each
            self._pack(batch.block_ids, moves)
            self._decode(batch.block_ids, batch.token_ids, wanted, np.arange(len(wanted)), runs)
            return Plan(tuple(moves), tuple(runs))

        singles = np.flatnonzero(counts == 1)
        if len(singles):
            blocks = batch.block_ids[singles]
            owners = np.searchsorted(begins, wanted, side="right") - 1
            results = np.flatnonzero(counts[owners] == 1)
            places = np.searchsorted(singles, owners[results])
            self._pack(blocks, moves)
            self._decode(blocks, batch.token_ids[begins[singles]], places, results, runs)
        for sequence in np.flatnonzero(counts > 1).tolist():
            self._prefill(batch, sequence, runs)
        return Plan(tuple(moves), tuple(runs))

    def _check(self, batch: StepBatch, counts: IntArray) -> None:
        """Refuse what would make an engine read or write outside of its rows, or what is not there."""
        past, blocks, wanted = batch.past_lens, batch.block_ids, batch.logit_rows
        if not batch.num_sequences or counts.min() < 1 or batch.query_begins[-1] != batch.num_tokens:
            raise EngineError("a step needs sequences, and each of them new tokens")
        longest = int((past + counts).max())
        if longest > self._max_len or past.min() < 0:
            raise EngineError(
                f"a sequence of {longest} tokens does not fit in the context of {self._max_len}"
            )
        for what, ids, bound in (
            ("token id", batch.token_ids.view(np.uint64), self._vocab_size),
            ("block", blocks.view(np.uint32), self._num_blocks),
            ("logit row", wanted.view(np.uint64), batch.num_tokens),
        ):
            if ids.max(initial=0) >= bound:  # unsigned: a negative number is a huge one
                raise EngineError(f"a {what} of the step is not in 0 .. {bound - 1}")
        if (wanted[1:] <= wanted[:-1]).any():
            raise EngineError("the logit rows of a step must ascend")
        if len(blocks) != batch.num_sequences or (np.diff(batch.block_begins) != 1).any():
            raise EngineError("each sequence of a step needs one block, which is as long as the context")
        ordered = np.sort(blocks)
        if (ordered[1:] == ordered[:-1]).any():
            raise EngineError("two sequences of a step have the same block")
        lengths = self._lengths[self._row_of]
        for copy in batch.copies:
            if not (0 <= copy.source < self._num_blocks and 0 <= copy.target < self._num_blocks):
                raise EngineError(f"a block to copy is not in 0 .. {self._num_blocks - 1}")
            if copy.source == copy.target or not 0 < copy.num_tokens <= lengths[copy.source]:
                raise EngineError("a step copies tokens that the block does not hold, or a block to itself")
            lengths[copy.target] = copy.num_tokens
        if (past > lengths[blocks]).any():
            raise EngineError("a sequence of a step has a past that its block does not hold")

    def _lower(self, blocks: IntArray) -> None:
        """Let one of the blocks that begin a sequence have the spare row, if that is lower.

        Blocks are handed out from the lowest on, so that low rows are dense; a spare row among them is a
        hole, and changing it for a row with nothing in it costs nothing.
        """
        highest, spare = int(self._row_of[blocks].max()), int(self._row_of[self._num_blocks])
        if spare < highest:
            self._exchange(highest, spare, [])

    def _pack(self, blocks: IntArray, moves: list[Move]) -> None:
        """Move outlying rows into holes where there are too many of these.

        A hole costs at each step nearly what a sequence does, a move once what reading and writing a row
        costs, a few percent of a step. Yet most holes are filled for nothing by the next sequence that
        starts, which gets the lowest free block. So a quarter is let pass, and only what exceeds it moved.
        """
        rows = np.sort(self._row_of[blocks])
        count = len(rows)
        least_runs = -(-count // self._max_batch)
        width = min(count + max(1, count // 4), least_runs * self._max_batch)
        if rows[-1] - rows[0] < width:
            return
        # The window that has the most of the rows; the lowest of several.
        ends = np.searchsorted(rows, rows + width)
        first = min(int(rows[np.argmax(ends - np.arange(count))]), self.num_rows - width)
        outliers = rows[(rows < first) | (rows >= first + width)]
        free = np.ones(width, np.bool_)
        inside = rows[(rows >= first) & (rows < first + width)]
        free[inside - first] = False
        holes = np.flatnonzero(free) + first
        # Those with the fewest cells in use are the cheapest; the spare and rows known to be dead have none.
        holes = holes[np.argsort(self._lengths[holes], kind="stable")]
        for outlier, hole in zip(outliers.tolist(), holes.tolist(), strict=False):
            self._exchange(outlier, hole, moves)

    def _exchange(self, outlier: int, hole: int, moves: list[Move]) -> None:
        """Give the block of one row the place of another, whose block goes to the spare or to the first."""
        lengths = self._lengths
        spare = int(self._row_of[self._num_blocks])
        if lengths[outlier] and lengths[hole]:
            self._copy(hole, spare, moves)
            self._copy(outlier, hole, moves)
            targets, sources = [spare, hole, outlier], [hole, outlier, spare]
        else:
            self._copy(outlier, hole, moves)
            self._copy(hole, outlier, moves)
            targets, sources = [outlier, hole], [hole, outlier]
        self._block_of[targets] = self._block_of[sources]
        lengths[targets] = lengths[sources]
        self._row_of[self._block_of[targets]] = targets

    def _copy(self, source: int, target: int, moves: list[Move]) -> None:
        if num_cells := int(self._lengths[source]):
            moves.append(Move(source, target, num_cells))

    def _decode(
        self, blocks: IntArray, token_ids: Indices, wanted: Indices, results: Indices, runs: list[Run]
    ) -> None:
        """Compute one token for each block; `wanted` are indices into them, `results` their places."""
        rows = self._row_of[blocks]
        first, last = int(rows.min()), int(rows.max())
        if last - first < self._max_batch:
            runs.append(self._decode_run(first, last, rows, token_ids, rows[wanted], results))
            return
        while True:
            last = int(rows[rows < first + self._max_batch].max())
            inside = (rows >= first) & (rows <= last)
            got = inside[wanted]
            runs.append(
                self._decode_run(
                    first, last, rows[inside], token_ids[inside], rows[wanted[got]], results[got]
                )
            )
            beyond = rows[rows > last]
            if not len(beyond):
                return
            first = int(beyond.min())

    def _decode_run(
        self,
        first: int,
        last: int,
        rows: Indices,
        token_ids: Indices,
        wanted_rows: Indices,
        results: Indices,
    ) -> Run:
        """Make a run over rows first .. last, and more above or below them where it must be wider."""
        size = max(last - first + 1, self._min_batch)
        size = next((listed for listed in self._batch_sizes if listed >= size), size)
        first = min(first, self.num_rows - size)
        tokens = np.zeros((size, 1), np.int64)
        tokens[rows - first, 0] = token_ids
        cells = np.minimum(self._lengths[first : first + size], self._max_len - 1)
        self._lengths[rows] += 1
        return Run(
            first_row=first,
            num_rows=size,
            token_ids=tokens,
            position_ids=cells[:, None],
            write_indices=cells,
            logit_rows=self._padded(wanted_rows - first, size if self._batch_sizes else 0),
            results=results,
        )

    def _prefill(self, batch: StepBatch, sequence: int, runs: list[Run]) -> None:
        """Compute one sequence's tokens, in pieces where there are many or many logits are wanted."""
        row = int(self._row_of[batch.block_ids[sequence]])
        at, end = batch.query_begins[sequence : sequence + 2].tolist()
        wanted = batch.logit_rows
        result = int(np.searchsorted(wanted, at))
        while at < end:
            stop = min(at + self._max_piece, end)
            next_result = int(np.searchsorted(wanted, stop))
            if next_result - result > self._max_logit_rows:
                next_result = result + self._max_logit_rows
                stop = int(wanted[next_result])
            results = np.arange(result, next_result)
            token_ids = batch.token_ids[at:stop]
            if stop - at == 1:
                rows = np.array([row])
                runs.append(self._decode_run(row, row, rows, token_ids, rows[: len(results)], results))
            else:
                past = int(self._lengths[row])
                self._lengths[row] += stop - at
                runs.append(
                    Run(
                        first_row=row,
                        num_rows=1,
                        token_ids=token_ids[None],
                        position_ids=np.arange(past, past + stop - at)[None],
                        write_indices=np.array([past]),
                        logit_rows=self._padded(wanted[result:next_result] - at),
                        results=results,
                    )
                )
            at, result = stop, next_result

    def _padded(self, rows: Indices, num_rows: int = 0) -> Indices:
        """Repeat the last of some logit rows until they are enough; where none is wanted, the first token."""
        if not len(rows):
            return np.zeros(max(num_rows, 1), np.int64)
        missing = max(num_rows, self._min_batch) - len(rows)
        return rows if missing <= 0 else np.concatenate([rows, np.full(missing, rows[-1])])
