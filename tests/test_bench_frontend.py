import random
import struct
from pathlib import Path

import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.frontend.http2 import PREFACE, AnswerCounter, frame, opening, request
from streamsrv.bench.frontend.load import (
    LoadCounts,
    Protocol,
    Target,
    find_h2load,
    h2load_command,
    num_connections,
    parse_h2load,
)
from streamsrv.bench.frontend.prefixed import pack, unpack
from streamsrv.bench.frontend.profile_section import profile_rows, profile_sections
from streamsrv.bench.frontend.profiled import read_profile, write_profile
from streamsrv.bench.frontend.rig import MAX_TOKENS, Cores, running_rig
from streamsrv.bench.frontend.rounds import num_requests_of
from streamsrv.bench.frontend.sample import Sample, Spread
from streamsrv.bench.frontend.sampler import Profile
from streamsrv.bench.frontend.sse_server import merged
from streamsrv.bench.frontend.tables import goal_section, speed_section
from streamsrv.bench.frontend.variant import (
    BARE_EIGHT,
    BARE_ONE,
    EIGHT,
    ONE,
    READY,
    SSE_EIGHT,
    SSE_ONE,
)
from streamsrv.config import Address

PRINTED = """\
starting benchmark...
finished in 2.50s, 204.80 req/s, 2.21MB/s
requests: 512 total, 512 started, 512 done, 512 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 512 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 5.53MB (5799936) total, 28.00KB (28672) headers (space savings 74.77%), 2.10MB (2202112) data
"""
TARGET = Target(Protocol.GRPC, Address("127.0.0.1", 5), "/a.B/C", Path("/request"))


def test_what_h2load_counted_is_read_in_any_unit_of_time() -> None:
    assert parse_h2load(PRINTED) == LoadCounts(2.5, 512, 5799936)
    assert parse_h2load(PRINTED.replace("2.50s", "250.00ms")).seconds == pytest.approx(0.25)
    assert parse_h2load(PRINTED.replace("2.50s", "800us")).seconds == pytest.approx(0.0008)


def test_requests_that_failed_and_words_that_are_not_known_are_errors() -> None:
    with pytest.raises(BenchError, match="of 512 requests of h2load 2 failed"):
        parse_h2load(PRINTED.replace("512 succeeded, 0 failed", "510 succeeded, 2 failed"))
    with pytest.raises(BenchError, match="its last line is 'cannot connect'"):
        parse_h2load("starting\ncannot connect\n")


def test_grpc_shares_connections_and_http_1_does_not() -> None:
    assert [num_connections(Protocol.GRPC, n) for n in (1, 64, 256, 1024)] == [1, 1, 4, 16]
    assert num_connections(Protocol.HTTP1, 256) == 256
    command = " ".join(h2load_command("h2load", TARGET, 256, 512))
    assert command.startswith("h2load -n 512 -c 4 -t 1 -d /request -H content-type: application/grpc -m 64")
    assert command.endswith("http://127.0.0.1:5/a.B/C")
    plain = Target(Protocol.HTTP1, TARGET.address, "/x", TARGET.body)
    assert "--h1 -m 1" in " ".join(h2load_command("h2load", plain, 256, 512))


def test_messages_come_out_of_a_file_as_they_went_in() -> None:
    messages = [b"", b"a", bytes(70_000)]
    assert unpack(pack(messages)) == messages


def test_a_client_of_http2_opens_its_windows_and_sends_headers_as_literals() -> None:
    assert opening().startswith(PREFACE)
    sent = request(3, [("te", "trailers")], b"body")
    assert sent[:9] == b"\x00\x00\x0d\x01\x04\x00\x00\x00\x03"
    assert sent[9:22] == b"\x00\x02te\x08trailers"
    assert sent[22:] == b"\x00\x00\x04\x00\x01\x00\x00\x00\x03body"


def test_ended_and_broken_streams_are_counted_however_the_bytes_come() -> None:
    rng = random.Random(1)
    data = b"".join(
        [
            frame(4, 0, 0, bytes(6)),  # settings, to be acknowledged
            frame(1, 4, 1, b"headers"),
            frame(0, 0, 1, bytes(300)),
            frame(0, 1, 3, b"the end"),
            frame(6, 0, 0, b"12345678"),  # a ping, to be answered
            frame(1, 5, 1, b"trailers"),
            frame(3, 0, 1, bytes(4)),  # after the end, without an error
            frame(3, 0, 5, struct.pack(">I", 2)),
        ]
    )
    counter, answers, at = AnswerCounter(), b"", 0
    while at < len(data):
        size = rng.randint(1, 40)
        answers += counter.receive(data[at : at + size])
        at += size
    assert (counter.num_ended, counter.num_reset, counter.num_bytes) == (2, 1, len(data))
    assert answers == frame(4, 1, 0) + frame(6, 1, 0, b"12345678")


