"""The checks, each of which returns what it found or raises."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from engines.api import EngineNotInstalledError, FloatArray
from engines.plans import PLAN_FILE
from engines.trt_context import TrtContext
from tests import steps, tiny
from tests.gpu.setup import NUM_STEPS, CheckError, Reference, Setup, compare, require_close
from tests.steps import Feed

_CUDA_13 = 13000
"""The CUDA version that drivers from r580 on support."""
_POISON = 0x4C
"""As every byte of a cache: 17.2 in float16, which weighs much if it is looked at and overflows nothing if it
is multiplied before it is hidden."""

Check = Callable[[Setup], str]


def versions(setup: Setup) -> str:
    """Library, GPU, driver."""
    device = setup.cuda.open_device(setup.options.device)
    try:
        with device.activate():
            free, total = device.memory_info()
        major, minor = device.compute_capability
        found = (
            f"{setup.library.name} {setup.library.version}; {device.name}, compute capability "
            f"{major}.{minor}, {free >> 20} of {total >> 20} MiB free; the driver supports CUDA "
            f"{device.driver_version / 1000:.1f}"
        )
        if device.driver_version < _CUDA_13:
            raise CheckError(f"{found}: a driver of r580 or newer is needed")
        return found
    finally:
        device.close()


def interface(setup: Setup) -> str:
    """The loaded engine's tensors, types, aliases and profiles, which opening has compared."""
    began_s = time.monotonic()
    engine = setup.open()
    took_s = time.monotonic() - began_s
    try:
        loaded = engine._loaded
        assert loaded is not None
        trt_engine, shape = loaded.engine, loaded.interface.shape
        aliases = [trt_engine.get_aliased_input_tensor(f"new_{n}") for n in loaded.interface.cache_names]
        return (
            f"opened in {took_s:.0f} s; {trt_engine.num_io_tensors} tensors, {len(aliases)} caches in place, "
            f"{trt_engine.num_optimization_profiles} profiles, batches to {shape.max_batch}, pieces to "
            f"{shape.max_piece} tokens, {shape.max_len} cells, "
            f"{trt_engine.device_memory_size_v2 >> 20} MiB of scratch memory"
        )
    finally:
        engine.close()


def _poison(context: TrtContext) -> None:
    """Fill every cell of the cache with what must not be looked at."""
    num_bytes = (context.cache.num_blocks + 1) * context.cache.bytes_per_block
    with context._device.activate():
        context._device.fill(context._caches, _POISON, num_bytes, context._stream)
        context._stream.synchronize()


def _rows(context: TrtContext, references: Sequence[Reference], blocks: Sequence[int]) -> list[FloatArray]:
    """Give each sequence's last logits: prefill of one after the other, then decode of all at once."""
    feeds = [Feed(list(r.fed), [block]) for r, block in zip(references, blocks, strict=True)]
    rows: list[list[FloatArray]] = [[] for _ in feeds]

    def take(parts: list[tuple[int, int]]) -> None:
        batch = steps.batch([(feeds[i], count) for i, count in parts])
        batch = replace(batch, logit_rows=batch.query_begins[1:].astype(np.int64) - 1)
        logits = context.step(batch).logits
        for (i, count), row in zip(parts, logits, strict=True):
            rows[i].append(row.copy())
            feeds[i].past += count

    for i, reference in enumerate(references):
        begun = [(j, 1) for j in range(i) if feeds[j].past < len(feeds[j].token_ids)]
        take([*begun, (i, len(reference.prompt))])
    while going := [i for i, feed in enumerate(feeds) if feed.past < len(feed.token_ids)]:
        take([(i, 1) for i in going])
    return [np.stack(of_one) for of_one in rows]


def _compare_all(
    context: TrtContext, references: Sequence[Reference], blocks: Sequence[int]
) -> list[tuple[float, int]]:
    found = _rows(context, references, blocks)
    return [compare(rows, r.logits) for rows, r in zip(found, references, strict=True)]


