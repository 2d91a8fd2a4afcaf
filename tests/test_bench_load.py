import json
import os
from pathlib import Path
from typing import Any

import pytest

from engines.scripted import ScriptedEngine
from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import LoadPlan
from streamsrv.bench.measure import Measured, RequestShape, measure
from streamsrv.bench.report_format import as_lines, as_object
from streamsrv.cli import run as run_command
from streamsrv.config import Address
from tests.servers import TestServer, running

SHAPE = RequestShape(num_prompt_tokens=20, max_tokens=12)


async def measured(
    server: TestServer, plan: LoadPlan, shape: RequestShape = SHAPE, **options: Any
) -> Measured:
    return await measure(Address.parse(server.target, "the server"), plan, shape, seed=5, **options)


@pytest.mark.parametrize("zstd", [True, False])
async def test_a_closed_loop_receives_every_token_and_no_error(zstd: bool) -> None:
    shape = RequestShape(num_prompt_tokens=20, max_tokens=12, zstd=zstd, max_tokens_per_chunk=5)
    async with running() as server:
        result = await measured(server, LoadPlan(3, num_requests=10), shape, num_warmup=4)
    report = result.report
    assert (report.num_completed, report.errors) == (10, ())
    assert report.whole.num_output_tokens == 10 * 12
    assert report.whole.num_prompt_tokens == 10 * 20
    assert result.engine == "scripted"


async def test_a_loop_for_a_time_ends_its_last_requests_properly() -> None:
    async with running() as server:
        report = (await measured(server, LoadPlan(2, duration_s=0.2))).report
    assert report.num_completed >= 2
    assert report.whole.num_output_tokens == report.num_completed * 12
    assert report.errors == ()


async def test_the_relay_counts_more_than_the_messages_alone() -> None:
    async with running() as server:
        report = (await measured(server, LoadPlan(1, num_requests=2), count_wire=True)).report
    assert report.wire_bytes is not None
    assert report.wire_bytes.down > 2 * 12 * report.message_bytes_per_token
    assert report.wire_bytes.up > 0


async def test_refused_requests_are_counted_by_their_status() -> None:
    async with running(ScriptedEngine(step_s=0.02), max_running=1, max_waiting=1) as server:
        result = await measured(server, LoadPlan(5, num_requests=5))
    report = result.report
    assert [(error.code, error.num) for error in report.errors] == [("RESOURCE_EXHAUSTED", 3)]
    assert report.num_completed == 2
    assert any("3 x RESOURCE_EXHAUSTED" in line for line in as_lines(result))


async def test_a_load_that_is_refused_altogether_is_an_error_with_the_servers_words() -> None:
    async with running(max_context=16) as server:
        with pytest.raises(BenchError, match=r"not one of 2 requests .* INVALID_ARGUMENT: .*16"):
            await measured(server, LoadPlan(1, num_requests=2))


async def test_prompts_of_ones_own_are_sent_in_turn() -> None:
    shape = RequestShape(prompts=("one two", "three"), max_tokens=4)
    async with running() as server:
        lengths = [len(await server.client.tokenize(prompt)) for prompt in ("one two", "three")]
        report = (await measured(server, LoadPlan(1, num_requests=4), shape)).report
    assert report.whole.num_prompt_tokens == 2 * sum(lengths)


async def test_processor_time_is_that_of_the_process_named() -> None:
    async with running() as server:
        plan = LoadPlan(1, num_requests=1)
        report = (await measured(server, plan, server_pid=os.getpid())).report
        with pytest.raises(BenchError, match="no process 999999999 on this machine"):
            await measured(server, plan, server_pid=999_999_999)
    assert report.server_cpu_s is not None


async def test_a_report_can_be_written_as_json() -> None:
    async with running() as server:
        result = await measured(server, LoadPlan(2, num_requests=4))
    parsed = json.loads(json.dumps(as_object(result)))
    assert parsed["seed"] == 5
    assert parsed["report"]["whole"]["num_output_tokens"] == 48
    assert parsed["report"]["whole"]["output_tokens_per_s"] > 0
    assert parsed["report"]["wire_bytes"] is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must be a whole number from 1"),
        (["--requests", "0"], "--requests is 0"),
        (["--duration", "nan"], "--duration is nan; it must be a number of seconds above 0"),
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["--prompts", "/nowhere/prompts.txt"], "cannot read --prompts /nowhere/prompts.txt: No such file"),
        (["--server", "somewhere"], "--server is 'somewhere'; it must be HOST:PORT"),
        (["--server", "127.0.0.1:1"], "UNAVAILABLE"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", *flags]) == 1
    assert sentence in capsys.readouterr().err


def test_a_file_without_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n")
    assert run_command(["bench", "--prompts", str(path)]) == 1
    assert "has no line with text" in capsys.readouterr().err