def sample(num_messages: int = 100, cpu_s: float = 1.0, wire_bytes: int = 9600) -> Sample:
    return Sample(2.0, num_messages, 96, cpu_s, wire_bytes, worker_cpu_s=cpu_s / 4)


def test_a_sample_tells_rates_by_the_clock_and_by_processor_time() -> None:
    one = sample()
    assert (one.messages_per_s, one.tokens_per_s, one.tokens_per_core_s) == (50, 48, 96)
    assert (one.cpu_us_per_message, one.front_us_per_message) == (10_000, 7_500)
    assert (one.bytes_per_token, one.tokens_per_message, one.busy) == (100, 0.96, 0.5)


def test_ratios_are_taken_within_a_round() -> None:
    above, below = [sample(100), sample(300), sample(80)], [sample(200), sample(100), sample(80)]
    ratio = Spread.of_ratio(above, below, lambda s: s.messages_per_s)
    assert ratio == Spread(1.0, 0.5, 3.0)


def test_runs_send_each_stream_equally_often() -> None:
    for num_streams in (1, 3, 64, 256, 1024):
        assert num_requests_of(num_streams, quick=False) % num_streams == 0
        assert num_requests_of(num_streams, quick=False) >= num_requests_of(num_streams, quick=True)
    assert num_requests_of(1024, quick=False) == 2048


def test_the_tables_hold_what_was_measured_against_the_goals() -> None:
    samples = {
        ONE: [sample(60, wire_bytes=960)],
        EIGHT: [sample(20)],
        BARE_ONE: [sample(120)],
        BARE_EIGHT: [sample(50)],
        SSE_ONE: [sample(wire_bytes=9600)],
        SSE_EIGHT: [sample()],
        READY: [],
    }
    speed = speed_section({256: samples}, "How.")
    assert "| 256 | streamsrv | 1 | 1.60 | **30** (30-30) |" in speed
    assert speed.count("\n| 256 |") == 6
    goals = goal_section(samples, 256)
    assert "share of the bare handler's, one token a message | **0.50** (0.50-0.50) | at least 0.6 |" in goals
    assert "| bytes of SSE at one token an event / ours at one token | **10.00** (10.00-10.00) |" in goals
    assert "ready" not in goals  # nothing of it was measured


def test_a_profile_is_told_by_threads_and_then_by_the_loops_functions(tmp_path: Path) -> None:
    profile = Profile(10.0)
    profile.threads_s.update({"MainThread": 6.0, "streamsrv-worker": 3.0, "idle": 0.0})
    profile.own_s.update({f"f{i}": i / 100 for i in range(40)})
    profile.all_s.update({f"f{i}": i / 50 for i in range(40)})
    profile.all_s["Worker._take_steps (streamsrv/worker.py)"] = 2.0
    write_profile(tmp_path / "profile", profile)
    rows = profile_rows(read_profile(tmp_path / "profile"), 1_000_000)
    assert rows[:3] == [
        ["**event loop**", "60.0%", "", "6.00"],
        ["**worker**", "30.0%", "", "3.00"],
        ["**threads outside Python**", "10.0%", "", "1.00"],
    ]
    assert rows[3][1:] == ["50.0%", "", "5.00"]  # the front end's: less the worker and its steps
    assert rows[4] == ["`f39`", "3.9%", "7.8%", "0.39"]
    assert len(rows) == 4 + 25


def test_texts_are_merged_to_the_last() -> None:
    assert merged(["a", "b", "c"], 2) == ["ab", "c"]


@pytest.mark.parametrize("with_h2load", [False, True])
async def test_all_three_servers_are_counted_to_the_last_message(with_h2load: bool) -> None:
    h2load = find_h2load() if with_h2load else None
    if with_h2load and h2load is None:
        pytest.skip("h2load is not installed")
    async with running_rig(Cores.choose(), h2load) as rig:
        for variant, num_messages in (
            (ONE, MAX_TOKENS + 3),  # the start, and the ends of output and stream
            (EIGHT, None),
            (BARE_ONE, MAX_TOKENS + 3),
            (SSE_ONE, None),
        ):
            counted = await rig.run(variant, 4, 8)
            assert counted.num_tokens == 8 * MAX_TOKENS
            assert counted.seconds > 0
            assert counted.wire_bytes > 10 * counted.num_messages
            if num_messages is not None:
                assert counted.num_messages == 8 * num_messages


async def test_our_server_can_be_profiled() -> None:
    table = await profile_sections(Cores.choose(), None, lambda _: None, {"one": ONE}, num_streams=16)
    assert "| **event loop** |" in table
    assert "InferenceService._send" in table
