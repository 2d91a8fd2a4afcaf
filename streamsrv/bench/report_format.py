"""A report as lines for people and as an object for programs."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from streamsrv.bench.load import LoadPlan
from streamsrv.bench.measure import Measured
from streamsrv.bench.percentiles import Distribution
from streamsrv.bench.report import LoadReport, Rate


def as_object(measured: Measured) -> dict[str, Any]:
    """Lay everything out for JSON; what was not measured is null."""
    report = measured.report
    result = {**asdict(measured), "report": asdict(report)}
    result["report"] |= {
        "completed_per_s": report.completed_per_s,
        "client_busy": report.client_busy,
        "notes": list(report.notes),
    }
    for name, rate in (("whole", report.whole), ("steady", report.steady)):
        if rate is not None:
            result["report"][name] |= {
                "output_tokens_per_s": rate.output_tokens_per_s,
                "prompt_tokens_per_s": rate.prompt_tokens_per_s,
            }
    return result


def as_lines(measured: Measured) -> Iterator[str]:
    """Lay it out for reading."""
    report = measured.report
    yield f"engine {measured.engine}, streamsrv {measured.version}, seed {measured.seed}"
    cut = f", {report.num_cut} cut off" if measured.was_stopped else ""
    yield f"{_load(measured)}: {report.num_completed} requests completed, {report.num_failed} failed{cut}"
    for error in report.errors:
        yield f"  {error.num} x {error.code}, the first: {error.message}"
    for note in report.notes:
        yield f"  note: {note}"
    yield ""
    yield f"{'milliseconds':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    for name, distribution in (
        ("time to first token", report.time_to_first_token_s),
        ("inter-token", report.inter_token_s),
        ("between messages", report.message_gap_s),
        ("end to end", report.end_to_end_s),
        ("sent late by", report.lateness_s),
    ):
        if distribution is not None:
            yield f"{name:<24}{_milliseconds(distribution)}"
    yield "inter-token: the time between two messages, divided by the second one's tokens, once for each"
    if report.lateness_s is not None:
        yield "first token and end to end count from when a request was due, so lateness is in them"
    yield ""
    yield f"{'tokens/s':<24}{'output':>10}{'prompt':>10}{'seconds':>10}"
    if report.steady is not None:
        yield f"{'steady part':<24}{_rate(report.steady)}"
    yield f"{'whole run':<24}{_rate(report.whole)}"
    if report.steady is not None:
        yield "steady part: all clients had a request, and each had seen its first token"
    yield ""
    yield from _costs(report)


def summary_lines(list_: Seq[Measured]) -> Iterator[str]:
    """Lay several loads out as one table, a line each."""
    name = "clients" if isinstance(list_[0].plan, LoadPlan) else "requests/s"
    yield f"{'':<12}{'tokens/s':>16}{'first token, ms':>27}{'inter-token, ms':>27}{'end to end, ms':>27}"
    percents = f"{'p50':>9}{'p90':>9}{'p99':>9}"
    yield f"{name:<12}{'output':>8}{'prompt':>8}{percents}{percents}{percents}{'failed':>8}"
    for measured in list_:
        report = measured.report
        rate = report.steady or report.whole
        latencies = "".join(
            _percentiles(distribution)
            for distribution in (report.time_to_first_token_s, report.inter_token_s, report.end_to_end_s)
        )
        yield (
            f"{measured.load:<12g}{rate.output_tokens_per_s:>8.0f}{rate.prompt_tokens_per_s:>8.0f}{latencies}"
            f"{report.num_failed:>8}{'  *' if report.notes else ''}"
        )
    if any(measured.report.steady is not None for measured in list_):
        yield "tokens/s: of the steady part, or of the whole run where there was none"
    if any(measured.report.notes for measured in list_):
        yield "* see the notes of this load"


def _load(measured: Measured) -> str:
    report = measured.report
    if report.offered_per_s is None:
        return f"closed loop, {measured.load:g} client{'' if measured.load == 1 else 's'}"
    return f"open loop, {report.offered_per_s:g} requests/s due and {report.completed_per_s:.2f} completed"


def _costs(report: LoadReport) -> Iterator[str]:
    num_tokens = max(report.whole.num_output_tokens, 1)
    yield f"{'tokens per message':<24}{report.tokens_per_message:>10.2f}"
    yield f"{'bytes per token, gRPC':<24}{report.message_bytes_per_token:>10.1f}"
    if report.wire_bytes is not None:
        yield (
            f"{'bytes per token, wire':<24}{report.wire_bytes.down / num_tokens:>10.1f}"
            f"   and {report.wire_bytes.up / num_tokens:.1f} to the server"
        )
    if report.server_cpu_s is not None:
        yield f"{'server processor time':<24}{_cpu(report.server_cpu_s, report.whole)}"
    yield f"{'client processor time':<24}{_cpu(report.client_cpu_s, report.whole)}"


def _milliseconds(d: Distribution) -> str:
    return "".join(f"{1000 * seconds:>10.1f}" for seconds in (d.mean, d.p50, d.p90, d.p99, d.max))


def _percentiles(d: Distribution | None) -> str:
    if d is None:
        return f"{'-':>9}" * 3
    return "".join(f"{1000 * seconds:>9.1f}" for seconds in (d.p50, d.p90, d.p99))


def _rate(rate: Rate) -> str:
    return f"{rate.output_tokens_per_s:>10.1f}{rate.prompt_tokens_per_s:>10.1f}{rate.seconds:>10.2f}"


def _cpu(seconds: float, whole: Rate) -> str:
    per_token_us = 1e6 * seconds / max(whole.num_output_tokens, 1)
    return f"{seconds:>10.2f} s, {seconds / whole.seconds:.2f} processors, {per_token_us:.0f} µs a token"
