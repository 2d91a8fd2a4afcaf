from dataclasses import replace

import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import Arrival, Failure, LoadRun, RequestRecord
from streamsrv.bench.report import LoadReport


def record(
    began_s: float,
    arrivals: list[tuple[float, int]],
    failure: Failure | None = None,
    num_bytes: int = 0,
    due_s: float | None = None,
) -> RequestRecord:
    ended_s = arrivals[-1][0] if arrivals else began_s
    return RequestRecord(
        began_s, ended_s, 10, tuple(Arrival(*a) for a in arrivals), num_bytes, failure, due_s
    )


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


def open_run(*records: RequestRecord) -> LoadRun:
    ended_s = max(r.ended_s for r in records)
    return LoadRun(None, 0.0, ended_s, ended_s, records, rate_per_s=2.0)


def test_latencies_of_an_open_loop_count_from_when_a_request_was_due() -> None:
    late = record(1.5, [(2.0, 1), (2.5, 1)], due_s=1.0)
    report = LoadReport.of(open_run(late), client_cpu_s=0.0)
    assert report.time_to_first_token_s is not None
    assert report.end_to_end_s is not None
    assert report.lateness_s is not None
    assert (report.time_to_first_token_s.max, report.end_to_end_s.max) == (1.0, 1.5)
    assert report.lateness_s.max == 0.5
    assert report.offered_per_s == 2.0
    assert report.completed_per_s == pytest.approx(1 / 2.5)


def test_a_sender_that_is_late_says_so_and_one_that_is_not_says_nothing() -> None:
    late, in_time = (record(began_s, [(9.0, 1)], due_s=1.0) for began_s in (1.02, 1.001))
    (note,) = LoadReport.of(open_run(late), client_cpu_s=0.0).notes
    assert "did not keep its schedule: requests left 20.0 ms late in the median" in note
    assert LoadReport.of(open_run(in_time), client_cpu_s=0.0).notes == ()


def test_requests_that_failed_late_were_late_too() -> None:
    done = record(1.0, [(2.0, 1)], due_s=1.0)
    refused = record(3.0, [], Failure("UNAVAILABLE", "gone"), due_s=1.5)
    report = LoadReport.of(open_run(done, refused), client_cpu_s=0.0)
    assert report.lateness_s is not None
    assert report.lateness_s.max == 1.5


def test_a_load_process_without_time_to_spare_says_so() -> None:
    one = record(0.0, [(1.0, 1), (10.0, 1)])
    busy = LoadReport.of(run(one, concurrency=1, idle_s=1.0), client_cpu_s=18.0, num_client_processes=2)
    idle = LoadReport.of(run(one, concurrency=1, idle_s=1.0), client_cpu_s=16.0, num_client_processes=2)
    assert [("busy 90% of the time" in note) for note in busy.notes] == [True]
    assert idle.notes == ()


def test_an_open_loop_has_no_steady_part() -> None:
    records = [record(t, [(t + 1.0, 1), (t + 2.0, 1)], due_s=t) for t in (0.0, 1.5, 4.0)]
    report = LoadReport.of(open_run(*records), client_cpu_s=0.0)
    assert report.steady is None
    assert report.whole.num_output_tokens == 6


def test_shares_of_a_load_are_joined_in_the_order_of_their_ends() -> None:
    one, two = record(0.0, [(3.0, 1)]), record(0.5, [(2.0, 1)])
    closed = LoadRun.merged([LoadRun(2, 0.0, 3.0, 2.5, (one,)), LoadRun(1, 0.5, 2.0, 1.5, (two,))])
    assert closed == LoadRun(3, 0.0, 3.0, 1.5, (two, one))
    opened = LoadRun.merged([LoadRun(None, 0.0, 3.0, 3.0, (), 2.0), LoadRun(None, 0.0, 2.0, 2.0, (), 2.0)])
    assert opened == LoadRun(None, 0.0, 3.0, 2.0, (), 2.0)


def test_requests_that_were_cut_off_count_for_the_rates_and_for_nothing_else() -> None:
    done, cut = (replace(record(0.0, [(1.0, 1), (2.0, 1)]), was_cut=was_cut) for was_cut in (False, True))
    report = LoadReport.of(run(done, cut, cut, concurrency=3, idle_s=2.0), client_cpu_s=0.0)
    assert (report.num_completed, report.num_failed, report.num_cut) == (1, 0, 2)
    assert report.whole.num_output_tokens == 6
    assert report.tokens_per_message == 1.0
    (note,) = report.notes
    assert "stopped while 2 of its requests ran" in note


def test_a_run_that_was_stopped_before_a_request_ended_says_so() -> None:
    cut = replace(record(0.0, [(1.0, 1)]), was_cut=True)
    with pytest.raises(
        BenchError, match="not one of 1 requests came to its end; the load was stopped before"
    ):
        LoadReport.of(run(cut, concurrency=1, idle_s=1.0), client_cpu_s=0.0)
