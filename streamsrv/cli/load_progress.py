"""How a bench shows how far a load is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from streamsrv.bench.load_messages import Plan, Progress


class LoadProgress:
    """A line for the warm-up, if there is one, and then one for the load."""

    def __init__(self, bars: "Bars", load: str, total: int | None, num_warmup: int) -> None:
        """`load` is what the load is called; `total` is how many requests it has, where that is known."""
        self._bars = bars
        self._warmup = bars.add_task("warm-up", total=num_warmup, visible=num_warmup > 0, tokens=0, failed=0)
        self._load = bars.add_task(load, start=False, total=total, visible=False, tokens=0, failed=0)
        if not num_warmup:
            self._begin_load()

    def warmed_up(self, progress: "Progress") -> None:
        """Show what has ended of the warm-up."""
        self._advance(self._warmup, progress)
        if self._bars.tasks[self._warmup].finished:
            self._begin_load()

    def loaded(self, progress: "Progress") -> None:
        """Show what has ended of the load."""
        self._advance(self._load, progress)

    def _begin_load(self) -> None:
        self._bars.update(self._warmup, visible=False)
        self._bars.start_task(self._load)
        self._bars.update(self._load, visible=True)

    def _advance(self, task: "TaskID", progress: "Progress") -> None:
        fields = self._bars.tasks[task].fields
        self._bars.update(
            task,
            refresh=True,  # it comes a few times a second
            advance=progress.num_requests,
            tokens=fields["tokens"] + progress.num_tokens,
            failed=fields["failed"] + progress.num_failed,
        )


@contextmanager
def load_progress(plan: "Plan", seed: int, num_warmup: int) -> Iterator[LoadProgress]:
    """Show on a terminal how far a load is. On standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from streamsrv.bench.schedule import OpenPlan

    total: int | None
    if isinstance(plan, OpenPlan):
        load, total = f"{plan.rate_per_s:g} requests/s", len(plan.due_times_s(seed))
    else:
        load, total = f"{plan.concurrency} clients", plan.num_requests
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}: {task.completed} requests, {task.fields[tokens]} tokens,"),
        TextColumn("{task.fields[failed]} failed"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        yield LoadProgress(bars, load, total, num_warmup)
