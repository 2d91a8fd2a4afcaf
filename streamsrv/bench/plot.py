"""Latency and throughput against load, as a picture."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan
from streamsrv.bench.measure import Measured
from streamsrv.bench.percentiles import Distribution
from streamsrv.bench.report import LoadReport

_LATENCIES: tuple[tuple[str, str, Callable[[LoadReport], Distribution | None]], ...] = (
    ("time to first token", "C0", lambda report: report.time_to_first_token_s),
    ("inter-token", "C1", lambda report: report.inter_token_s),
    ("end to end", "C2", lambda report: report.end_to_end_s),
)


def check_plot(path: Path) -> None:
    """See that a plot can be made before a load is run for it.

    Raises:
        BenchError: matplotlib is missing, or the file is no SVG, in no folder or not to be written.
    """
    _matplotlib()
    if path.suffix != ".svg":
        raise BenchError(f"--plot is {path}; plots are written as SVG, so its name must end in .svg")
    if not path.parent.is_dir():
        raise BenchError(f"--plot is {path}; there is no folder {path.parent}")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise BenchError(f"cannot write --plot {path}: {error.strerror}") from None
    if not was_there:
        path.unlink()


def write_plot(list_: Seq[Measured], path: Path) -> None:
    """Write a plot of several loads of one kind.

    Raises:
        BenchError: it cannot be written, or matplotlib is missing.
    """
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    runs = sorted(list_, key=lambda measured: measured.load)
    is_closed = isinstance(runs[0].plan, LoadPlan)
    load_name = "concurrent clients" if is_closed else "requests due a second"
    loads = [measured.load for measured in runs]
    # Text stays text, and equal numbers make equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "streamsrv", "font.size": 9.0}):
        figure = Figure(figsize=(10.0, 4.8), layout="constrained")
        latency, throughput = figure.subplots(1, 2)
        for name, colour, distribution_of in _LATENCIES:
            distributions = [distribution_of(measured.report) for measured in runs]
            for percent, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
                values = [1000 * getattr(d, percent) if d else float("nan") for d in distributions]
                latency.plot(loads, values, style, color=colour, marker=".", label=f"{name}, {percent}")
        latency.set(title="Latency", ylabel="milliseconds", yscale="log")
        rates = [measured.report.steady or measured.report.whole for measured in runs]
        throughput.plot(loads, [rate.output_tokens_per_s for rate in rates], marker="o", label="output")
        throughput.plot(loads, [rate.prompt_tokens_per_s for rate in rates], "--", marker="o", label="prompt")
        throughput.set(title="Throughput", ylabel="tokens a second")
        throughput.set_ylim(bottom=0)
        throughput.legend(fontsize=8.0)
        figure.legend(*latency.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8.0)
        for axes in (latency, throughput):
            axes.set_xlabel(load_name)
            if loads[-1] > 8 * loads[0]:
                axes.set_xscale("log", base=2)
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.set_xticks([], minor=True)
            axes.grid(visible=True, alpha=0.3)
        first = runs[0]
        figure.suptitle(f"engine {first.engine}, streamsrv {first.version}, seed {first.seed}", fontsize=9.0)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise BenchError(f"cannot write --plot {path}: {error.strerror}") from None


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError(
            f"--plot needs matplotlib ({error}); install it with: pip install 'streamsrv[bench]'"
        ) from None
    return matplotlib
