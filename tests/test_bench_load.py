import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.api import StepBatch
from engines.scripted import ScriptedEngine
from streamsrv.api_keys import key_line, new_key
from streamsrv.bench.endpoint import Endpoint
from streamsrv.bench.errors import BenchError
from streamsrv.bench.lengths import Uniform
from streamsrv.bench.load import LoadPlan
from streamsrv.bench.load_messages import Plan
from streamsrv.bench.measure import Measured, bench, measure
from streamsrv.bench.processes import listening_process
from streamsrv.bench.report_format import as_lines, as_object, summary_lines
from streamsrv.bench.schedule import OpenPlan
from streamsrv.bench.workload import RequestShape, Workload
from streamsrv.cli import run as run_command
from streamsrv.config import Address
from streamsrv.errors import CallFailedError, ModelNotFoundError
from tests.certificates import Authority
from tests.servers import TestServer, running, until

SHAPE = RequestShape(num_prompt_tokens=20, max_tokens=12)


def endpoint(server: TestServer, **options: Any) -> Endpoint:
    return Endpoint(Address.parse(server.target, "the server"), **options)


async def measured(
    server: TestServer, plan: Plan, workload: Workload | None = None, **options: Any
) -> Measured:
    return await measure(endpoint(server), plan, workload or Workload(SHAPE), seed=5, **options)


async def started(*flags: str, interrupt: signal.Handlers = signal.SIG_DFL) -> asyncio.subprocess.Process:
    # Shells start what runs in their background without it. A process inherits it; to set it between fork and
    # exec is not safe beside gRPC's threads.
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamsrv", "bench", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def load_processes_of(parent: psutil.Process) -> list[psutil.Process]:
    return [child for child in parent.children() if "streamsrv.bench.load_process" in child.cmdline()]


@pytest.mark.parametrize("zstd", [True, False])
async def test_a_closed_loop_receives_every_token_and_no_error(zstd: bool) -> None:
    shape = RequestShape(num_prompt_tokens=20, max_tokens=12, zstd=zstd, max_tokens_per_chunk=5)
    async with running() as server:
        result = await measured(server, LoadPlan(3, num_requests=10), Workload(shape), num_warmup=4)
    report = result.report
    assert (report.num_completed, report.errors) == (10, ())
    assert report.whole.num_output_tokens == 10 * 12
    assert report.whole.num_prompt_tokens == 10 * 20
    assert result.engine == "scripted"


@pytest.mark.parametrize("plan", [LoadPlan(5, num_requests=11), OpenPlan(200.0, num_requests=11)])
async def test_processes_share_a_load_and_report_it_as_one(plan: Plan) -> None:
    async with running() as server:
        report = (await measured(server, plan, num_processes=3, num_warmup=2)).report
    assert (report.num_completed, report.errors, report.num_client_processes) == (11, (), 3)
    assert report.whole.num_output_tokens == 11 * 12


async def test_processes_without_a_client_or_a_request_are_left_out() -> None:
    async with running() as server, bench(endpoint(server), Workload(SHAPE), seed=5, num_processes=2) as runs:
        one = (await runs.run(LoadPlan(1, num_requests=3))).report
        both = (await runs.run(LoadPlan(2, num_requests=3))).report
    assert (one.num_completed, one.num_client_processes) == (3, 1)
    assert (both.num_completed, both.num_client_processes) == (3, 2)


async def test_a_loop_for_a_time_ends_its_last_requests_properly() -> None:
    async with running() as server:
        report = (await measured(server, LoadPlan(2, duration_s=0.2))).report
    assert report.num_completed >= 2
    assert report.whole.num_output_tokens == report.num_completed * 12
    assert report.errors == ()


async def test_an_open_loop_sends_each_request_of_its_schedule_and_tells_how_late() -> None:
    plan = OpenPlan(100.0, duration_s=0.5)
    async with running() as server:
        report = (await measured(server, plan)).report
    assert report.num_completed == len(plan.due_times_s(5))
    assert report.offered_per_s == 100.0
    assert report.lateness_s is not None
    assert report.lateness_s.p50 >= 0
    assert report.whole.seconds >= 0.5


