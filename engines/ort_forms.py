"""What each form of the graph is told of a run on ONNX Runtime, beside the rows of its cache."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.form import Dialect
from engines.linear import Run

Inputs = Mapping[str, NDArray[Any]]


class RunInputs(Protocol):
    """Makes a graph's inputs out of a run."""

    def constant(self, max_len: int) -> Inputs:
        """Those that are the same in every run, by name.

        Args:
            max_len: cells of a row.

        """
        ...

    def of(self, run: Run) -> Inputs:
        """Those of one run, by name, each laid out in order in memory."""
        ...


class LinearInputs:
    """The standard graph's."""

    def constant(self, max_len: int) -> Inputs:
        """The positions of a row's cells, which the graph's mask compares with the tokens'."""
        return {"cache_positions": np.arange(max_len)}

    def of(self, run: Run) -> Inputs:
        """A run's own arrays."""
        return {
            "input_ids": run.token_ids,
            "position_ids": run.position_ids,
            "write_indices": run.write_indices,
            "logit_rows": run.logit_rows,
        }


class GroupedInputs:
    """GroupQueryAttention's: each row's last position, and the length of the longest row, holes included."""

    def constant(self, max_len: int) -> Inputs:  # noqa: ARG002 - of the seam
        """None."""
        return {}

    def of(self, run: Run) -> Inputs:
        """A run's tokens, and its positions as the node wants them."""
        last = run.position_ids[:, -1].astype(np.int32)
        return {
            "input_ids": run.token_ids,
            "seqlens_k": last,
            "total_sequence_length": np.asarray(last.max() + 1, np.int32),
            "logit_rows": run.logit_rows,
        }


RUN_INPUTS: Mapping[Dialect, RunInputs] = {Dialect.LINEAR: LinearInputs(), Dialect.GROUPED: GroupedInputs()}
