import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engines.scripted import ScriptedEngine
from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.checks import check_known, check_lengths, share_of_equal_firsts
from streamsrv.bench.peers.contestants import Served
from streamsrv.bench.peers.figures import Figures, PeerStream
from streamsrv.bench.peers.http_streams import run_http
from streamsrv.bench.peers.rounds import OURS, Results, Rounds
from streamsrv.bench.peers.table import peers_json, peers_table
from streamsrv.bench.prompts import PromptMaker
from tests.servers import running


def stream(*times_s: float, first_id: int = 7) -> PeerStream:
    return PeerStream((first_id, *range(1, len(times_s))), tuple((at_s, 1) for at_s in times_s))


class Contestant:
    """Gives each prompt its tokens a second apart, the first after its own time; runs in this process."""

    pid = os.getpid()
    version = "1"

    def __init__(self, first_s: float, fails_from: int = 1 << 30, num_tokens: int | None = None) -> None:
        self.first_s = first_s
        self.fails_from = fails_from
        self.num_tokens = num_tokens
        self.prompts: list[Seq[Seq[int]]] = []

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
        self.prompts.append(prompts)
        if len(self.prompts) > self.fails_from:
            raise BenchError("its process ended: Killed | by\nsomeone")
        num_tokens = self.num_tokens or max_tokens
        return [stream(*(self.first_s + i for i in range(num_tokens))) for _ in prompts]


async def compare(
    contestants: dict[str, Contestant], num_rounds: int = 3, batches: Seq[int] = (2,)
) -> Results:
    results = Results()
    rounds = Rounds(PromptMaker(range(50), 5, seed=1), 10, results)
    await rounds.run(dict(contestants), batches, num_rounds, lambda _: None)
    return results


def test_tokens_a_second_are_counted_from_the_first_request_to_the_last_token() -> None:
    assert Figures.of([stream(1, 2, 4), stream(2, 3, 5)]).tokens_per_s == 6 / 5


def test_decoding_is_counted_while_every_stream_has_its_first_token_and_none_its_last() -> None:
    # From the second stream's first token, at 2, to the first one's last, at 4: at 3 and 4, and at 3 and 4.
    figures = Figures.of([stream(1, 2, 3, 4), stream(2, 3, 4, 5)])
    assert figures.decode_tokens_per_s == 4 / 2


def test_streams_that_never_decode_together_have_no_rate_of_decoding() -> None:
    assert Figures.of([stream(1, 2), stream(3, 4)]).decode_tokens_per_s is None


def test_the_time_to_the_first_token_is_that_of_the_middle_stream() -> None:
    assert Figures.of([stream(9, 10), stream(1, 10), stream(2, 10)]).first_token_p50_s == 2


def test_tokens_of_one_message_do_not_shorten_the_wait_for_it() -> None:
    whole = PeerStream((1, 2, 3, 4), ((1.0, 1), (4.0, 3)))
    assert Figures.of([whole]).inter_token_p99_s == 3.0


def test_a_single_token_has_no_time_between_tokens() -> None:
    figures = Figures.of([stream(1)])
    assert figures.inter_token_p99_s is None
    assert figures.decode_tokens_per_s is None


@pytest.mark.parametrize(
    "streams",
    [[stream(1, 2)], [stream(1, 2, 3), stream(1, 2)], [PeerStream((1, 2, 3), ((1.0, 2),)), stream(1, 2, 3)]],
    ids=["too few", "one is shorter", "not all came"],
)
def test_outputs_of_another_length_than_asked_for_are_refused(streams: list[PeerStream]) -> None:
    with pytest.raises(BenchError, match="2 of 3 were asked for"):
        check_lengths(streams, 2, 3)


def test_first_tokens_are_compared_prompt_by_prompt() -> None:
    ours = [stream(1), stream(1), stream(1, first_id=3), stream(1)]
    theirs = [stream(2), stream(2), stream(2, first_id=4), stream(2)]
    assert share_of_equal_firsts(theirs, ours) == 0.75


async def test_an_output_that_goes_on_otherwise_than_the_model_does_is_not_sane() -> None:
    tokenizer = Tokenizer.from_str(ScriptedEngine().model.vocabulary.tokenizer_json)
    contestant = Contestant(1)
    text = tokenizer.decode((await contestant.run([[1]], 4))[0].token_ids)
    await check_known(contestant, tokenizer, {"What follows?": text[:2]})
    with pytest.raises(BenchError, match="not sane: after 'What follows"):
        await check_known(contestant, tokenizer, {"What follows?": "something else"})


async def test_all_get_the_same_prompts_and_no_round_those_of_another() -> None:
    contestants = {OURS: Contestant(1), "a": Contestant(2)}
    await compare(contestants, batches=(1, 3))
    assert contestants[OURS].prompts == contestants["a"].prompts
    prompts = [tuple(ids) for batch in contestants[OURS].prompts for ids in batch]
    assert len(set(prompts)) == len(prompts) == 4 * (1 + 3)  # one round more than is counted


async def test_what_warms_up_is_not_counted() -> None:
    results = await compare({OURS: Contestant(1), "a": Contestant(2)}, num_rounds=2)
    assert [len(rounds) for rounds in results.figures[2].values()] == [2, 2]


