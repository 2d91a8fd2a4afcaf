"""What `engines.trt` does on the host in a step, over the stand-ins with execution replaced by nothing.

    python -m tests.standins.host_work [--profile]

The streams are lazy: they run what was queued only when it is waited for, so that the time up to the wait is
the host's own. It includes what the stand-ins take for their checks, which is listed apart.
"""

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from engines.api import StepBatch
from engines.options import EngineOptions, Precision, WeightFormat
from engines.trt_context import TrtContext
from tests import tiny
from tests.trt_rig import Rig, make_rig

NUM_LAYERS = 30
"""As many as the demo model has: most calls are made once for each cache."""
NUM_ROWS = 64

Steps = Callable[[int], StepBatch]
"""The batch of the step of a number."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """One kind of step, measured."""

    step_ms: float
    """Median without the waiting."""
    standin_ms: float
    """Of that, the stand-ins'; an estimate by a profile, which slows everything, by shares."""
    num_cuda_calls: float
    num_tensorrt_calls: float
    """For each step."""

    @property
    def own_ms(self) -> float:
        """Median without the waiting and the stand-ins."""
        return self.step_ms - self.standin_ms


def decode(num_sequences: int, *, full: bool = False, one_rests: bool = False) -> Steps:
    """Make steps of one token for each of some sequences, of which the last may rest in each other step."""

    def batch(number: int) -> StepBatch:
        count = num_sequences - (number % 2 if one_rests else 0)
        past_lens = np.full(count, number, np.int32)
        if one_rests and count == num_sequences:
            past_lens[-1] = number // 2
        return StepBatch(
            token_ids=np.full(count, 7, np.int64),
            past_lens=past_lens,
            query_begins=np.arange(count + 1, dtype=np.int32),
            block_ids=np.arange(count, dtype=np.int32),
            block_begins=np.arange(count + 1, dtype=np.int32),
            logit_rows=np.arange(count, dtype=np.int64),
            full_rows=np.full(count, full),
        )

    return batch


def mixed(num_tokens: int) -> Steps:
    """Make steps of one token for 63 sequences and a new sequence of some tokens."""
    alone = decode(NUM_ROWS - 1)

    def batch(number: int) -> StepBatch:
        base = alone(number)
        count = base.num_sequences
        return StepBatch(
            token_ids=np.append(base.token_ids, np.full(num_tokens, 9)),
            past_lens=np.append(base.past_lens, np.int32(0)),
            query_begins=np.append(base.query_begins, np.int32(count + num_tokens)),
            block_ids=np.append(base.block_ids, np.int32(NUM_ROWS - 1)),
            block_begins=np.append(base.block_begins, np.int32(count + 1)),
            logit_rows=np.append(base.logit_rows, count + num_tokens - 1),
            full_rows=np.zeros(count + 1, np.bool_),
        )

    return batch


KINDS: dict[str, Steps] = {
    "64 sequences": decode(NUM_ROWS),
    "64 sequences, full rows": decode(NUM_ROWS, full=True),
    "63 or 64 sequences in turn": decode(NUM_ROWS, one_rests=True),
    "63 sequences and a prompt of 64 tokens": mixed(64),
}


@contextmanager
def open_context(*, cuda_graphs: bool) -> Iterator[tuple[Rig, TrtContext]]:
    """Make a context on a model of as many layers as the demo model, and otherwise tiny."""
    model = replace(tiny.LLAMA_TIED, name="tiny-30", num_layers=NUM_LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_hf(model, Path(folder) / model.name)
        rig = make_rig(lazy=True, is_computing=False, total_bytes=2 << 30)
        options = EngineOptions(
            WeightFormat.F16, Precision.F16, max_batch=NUM_ROWS, cuda_graphs=cuda_graphs,
            cache_folder=Path(folder) / "cache",
        )  # fmt: skip
        engine = rig.open(path, options)
        context = engine.create_context()
        assert context.cache.num_blocks == NUM_ROWS
        try:
            yield rig, context
        finally:
            context.close()
            engine.close()


def measure(rig: Rig, context: TrtContext, steps: Steps, num_steps: int = 200) -> HostWork:
    """Take steps of one kind and time them up to the wait, and after it."""
    times_s, waited_s = [], 0.0
    event = context.__dict__["_done"]
    wait = event.synchronize

    def timed_wait() -> None:
        nonlocal waited_s
        began_s = time.perf_counter()
        wait()
        waited_s += time.perf_counter() - began_s

    event.synchronize = timed_wait
    profile = cProfile.Profile()
    try:
        for number in range(20):
            context.step(steps(number))
        with rig.device() as device:
            num_cuda_calls = sum(device.num_calls.values())
            num_tensorrt_calls = rig.trt.behaviour.num_calls
            for number in range(20, 20 + num_steps):
                batch, waited_s = steps(number), 0.0
                began_s = time.perf_counter()
                context.step(batch)
                times_s.append(time.perf_counter() - began_s - waited_s)
            num_cuda_calls = sum(device.num_calls.values()) - num_cuda_calls
            num_tensorrt_calls = rig.trt.behaviour.num_calls - num_tensorrt_calls
        for number in range(20 + num_steps, 40 + num_steps):
            batch = steps(number)
            profile.runcall(context.step, batch)
    finally:
        event.synchronize = wait
    step_ms = float(np.median(times_s)) * 1e3
    standin_ms = step_ms * _standins_share(profile)
    return HostWork(step_ms, standin_ms, num_cuda_calls / num_steps, num_tensorrt_calls / num_steps)


def _standins_share(profile: cProfile.Profile) -> float:
    """Part of a profile's time, without the waiting, that is spent in the stand-ins and beneath them."""
    stats = pstats.Stats(profile)
    waiting = own = 0.0
    for (file, _, name), (_, _, _, total, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if name == "timed_wait":
            waiting += total
        elif "standins" in file:
            # What is called from outside of them stands for all that they do.
            own += sum(time[3] for (caller, _, _), time in callers.items() if "standins" not in caller)
    return float(own / (stats.total_tt - waiting))  # type: ignore[attr-defined]


def main() -> None:
    """Print a table, or where the time goes in steps of 64 sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--profile", action="store_true", help="show where the time of a mixed step goes")
    if parser.parse_args().profile:
        _print_profile()
        return
    table = Table("step", "ms", "of it the stand-ins'", "ours", "calls of CUDA", "of TensorRT")
    for cuda_graphs in (False, True):
        with open_context(cuda_graphs=cuda_graphs) as (rig, context):
            for what, steps in KINDS.items():
                what += ", CUDA graphs" if cuda_graphs else ""
                _say(what)
                work = measure(rig, context, steps)
                numbers = (work.step_ms, work.standin_ms, work.own_ms)
                calls = (work.num_cuda_calls, work.num_tensorrt_calls)
                table.add_row(what, *(f"{ms:.2f}" for ms in numbers), *(f"{count:.0f}" for count in calls))
    Console().print(table)


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def _print_profile() -> None:
    with open_context(cuda_graphs=False) as (_, context):
        steps = KINDS["63 sequences and a prompt of 64 tokens"]
        for number in range(10):
            context.step(steps(number))
        profile = cProfile.Profile()
        for number in range(10, 110):
            profile.runcall(context.step, steps(number))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