async def test_a_server_that_stands_still_is_not_spared_the_requests_that_it_would_have_had() -> None:
    stall_s, rate_per_s = 0.5, 50.0
    steps = 0

    def stall_once(_batch: StepBatch) -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            time.sleep(stall_s)

    workload = Workload(RequestShape(num_prompt_tokens=4, max_tokens=2))
    plan = OpenPlan(rate_per_s, duration_s=2.0)
    async with running(ScriptedEngine(before_step=stall_once)) as server:
        report = (await measured(server, plan, workload)).report
    first = report.time_to_first_token_s
    assert first is not None
    # Of 100 requests, 25 are due while nothing moves, evenly over the stall; one that waited for an answer
    # before it sent the next would have seen one of them.
    assert first.p99 > 0.8 * stall_s
    assert first.p90 > 0.2 * stall_s


async def test_the_kernel_counts_more_than_the_messages_alone() -> None:
    async with running() as server:
        report = (await measured(server, LoadPlan(2, num_requests=2), num_processes=2)).report
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


@pytest.mark.parametrize("plan", [LoadPlan(2, num_requests=4), OpenPlan(50.0, num_requests=4)])
async def test_a_request_that_takes_longer_than_its_timeout_has_failed(plan: Plan) -> None:
    workload = Workload(RequestShape(max_tokens=4_000), prompts=("x",), timeout_s=0.5)
    async with running(ScriptedEngine(step_s=0.02)) as server:
        with pytest.raises(BenchError, match=r"not one of 4 requests .* DEADLINE_EXCEEDED"):
            await measured(server, plan, workload)


async def test_a_load_that_is_refused_altogether_is_an_error_with_the_servers_words() -> None:
    workload = Workload(RequestShape(max_tokens=12), prompts=(" ".join(["word"] * 20),))
    async with running(max_context=16) as server:
        with pytest.raises(BenchError, match=r"not one of 2 requests .* INVALID_ARGUMENT: .*16"):
            await measured(server, LoadPlan(1, num_requests=2), workload)


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (
            Workload(SHAPE),
            "prompts of 20 and outputs of 12 tokens do not fit into the 16 tokens of the model",
        ),
        (Workload(output_lengths=Uniform(17, 90), prompts=("x",)), "outputs of 17 tokens do not fit into"),
    ],
)
async def test_a_load_of_which_each_request_would_be_refused_is_not_begun(
    workload: Workload, sentence: str
) -> None:
    async with running(max_context=16) as server:
        with pytest.raises(BenchError, match=sentence):
            await measured(server, LoadPlan(1, num_requests=100_000), workload)


async def test_a_load_on_a_model_that_is_not_there_is_not_begun() -> None:
    workload = Workload(RequestShape(model="nope"), prompts=("x",))
    async with running() as server:
        with pytest.raises(ModelNotFoundError, match="no model 'nope' here; served: scripted"):
            await measured(server, LoadPlan(1, num_requests=100_000), workload)


async def test_prompts_of_ones_own_are_sent_in_turn() -> None:
    workload = Workload(RequestShape(max_tokens=4), prompts=("one two", [("user", "three")]))
    async with running() as server:
        lengths = [len(await server.client.tokenize(prompt)) for prompt in workload.prompts or ()]
        report = (await measured(server, LoadPlan(1, num_requests=4), workload)).report
    assert report.whole.num_prompt_tokens == 2 * sum(lengths)


async def test_processor_time_is_that_of_the_process_named_or_of_the_one_that_listens() -> None:
    plan = LoadPlan(1, num_requests=1)
    async with running() as server:
        named = (await measured(server, plan, server_pid=os.getpid())).report
        found = (await measured(server, plan)).report
        with pytest.raises(BenchError, match="no process 999999999 on this machine"):
            await measured(server, plan, server_pid=999_999_999)
    assert named.server_cpu_s is not None
    assert found.server_cpu_s is not None