def one_sequence(setup: Setup) -> str:
    """Prefill and decode of one sequence on a poisoned cache."""
    with setup.context() as context:
        _poison(context)
        return require_close(_compare_all(context, setup.references[:1], [0]))


def pieces(setup: Setup) -> str:
    """Prefill in pieces, with every row of logits."""
    reference = max(setup.references, key=lambda r: len(r.prompt))
    with setup.context() as context:
        _poison(context)
        logits = steps.logits_of(context, reference.fed, piece=17)
        return require_close([compare(logits[-NUM_STEPS:], reference.logits)])


def ragged(setup: Setup) -> str:
    """Sequences of all lengths at once, prefill and decode mixed, then others in the same rows."""
    with setup.context() as context:
        _poison(context)
        count = min(len(setup.references), context.cache.num_blocks)
        references = setup.references[:count]
        first = _compare_all(context, references, range(count))
        again = _compare_all(context, references[::-1], range(count))
        return require_close([*first, *again])


def moved_rows(setup: Setup) -> str:
    """Few sequences in far rows, which are moved together."""
    with setup.context() as context:
        _poison(context)
        last = context.cache.num_blocks - 1
        return require_close(_compare_all(context, setup.references[:2], [0, last]))


def two_contexts(setup: Setup) -> str:
    """Two contexts on two threads and streams at once."""
    engine = setup.open(num_contexts=2)
    both = threading.Barrier(2, timeout=60)

    def run(references: list[Reference]) -> list[tuple[float, int]]:
        context = engine.create_context()
        try:
            both.wait()
            return [d for _ in range(3) for d in _compare_all(context, references, range(len(references)))]
        finally:
            context.close()

    try:
        with ThreadPoolExecutor(2) as threads:
            halves = threads.map(run, (setup.references[:3], setup.references[3:6]))
            return require_close([difference for half in halves for difference in half])
    finally:
        engine.close()


def candidates(setup: Setup) -> str:
    """The best tokens and the log-sum-exp beside the full rows."""
    with setup.context() as context:
        feed = Feed(list(setup.references[0].fed), [0])
        result = context.step(steps.batch([(feed, len(feed.token_ids))]))
        assert result.candidates is not None
        logits, found = result.logits, result.candidates
        order = np.argsort(-logits, axis=1, kind="stable")[:, : context.num_candidates]
        num_other = int(np.count_nonzero(found.token_ids != order))
        exact = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
        off = float(np.abs(found.logsumexp - exact).max())
        summary = f"{num_other} of {order.size} candidates differ from the full rows, logsumexp by {off:.1e}"
        if not np.array_equal(found.logits, np.take_along_axis(logits, found.token_ids, 1)) or off > 1e-3:
            raise CheckError(summary)
        if num_other and not np.array_equal(found.logits, np.take_along_axis(logits, order, 1)):
            raise CheckError(summary)
        return summary + (": equal logits in another order" if num_other else "")


def cuda_graphs(setup: Setup) -> str:
    """Decode runs recorded and replayed."""
    try:
        with setup.context(cuda_graphs=True) as context:
            _poison(context)
            count = min(len(setup.references), context.cache.num_blocks)
            found = require_close(_compare_all(context, setup.references[:count], range(count)))
            return f"{found}; {_speed(context, 1)}; {_speed(context, min(8, context.cache.num_blocks))}"
    except EngineNotInstalledError as error:
        raise SkippedError(str(error)) from error


def plan_from_disk(setup: Setup) -> str:
    """A tiny model's plan: built, loaded again, and built again when it is damaged."""
    folder = setup.cache / "tiny"
    path = folder / "model"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny.write_hf(tiny.LLAMA_TIED, path)
    small = Setup(
        setup.cuda, setup.library, path, folder / "cache",
        replace(setup.options, max_batch=4, max_step_tokens=32), [],
    )  # fmt: skip
    times = [_open_s(small), _open_s(small)]
    for file in small.cache.rglob(PLAN_FILE):
        _flip_a_bit(file)
    times.append(_open_s(small))
    with small.context() as context:
        steps.logits_of(context, [1, 2, 3])
    return "opened in {:.1f} s with building, {:.1f} s without, {:.1f} s when it was damaged".format(*times)


