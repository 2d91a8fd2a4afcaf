import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import Arrival, Failure, LoadRun, RequestRecord
from streamsrv.bench.report import LoadReport


def record(
    began_s: float, arrivals: list[tuple[float, int]], failure: Failure | None = None, num_bytes: int = 0
) -> RequestRecord:
    ended_s = arrivals[-1][0] if arrivals else began_s
    return RequestRecord(began_s, ended_s, 10, tuple(Arrival(*a) for a in arrivals), num_bytes, failure)


def run(*records: RequestRecord, concurrency: int, idle_s: float) -> LoadRun:
    began_s = min(r.began_s for r in records)
    return LoadRun(concurrency, began_s, max(r.ended_s for r in records), idle_s, records)


def test_a_gap_is_shared_by_the_tokens_that_came_after_it() -> None:
    one = record(0.0, [(1.0, 1), (1.5, 1), (3.5, 4)])
    report = LoadReport.of(run(one, concurrency=1, idle_s=3.5), client_cpu_s=0.0)
    assert report.inter_token_s is not None
    assert report.message_gap_s is not None
    assert report.inter_token_s.mean == pytest.approx(2.5 / 5)
    assert report.inter_token_s.max == pytest.approx(0.5)
    assert report.message_gap_s.max == pytest.approx(2.0)


def test_a_first_message_counts_for_the_first_token_alone() -> None:
    one = record(0.0, [(1.0, 3)])
    report = LoadReport.of(run(one, concurrency=1, idle_s=1.0), client_cpu_s=0.0)
    assert report.inter_token_s is None
    assert report.time_to_first_token_s is not None
    assert report.time_to_first_token_s.max == 1.0
    assert report.tokens_per_message == 3.0


def test_the_steady_part_lies_between_the_last_first_token_and_the_first_idle_client() -> None:
    first = record(0.0, [(1.0, 1), (2.0, 1), (3.0, 1)])
    second = record(0.0, [(2.0, 1), (3.0, 1), (4.0, 1)])
    report = LoadReport.of(run(first, second, concurrency=2, idle_s=3.0), client_cpu_s=0.0)
    assert report.steady is not None
    assert (report.steady.seconds, report.steady.num_output_tokens) == (1.0, 2)
    assert report.steady.num_prompt_tokens == 0
    assert (report.whole.seconds, report.whole.num_output_tokens, report.whole.num_prompt_tokens) == (
        4.0,
        6,
        20,
    )


def test_without_a_moment_when_all_clients_stream_there_is_no_steady_part() -> None:
    first, second = record(0.0, [(1.0, 1)]), record(0.0, [(2.0, 1)])
    assert LoadReport.of(run(first, second, concurrency=2, idle_s=1.0), client_cpu_s=0.0).steady is None


def test_failures_are_counted_by_code_and_left_out_of_latencies() -> None:
    done = record(0.0, [(1.0, 1)], num_bytes=40)
    refused = [record(0.0, [], Failure("RESOURCE_EXHAUSTED", f"no {i}")) for i in range(2)]
    lost = record(0.0, [(9.0, 1)], Failure("UNAVAILABLE", "gone"))
    report = LoadReport.of(run(lost, *refused, done, concurrency=1, idle_s=9.0), client_cpu_s=0.0)
    assert [(e.code, e.num, e.message) for e in report.errors] == [
        ("RESOURCE_EXHAUSTED", 2, "no 0"),
        ("UNAVAILABLE", 1, "gone"),
    ]
    assert (report.num_completed, report.num_failed) == (1, 3)
    assert report.time_to_first_token_s is not None
    assert report.time_to_first_token_s.max == 1.0
    assert report.message_bytes_per_token == 40.0


def test_a_run_in_which_all_requests_failed_says_why() -> None:
    lost = record(0.0, [], Failure("UNAVAILABLE", "UNAVAILABLE: gone"))
    with pytest.raises(BenchError, match="not one of 1 requests came to its end; UNAVAILABLE: gone"):
        LoadReport.of(run(lost, concurrency=1, idle_s=0.0), client_cpu_s=0.0)