async def test_a_report_can_be_written_as_json() -> None:
    async with running() as server:
        result = await measured(server, LoadPlan(2, num_requests=4))
    parsed = json.loads(json.dumps(as_object(result)))
    assert parsed["seed"] == 5
    assert parsed["plan"]["concurrency"] == 2
    assert parsed["report"]["whole"]["num_output_tokens"] == 48
    assert parsed["report"]["whole"]["output_tokens_per_s"] > 0
    assert parsed["report"]["lateness_s"] is None


async def test_several_loads_are_summed_up_in_a_table_with_a_line_each() -> None:
    async with running() as server, bench(endpoint(server), Workload(SHAPE), seed=5) as runs:
        list_ = [await runs.run(LoadPlan(n, num_requests=n)) for n in (1, 3)]
    lines = list(summary_lines(list_))
    assert [line.split()[0] for line in lines[2:4]] == ["1", "3"]
    assert len({len(line.rstrip(" *")) for line in lines[1:4]}) == 1


async def test_a_server_with_tls_and_client_certificates_can_be_loaded(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    pair, mine = authority.sign("server"), authority.sign("client")
    async with running(tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.path) as server:
        secured = endpoint(server, tls=True, ca=authority.path, pair=mine, api_key="secret")
        result = await measure(secured, LoadPlan(1, num_requests=2), Workload(SHAPE), seed=5)
    assert result.report.num_completed == 2
    assert "secret" not in repr(secured)


async def test_a_key_lets_every_process_in_and_is_not_shown(tmp_path: Path) -> None:
    key, keys = new_key(), tmp_path / "keys"
    keys.write_text(key_line("bench", key) + "\n")
    async with running(api_keys=keys) as server:
        result = await measure(
            endpoint(server, api_key=key),
            LoadPlan(2, num_requests=2),
            Workload(SHAPE),
            seed=5,
            num_processes=2,
        )
        with pytest.raises(CallFailedError, match="UNAUTHENTICATED"):
            await measured(server, LoadPlan(1, num_requests=1))
    assert result.report.num_completed == 2
    assert key not in repr(endpoint(server, api_key=key))


async def test_the_command_prints_a_report_for_each_load_and_draws_them(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    async with running() as server:
        process = await started(
            *("--server", server.target, "--rate", "50,100", "--requests", "5", "--processes", "2"),
            *("--set", "chat", "--max-tokens", "2-6", "--seed", "7", "--json", "--plot", str(plot)),
        )
        out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, f"the plot is in {plot}\n")
    reports = [json.loads(line) for line in out.splitlines()]
    assert [each["plan"]["rate_per_s"] for each in reports] == [50.0, 100.0]
    assert [each["report"]["num_completed"] for each in reports] == [5, 5]
    assert plot.read_text().count("requests due a second") == 2


async def test_a_terminal_shows_the_warm_up_and_then_the_load() -> None:
    terminal, end = os.openpty()
    async with running(ScriptedEngine(step_s=0.01)) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamsrv", "bench", "--server", server.target, "--warmup", "3"),
            *("--concurrency", "2", "--requests", "4", "--max-tokens", "5"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=end,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
        )
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends when nobody writes to it any more
            while True:
                shown += await asyncio.to_thread(os.read, terminal, 65536)
        assert await process.wait() == 0
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    warmed_up, loading = text.index("warm-up: 3 requests, 15 tokens, 0 failed"), text.index("2 clients: ")
    assert text.index("warm-up: 0 requests") < warmed_up < loading
    assert "2 clients: 4 requests, 20 tokens, 0 failed" in text


class Steps:
    """Counts an engine's steps, each as long as was last asked for."""

    def __init__(self, step_s: float = 0.02) -> None:
        self.count = 0
        self.step_s = step_s

    def __call__(self, _batch: StepBatch) -> None:
        self.count += 1
        time.sleep(self.step_s)

    async def more(self, number: int) -> None:
        enough = self.count + number
        await until(lambda: self.count >= enough)


def said(errors: bytes) -> list[str]:
    """What a command says, without the notes that gRPC's core may write: a level, month and day, and more."""
    notes = r"([IWEF]\d{4} |WARNING: All log messages before absl::)"
    return [line for line in errors.decode().splitlines() if not re.match(notes, line)]


STOPPING = "streamsrv: stopping; Ctrl-C again gives up at once"


@pytest.mark.parametrize("load", [("--concurrency", "4"), ("--rate", "100")])
async def test_a_load_that_is_interrupted_is_reported_as_far_as_it_went(
    load: tuple[str, ...], tmp_path: Path
) -> None:
    steps, plot = Steps(), tmp_path / "plot.svg"
    async with running(ScriptedEngine(before_step=steps)) as server:
        process = await started(
            *("--server", server.target, *load, "--requests", "100000", "--processes", "2"),
            *("--max-tokens", "4", "--json", "--plot", str(plot)),
        )
        await until(lambda: server.pool.num_running > 0)
        await steps.more(20)
        children = load_processes_of(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert process.returncode == 130, errors
    assert len(children) == 2
    assert not any(child.is_running() for child in children)
    (measured,) = [json.loads(line) for line in printed.splitlines()]
    report = measured["report"]
    assert measured["was_stopped"]
    assert report["num_completed"] > 0
    assert report["num_cut"] > 0
    assert report["errors"] == []
    assert report["whole"]["num_output_tokens"] >= 4 * report["num_completed"]
    assert any("the longest are missing" in note for note in report["notes"])
    assert "Throughput" in plot.read_text()
    assert said(errors) == [
        STOPPING,
        f"the plot is in {plot}",
        f"streamsrv: interrupted after {report['num_completed']} of 100000 requests, which the report is of",
    ]


async def test_of_several_loads_those_before_the_interruption_are_summed_up() -> None:
    steps = Steps(0.0)
    async with running(ScriptedEngine(before_step=steps)) as server:
        process = await started(
            *("--server", server.target, "--concurrency", "1,2,4", "--requests", "400", "--max-tokens", "4")
        )
        assert process.stdout is not None
        await process.stdout.readuntil(b"client processor time")
        steps.step_s = 0.05
        await steps.more(20)
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert process.returncode == 130, errors
    (second,) = re.findall(r"^closed loop, .*", printed.decode(), re.MULTILINE)
    assert (
        found := re.fullmatch(
            r"closed loop, 2 clients: (\d+) requests completed, 0 failed, 2 cut off", second
        )
    )
    summary = printed.decode().rpartition("clients ")[2].splitlines()[1:]
    assert [line.split()[0] for line in summary[:2]] == ["1", "2"]
    assert said(errors) == [
        STOPPING,
        f"streamsrv: interrupted after {found[1]} of 400 requests, which the report is of; "
        "loads not begun: 1",
    ]


@pytest.mark.parametrize(
    ("flags", "num_running", "reason"),
    [
        (
            ("--plot", "never.svg"),
            8,
            "not one of 8 requests came to its end; the load was stopped before",
        ),
        (("--warmup", "2"), 2, "the load was stopped before it began"),
    ],
    ids=["before a request has ended", "in the warm-up"],
)
async def test_an_interruption_before_anything_was_measured_says_so(
    flags: tuple[str, ...], num_running: int, reason: str
) -> None:
    async with running(ScriptedEngine(step_s=0.02)) as server:
        process = await started("--server", server.target, "--max-tokens", "3000", *flags)
        await until(lambda: server.pool.num_running == num_running)
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert (process.returncode, printed) == (130, b""), errors
    assert said(errors) == [
        STOPPING,
        f"streamsrv: interrupted; nothing of this load was measured: {reason}",
    ]


async def test_an_interruption_before_the_server_has_answered_ends_at_once() -> None:
    connected = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        process = await started("--server", f"{host}:{port}")
        await connected.wait()
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert (process.returncode, printed) == (130, b""), errors
    assert said(errors) == ["streamsrv: interrupted before the load began; nothing was measured"]


async def test_a_second_interruption_gives_up_on_load_processes_that_do_not_answer() -> None:
    async with running(ScriptedEngine(step_s=0.02)) as server:
        process = await started("--server", server.target, "--requests", "100000", "--processes", "2")
        await until(lambda: server.pool.num_running > 0)
        children = load_processes_of(psutil.Process(process.pid))
        for child in children:
            child.suspend()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        await process.stderr.readuntil(STOPPING.encode())
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert (process.returncode, printed) == (130, b""), errors
    assert said(errors) == ["", "streamsrv: interrupted twice; gave up without a report"]
    assert len(children) == 2
    assert not any(child.is_running() for child in children)


async def test_an_interruption_that_is_ignored_stays_ignored() -> None:
    steps = Steps(0.01)
    async with running(ScriptedEngine(before_step=steps)) as server:
        process = await started(
            *("--server", server.target, "--requests", "8", "--max-tokens", "30", "--json"),
            interrupt=signal.SIG_IGN,
        )
        await until(lambda: server.pool.num_running > 0)
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert json.loads(printed)["report"]["num_completed"] == 8


async def test_load_processes_do_not_hear_the_terminals_interrupts() -> None:
    async with running() as server, bench(endpoint(server), Workload(SHAPE), seed=5, num_processes=2):
        children = load_processes_of(psutil.Process())
        assert {os.getpgid(child.pid) for child in children}.isdisjoint({os.getpgid(0)})


async def test_a_load_process_that_ends_is_an_error_and_not_a_wait() -> None:
    async with running(ScriptedEngine(step_s=0.02)) as server:
        async with bench(endpoint(server), Workload(SHAPE), seed=5, num_processes=2) as runs:
            children = load_processes_of(psutil.Process())
            run = asyncio.create_task(runs.run(LoadPlan(2, num_requests=100_000)))
            await until(lambda: server.pool.num_running > 0)
            children[0].kill()
            with pytest.raises(BenchError, match="a load process ended before its work was done"):
                await run
        assert len(children) == 2
        assert not any(child.is_running() for child in children)


async def test_a_server_that_dies_leaves_a_report_of_what_was_seen_of_it() -> None:
    command = ("-m", "streamsrv", "serve", "--engine", "scripted", "--listen", "127.0.0.1:0")
    async with listening_process("a server", *command) as server:
        target, seen = Endpoint(server.addresses[0]), asyncio.Event()
        async with bench(target, Workload(SHAPE), seed=5, lost_after_s=0.3) as runs:
            load = LoadPlan(2, num_requests=1_000_000)
            run = asyncio.create_task(runs.run(load, on_progress=lambda _: seen.set()))
            await seen.wait()
            os.kill(server.pid, signal.SIGKILL)
            result = await run
            assert runs.is_lost
    assert result.was_stopped
    assert result.report.num_completed > 0
    assert [error.code for error in result.report.errors] == ["UNAVAILABLE"]
    assert result.report.server_cpu_s is None


async def test_a_load_that_fails_altogether_leaves_the_summary_of_those_before() -> None:
    command = ("-m", "streamsrv", "serve", "--engine", "scripted", "--script-step-ms", "5")
    async with listening_process("a server", *command, "--listen", "127.0.0.1:0") as server:
        process = await started(
            *("--server", str(server.addresses[0]), "--rate", "50,60,70,80", "--requests", "2"),
            *("--max-tokens", "400"),
        )
        assert process.stdout is not None
        printed = b"".join([await process.stdout.readuntil(b"client processor time") for _ in range(2)])
        os.kill(server.pid, signal.SIGKILL)
        rest, errors = await process.communicate()
    assert process.returncode == 1
    assert (printed + rest).decode().count("open loop, ") == 2
    summary = rest.decode().rpartition("requests/s ")[2].splitlines()[1:]
    assert [line.split()[0] for line in summary[:2]] == ["50", "60"]
    (said_last,) = said(errors)
    assert said_last.startswith("streamsrv: not one of 2 requests came to its end; UNAVAILABLE: ")
    assert said_last.endswith("; loads not begun: 1")


async def test_load_processes_do_not_outlive_the_one_that_started_them() -> None:
    async with running(ScriptedEngine(step_s=0.02)) as server:
        process = await started("--server", server.target, "--requests", "100000", "--processes", "2")
        await until(lambda: server.pool.num_running > 0)
        children = load_processes_of(psutil.Process(process.pid))
        process.kill()
        await process.wait()
        await until(lambda: not any(child.is_running() for child in children))
    assert len(children) == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must be a whole number from 1"),
        (["--concurrency", "1,x"], "--concurrency has 'x'; it must be a whole number, or several"),
        (["--rate", "0"], "--rate has '0'; it must be a number of requests a second above 0"),
        (["--rate", "1,,2"], "--rate has ''"),
        (["--rate", "nan"], "--rate has 'nan'"),
        (["--rate", "1,1000000"], "--rate 1e+06 would send some 2e+07 requests; a schedule holds at most"),
        (["--rate", "1", "--requests", "10000001"], "a schedule holds at most 10000000"),
        (["--processes", "0"], "--processes is 0; it must be a whole number from 1 to 64"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--concurrency", ""], "--concurrency has ''; it must be a whole number"),
        (["--concurrency", "100001"], "it must be a whole number from 1 to 100000"),
        (["--server-pid", "-1"], "--server-pid is -1; it must be a whole number from 1"),
        (["--model", "\udcff"], "--model is not UTF-8 text"),
        (["--timeout", "0"], "--timeout is 0; it must be a number of seconds above 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--requests", "0"], "--requests is 0"),
        (["--duration", "nan"], "--duration is nan; it must be a number of seconds above 0"),
        (["--duration", "1e300"], "and at most 1000000"),
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--max-tokens", "9-3"], "--max-tokens is 9-3; the first number of a range"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["--prompt-tokens", "4000000000"], "a length must be a whole number from 1 to 10000000"),
        (
            ["--prompt-tokens", "lognormal:9:1:1-4000000000"],
            "a length must be a whole number from 1 to 10000000",
        ),
        (["--prompts", "/nowhere/prompts.txt"], "cannot read --prompts /nowhere/prompts.txt: No such file"),
        (["--plot", "/nowhere/plot.svg"], "there is no folder /nowhere"),
        (["--plot", "/proc/plot.svg"], "cannot write --plot /proc/plot.svg: "),
        (["--plot", "plot.png"], "its name must end in .svg"),
        (["--tls-cert", "mine.pem"], "--tls-cert is given without --tls-key"),
        (["--server", "somewhere"], "--server is 'somewhere'; it must be HOST:PORT"),
        (["--server", "127.0.0.1:1"], "UNAVAILABLE"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", *flags]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "1", "--rate", "1"],
        ["--requests", "1", "--duration", "1"],
        ["--set", "chat", "--prompt-tokens", "9"],
        ["--set", "poems"],
    ],
)
def test_flags_that_exclude_each_other_are_wrong_usage(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run_command(["bench", *flags])
    assert error.value.code == 2


def test_every_flag_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["bench", "--help"])
    text = capsys.readouterr().out
    for flag in ("--rate", "--processes", "--set", "--plot", "--tls", "--api-key-file"):
        assert re.search(rf"^  {flag}\b", text, re.MULTILINE)
    assert "were written for this project" in " ".join(text.split())