def _open_s(setup: Setup) -> float:
    began_s = time.monotonic()
    setup.open().close()
    return time.monotonic() - began_s


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def memory_is_flat(setup: Setup) -> str:
    """A thousand steps, and then ten lives of contexts."""
    engine = setup.open()
    process = psutil.Process()
    try:
        context = engine.create_context()
        try:
            feeds = [Feed([5, 6, 7] * 20, [block]) for block in range(min(4, context.cache.num_blocks))]
            free, resident = 0, 0
            for number in range(1000):
                if number == 200:
                    free, resident = _free(context), process.memory_info().rss
                for feed in feeds:
                    feed.past = 0 if feed.past == 60 else feed.past
                begins = any(feed.past == 0 for feed in feeds)
                parts = [(feed, 3 if begins else 1) for feed in feeds]
                context.step(steps.batch(parts, logits=False))
                for feed, count in parts:
                    feed.past += count
            taken = free - _free(context)
            grown = process.memory_info().rss - resident
        finally:
            context.close()
        for _ in range(10):
            engine.create_context().close()
        summary = f"{taken} bytes of the GPU and {grown >> 10} KiB here in the last 800 of 1,000 steps"
        if taken > 0 or grown > 32 << 20:
            raise CheckError(summary)
        return summary
    finally:
        engine.close()


def _free(context: TrtContext) -> int:
    with context._device.activate():
        return context._device.memory_info()[0]


def speed(setup: Setup) -> str:
    """Tokens per second, greedy, at a few batch sizes, and of prompts."""
    with setup.context() as context:
        sizes = [size for size in (1, 8, 32, 64) if size <= context.cache.num_blocks]
        return "; ".join([*(_speed(context, size) for size in sizes), _prefill_speed(context)])


def _speed(context: TrtContext, size: int, num_steps: int = 50) -> str:
    feeds = [Feed([5] * 400, [block]) for block in range(size)]
    for feed in feeds:
        context.step(steps.batch([(feed, 64)], logits=False))
        feed.past = 64
    times_s = []
    for _ in range(num_steps):
        batch = steps.batch([(feed, 1) for feed in feeds])
        batch = replace(batch, full_rows=np.zeros(size, np.bool_))
        began_s = time.perf_counter()
        context.step(batch)
        times_s.append(time.perf_counter() - began_s)
        for feed in feeds:
            feed.past += 1
    step_s = float(np.median(times_s))
    return f"{size / step_s:,.0f} tokens/s at {size} ({step_s * 1e3:.2f} ms a step)"


def _prefill_speed(context: TrtContext) -> str:
    count = min(512, context._plan.interface.shape.max_piece, context.cache.block_size)
    times_s = []
    for _ in range(5):
        batch = steps.batch([(Feed([5] * count, [0]), count)], logits=False)
        began_s = time.perf_counter()
        context.step(batch)
        times_s.append(time.perf_counter() - began_s)
    return f"{count / float(np.median(times_s)):,.0f} prompt tokens/s"


class SkippedError(Exception):
    """A check cannot be made here."""


CHECKS: Mapping[str, Check] = {
    "versions and driver": versions,
    "the engine's tensors": interface,
    "one sequence": one_sequence,
    "a prompt in pieces": pieces,
    "ragged batches, rows used again": ragged,
    "moved rows": moved_rows,
    "two contexts at once": two_contexts,
    "candidates": candidates,
    "CUDA graphs": cuda_graphs,
    "plans on disk": plan_from_disk,
    "flat memory": memory_is_flat,
    "speed": speed,
}