async def test_a_peer_that_fails_is_no_longer_run_with_so_many_streams_and_the_others_go_on() -> None:
    broken = Contestant(2, fails_from=2)
    results = await compare({OURS: Contestant(1), "a": broken, "b": Contestant(3)})
    assert len(broken.prompts) == 3
    assert results.failed_at == {2: {"a": "its process ended: Killed | by\nsomeone"}}
    assert [len(results.figures[2][name]) for name in (OURS, "a", "b")] == [3, 1, 3]


async def test_a_peer_whose_outputs_are_too_short_is_not_compared() -> None:
    results = await compare({OURS: Contestant(1), "a": Contestant(1, num_tokens=4)})
    assert "4 tokens" in results.failed_at[2]["a"]
    assert "a" not in results.figures[2]


async def test_a_peer_that_takes_fewer_streams_is_compared_with_as_many_as_it_takes() -> None:
    class Small(Contestant):
        async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
            if len(prompts) > 2:
                raise BenchError("at most 2")
            return await super().run(prompts, max_tokens)

    results = await compare({OURS: Contestant(1), "a": Small(1)}, batches=(2, 3))
    assert len(results.figures[2]["a"]) == 3
    assert results.failed_at == {3: {"a": "at most 2"}}
    assert "not measured: at most 2" in peers_table(results, {OURS: "", "a": ""}, (2, 3)).splitlines()[-1]


async def test_our_own_failure_ends_the_comparison() -> None:
    with pytest.raises(BenchError, match="Killed"):
        await compare({OURS: Contestant(1, fails_from=1), "a": Contestant(1)})


async def test_the_table_has_a_row_for_each_with_the_median_ratio_and_its_range() -> None:
    results = await compare({OURS: Contestant(1), "a": Contestant(2)})
    table = peers_table(results, {OURS: "int8", "a": "bf16"}, (2,))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {12}
    # Twenty tokens until 10 s and until 11 s.
    assert rows[2] == ["2", OURS, "int8", "2", "1", "2", "1", "1000", "1", "1000.0", "1", "100"]
    assert rows[3][:5] == ["2", "a", "bf16", "2", "**1.10** (1.10-1.10)"]
    assert rows[3][7:9] == ["2000", "**0.50** (0.50-0.50)"]


async def test_what_could_not_be_measured_is_a_row_that_says_why() -> None:
    results = await compare({OURS: Contestant(1), "a": Contestant(2, fails_from=0)})
    line = peers_table(results, {OURS: "int8", "a": "bf16"}, (2,)).splitlines()[-1]
    assert "| 2 | a | bf16 | not measured: its process ended: Killed \\| by someone | - |" in line
    assert line.count(" | ") == 11


async def test_the_json_has_each_rounds_numbers() -> None:
    results = await compare({OURS: Contestant(1), "a": Contestant(2)}, num_rounds=2)
    numbers = json.loads(json.dumps(peers_json(results, {OURS: "int8", "a": "bf16"})))
    runs = [(run["streams"], run["server"], run["round"]) for run in numbers["runs"]]
    assert sorted(runs) == [(2, "a", 0), (2, "a", 1), (2, OURS, 0), (2, OURS, 1)]
    assert {run["first_token_p50_s"] for run in numbers["runs"] if run["server"] == "a"} == {2}


async def test_our_server_gives_exactly_the_tokens_asked_for_each_with_its_time() -> None:
    async with running(ScriptedEngine()) as server:
        served = Served(server.client, os.getpid(), "1")
        streams = await served.run([[5, 6, 7], [8, 9]], 6)
    check_lengths(streams, 2, 6)
    assert all(0 < one.first_s <= one.last_s for one in streams)


@asynccontextmanager
async def http_server(answer: Callable[[dict[str, object]], bytes]) -> AsyncIterator[str]:
    """Answer each request's body on a connection that then ends."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        writer.write(answer(json.loads(await reader.readexactly(length))))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def events(*values: dict[str, object]) -> list[bytes]:
    return [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "plain"])
async def test_a_stream_of_server_sent_events_is_read_however_it_is_cut(chunked: bool) -> None:
    def answer(body: dict[str, object]) -> bytes:
        assert body["n_predict"] == 3
        text = b"".join(
            events({"tokens": [4], "stop": False}, {"tokens": [5, 6], "stop": False}, {"tokens": []})
        )
        head = b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if chunked else b"") + b"\r\n"
        if not chunked:
            return head + text
        pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
        return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    async with http_server(answer) as url:
        both = await run_http(url, [[1, 2], [3, 4]], 3)
    check_lengths(both, 2, 3)
    assert both[0].token_ids == (4, 5, 6)
    assert [num for _, num in both[0].arrivals] == [1, 2]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503"),
        (b'HTTP/1.1 200 OK\r\n\r\nerror: {"message": "too long"}\n\n', "too long"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nshort", "broke off"),
    ],
    ids=["status", "event", "cut"],
)
async def test_a_refused_or_broken_http_stream_says_so(answer: bytes, message: str) -> None:
    async with http_server(lambda _: answer) as url:
        with pytest.raises(BenchError, match=message):
            await run_http(url, [[1]], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "nobody"], "'nobody' is no peer"),
        (["--streams", "8,0"], "at least 1"),
        (["--cores", "0,x"], "numbers"),
        (["--cores", "99999"], "--cores names processors that cannot be used"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamsrv.bench.peers", "--environments", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert message in done.stderr
    assert "Traceback" not in done.stderr
