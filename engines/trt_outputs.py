"""What a step's runs give, on its way from the device."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines.api import Candidates, EngineError, FloatArray, IntArray, StepResult
from engines.cuda_api import Device, PinnedArray, Stream
from engines.linear import Indices, Run
from engines.trt_memory import ContextMemory


@dataclass(frozen=True, slots=True)
class _Block:
    """Where one run's outputs are."""

    num_rows: int
    """Of logits, the padding included."""
    results: Indices
    """Places of the leading rows among the step's."""
    logits: int
    """Address on the device."""
    candidates: int
    """Address on the device."""
    host: int
    """Offset of the candidates in the pinned memory."""


class Outputs:
    """The device's memory for outputs and the pinned memory that they are copied to.

    A step's runs lie one after the other, and all candidates come in one copy, so that rows of logits can be
    fetched until the next step. A step that wants more rows than there is memory for begins at the front
    again; then every run is copied in full before the next one.
    """

    def __init__(self, device: Device, stream: Stream, memory: ContextMemory, owner: ExitStack) -> None:
        """Allocate; `owner` closes everything."""
        self._device = device
        self._stream = stream
        self._memory = memory
        self._layout = memory.outputs
        self._row_bytes = memory.outputs.vocab_size * 4
        logits = device.allocate(memory.logits_bytes)
        owner.callback(logits.close)
        candidates = device.allocate(memory.candidates_bytes)
        owner.callback(candidates.close)
        self._logits_address, self._candidates_address = logits.address, candidates.address
        vocab_size = memory.outputs.vocab_size
        self._host_logits = _Pinned(device, (memory.num_output_rows, vocab_size), np.float32, owner)
        self._host_candidates = _Pinned(device, (memory.candidates_bytes,), np.uint8, owner)
        self._blocks: list[_Block] = []
        self._serial = 0

    def begin(self, num_results: int, runs: tuple[Run, ...]) -> None:
        """Begin a step that gives so many rows; what the last one gave may be overwritten."""
        self._serial += 1
        self._blocks = []
        self._logits_at = self._candidates_at = self._host_at = 0
        layout = self._layout
        num_rows = [len(run.logit_rows) for run in runs]
        candidates_bytes = sum(layout.candidate_offsets(rows)[3] for rows in num_rows)
        self._is_kept = self._fits(sum(map(layout.logits_bytes, num_rows)), candidates_bytes)
        self._logits: FloatArray = self._host_logits.of(max(num_results, 1))[:num_results]
        self._host_candidates.of(candidates_bytes)
        self._addresses = np.zeros(num_results, np.int64)
        self._is_here = np.zeros(num_results, np.bool_)

    def place(self, run: Run) -> tuple[int, int, int, int]:
        """Choose the addresses of a run's logits, candidate_logits, candidate_ids and logsumexp."""
        num_rows = len(run.logit_rows)
        ids, values, logsumexp, end = self._layout.candidate_offsets(num_rows)
        size = self._layout.logits_bytes(num_rows)
        if not self._fits(self._logits_at + size, self._candidates_at + end):
            self._logits_at = self._candidates_at = 0
        logits = self._logits_address + self._logits_at
        candidates = self._candidates_address + self._candidates_at
        self._blocks.append(_Block(num_rows, run.results, logits, candidates, self._host_at))
        self._logits_at += size
        self._candidates_at += end
        self._host_at += end
        return logits, candidates + values, candidates + ids, candidates + logsumexp

    def collect(self) -> None:
        """Queue, after a run, the copies of its outputs that cannot wait."""
        block = self._blocks[-1]
        count = len(block.results)
        self._addresses[block.results] = block.logits + np.arange(count) * self._row_bytes
        if not self._is_kept:
            self._copy_candidates(block.host, block.candidates, self._host_at - block.host)
            self._copy_rows(np.sort(block.results).tolist())

    def finish(self, full_rows: NDArray[np.bool_] | None) -> None:
        """Queue, after the last run, the copies of everything that is wanted now."""
        if self._is_kept:
            self._copy_candidates(0, self._candidates_address, self._host_at)
            every = range(len(self._logits))
            self._copy_rows(every if full_rows is None else np.flatnonzero(full_rows).tolist())

    def result(self) -> StepResult:
        """Give what has come, once the stream has been waited for."""
        candidates = [self._candidates(block) for block in self._blocks]
        num_results, results = len(self._logits), [block.results for block in self._blocks]
        if len(results) == 1 and len(results[0]) == num_results:  # they ascend, so that is all in order
            gathered = candidates[0]
        else:
            gathered = Candidates(
                np.empty((num_results, self._layout.num_candidates), np.int64),
                np.empty((num_results, self._layout.num_candidates), np.float32),
                np.empty(num_results, np.float32),
            )
            for places, part in zip(results, candidates, strict=True):
                gathered.token_ids[places] = part.token_ids
                gathered.logits[places] = part.logits
                gathered.logsumexp[places] = part.logsumexp
        return StepResult(self._logits, gathered, partial(self._fetch, self._serial))

    def _fetch(self, serial: int, rows: IntArray) -> None:
        if serial != self._serial:
            raise EngineError("rows of logits are fetched after a later step has overwritten them")
        missing = sorted({row for row in rows.tolist() if not self._is_here[row]})
        if missing:
            with self._device.activate():
                self._copy_rows(missing)
                self._stream.synchronize()

    def _fits(self, logits_bytes: int, candidates_bytes: int) -> bool:
        memory = self._memory
        return logits_bytes <= memory.logits_bytes and candidates_bytes <= memory.candidates_bytes

    def _copy_candidates(self, host: int, address: int, num_bytes: int) -> None:
        target = self._host_candidates.array[host : host + num_bytes]
        self._device.copy_out(target, address, self._stream)

    def _copy_rows(self, rows: "range | list[int]") -> None:
        """Queue copies of full rows, as few as their places on the device and here allow."""
        addresses, begin = self._addresses, 0
        while begin < len(rows):
            first = rows[begin]
            count = 1
            while (
                begin + count < len(rows)
                and rows[begin + count] == first + count
                and addresses[first + count] == addresses[first] + count * self._row_bytes
            ):
                count += 1
            target = self._logits[first : first + count]
            self._device.copy_out(target, int(addresses[first]), self._stream)
            self._is_here[first : first + count] = True
            begin += count

    def _candidates(self, block: _Block) -> Candidates:
        ids, values, logsumexp, end = self._layout.candidate_offsets(block.num_rows)
        host = self._host_candidates.array[block.host : block.host + end]
        count, width = len(block.results), self._layout.num_candidates
        return Candidates(
            host[ids : ids + count * width * 8].view(np.int64).reshape(count, width),
            host[values : values + count * width * 4].view(np.float32).reshape(count, width),
            host[logsumexp : logsumexp + count * 4].view(np.float32),
        )


class _Pinned:
    """Pinned memory that grows along its first axis when a step needs more."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: DTypeLike, owner: ExitStack) -> None:
        self._device = device
        self._dtype = dtype
        self._memory: PinnedArray = device.pinned(shape, dtype)
        owner.callback(lambda: self._memory.close())
        self.array: NDArray[Any] = self._memory.array

    def of(self, size: int) -> NDArray[Any]:
        """Give all of it, with at least that size; what it held is lost if it grows."""
        if size > len(self.array):
            larger = self._device.pinned((size, *self.array.shape[1:]), self._dtype)
            self._memory.close()
            self._memory = larger
            self.array = larger.array
        return self.array
