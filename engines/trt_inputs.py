"""A run's inputs on their way to the device."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cuda_api import Device, Event, Stream
from engines.linear import Run
from engines.trt_memory import InputLayout

_NUM_SLOTS = 4
"""Runs that can be written before the first of them has been copied."""


class _Slot:
    """Pinned memory for one run's inputs, laid out as on the device."""

    def __init__(self, memory: NDArray[Any], layout: InputLayout, copied: Event) -> None:
        self.memory = memory
        self.copied = copied
        begins = {name: offset // 8 for name, offset in layout.offsets.items()}
        self._write_indices = memory[begins["write_indices"] :]
        self._logit_rows = memory[begins["logit_rows"] :]
        self._input_ids = memory[begins["input_ids"] :]
        self._position_ids = memory[begins["position_ids"] :]

    def write(self, run: Run) -> None:
        num_tokens = run.token_ids.size
        self._write_indices[: run.num_rows] = run.write_indices
        self._logit_rows[: len(run.logit_rows)] = run.logit_rows
        self._input_ids[:num_tokens] = run.token_ids.reshape(-1)
        self._position_ids[:num_tokens] = run.position_ids.reshape(-1)


class Inputs:
    """The device's memory for inputs, always at the same addresses, and a ring of pinned memory before it.

    The device's one copy is enough: on one stream a run's inputs are copied when the run before has ended.
    """

    def __init__(self, device: Device, stream: Stream, layout: InputLayout, owner: ExitStack) -> None:
        """Allocate, and copy what never changes; `owner` closes everything."""
        self._device = device
        self._stream = stream
        memory = device.allocate(layout.num_bytes)
        owner.callback(memory.close)
        self._address = memory.address
        self.addresses = {name: memory.address + offset for name, offset in layout.offsets.items()}
        """Where each input is."""
        pinned = device.pinned((_NUM_SLOTS, layout.run_bytes // 8), np.int64)
        owner.callback(pinned.close)
        self._slots = []
        for slot in pinned.array:
            event = device.event()
            owner.callback(event.close)
            self._slots.append(_Slot(slot, layout, event))
        owner.callback(self._slots.clear)
        positions = device.pinned((layout.num_cells,), np.int64)
        try:
            positions.array[:] = np.arange(layout.num_cells)
            device.copy_in(self.addresses["cache_positions"], positions.array, stream)
            stream.synchronize()
        finally:
            positions.close()

    def put(self, run: Run, index: int, num_runs: int) -> None:
        """Queue the copy of a run's inputs.

        Args:
            run: the run.
            index: which of the step it is. The step before has ended.
            num_runs: how many the step has.

        """
        slot = self._slots[index % _NUM_SLOTS]
        if index >= _NUM_SLOTS:
            slot.copied.synchronize()
        slot.write(run)
        self._device.copy_in(self._address, slot.memory, self._stream)
        if index + _NUM_SLOTS < num_runs:
            slot.copied.record(self._stream)
