"""`streamsrv bench`."""

import argparse
import json
import math
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from streamsrv.cli.server_flags import (
    add_api_key_flag,
    add_server_flag,
    add_tls_flags,
    api_key_of,
    credentials_of,
)
from streamsrv.config import Address
from streamsrv.errors import SettingsError

if TYPE_CHECKING:
    from streamsrv.bench.endpoint import Endpoint
    from streamsrv.bench.load_messages import Plan, Progress
    from streamsrv.bench.measure import Measured
    from streamsrv.bench.workload import Workload

_MAX_UINT32 = 2**32 - 1
_MAX_PROCESSES = 64
_MAX_RATE = 1e6
_DEFAULT_CONCURRENCY = "8"
_DEFAULT_OPEN_S = 20.0
_LENGTHS = "N, a range N-M, or lognormal:MEDIAN:SIGMA[:N-M]"


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    bench = commands.add_parser(
        "bench",
        help="put load on a running server and report what it brings",
        description="Put load on a running server from processes of its own, and print latencies, tokens/s, "
        "errors, bytes and processor time. In a closed loop (--concurrency) each of N clients sends its next "
        "request when its last one has ended. In an open loop (--rate) requests are due at random moments, "
        "drawn before the first is sent; each goes out when it is due, whatever has not ended, and its "
        "latencies count from there, so that a server that stands still is not spared the requests that it "
        "would have had. Lists, as in --concurrency 1,8,32, are run one after the other. Outputs are greedy "
        "and of an exact length.",
        epilog="The texts of --set and of the default prompts were written for this project.",
    )
    add_server_flag(bench)
    _add_load_flags(bench)
    _add_request_flags(bench)
    report = bench.add_argument_group("the report")
    report.add_argument(
        "--server-pid",
        type=int,
        metavar="PID",
        help="measure this process's time; default: the one that listens at --server, if that is here",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object a line, one for each load")
    report.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="draw latency and throughput against load; needs matplotlib: pip install 'streamsrv[bench]'",
    )
    add_tls_flags(bench)
    add_api_key_flag(bench)
    bench.set_defaults(command=_bench)


def _add_load_flags(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("the load")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--concurrency", metavar="N[,N...]", help="closed loop of N clients (default: 8)")
    kind.add_argument("--rate", metavar="R[,R...]", help="open loop: R requests a second, Poisson arrivals")
    until = group.add_mutually_exclusive_group()
    until.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests of each load; default: four for each client, and in an open loop --duration "
        f"{_DEFAULT_OPEN_S:g}",
    )
    until.add_argument("--duration", type=float, metavar="S", help="begin requests for so many seconds")
    add = group.add_argument
    add("--warmup", type=int, default=0, metavar="N", help="requests before each load (default: 0)")
    add(
        "--processes",
        type=int,
        default=1,
        metavar="P",
        help="share the load between P processes with a connection each (default: 1)",
    )
    add("--seed", type=int, metavar="N", help="chooses prompts, lengths and arrivals; default: new each time")


def _add_request_flags(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("the requests")
    add = group.add_argument
    add("--model", default="", metavar="NAME", help="a name from the server's list; default: its first")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens",
        default="200",
        metavar="LENGTHS",
        help=f"prompts of exact lengths, no two alike: {_LENGTHS} (default: 200)",
    )
    prompts.add_argument(
        "--set",
        choices=("chat", "document", "shared", "code"),
        help="shipped prompts instead: short chats, questions about long documents, questions behind one "
        "long system prompt, questions about code",
    )
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="send the lines of a file in turn, whole, instead; in a *.jsonl each is a string, "
        '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )
    add(
        "--max-tokens",
        default="64",
        metavar="LENGTHS",
        help=f"tokens to generate: {_LENGTHS} (default: 64)",
    )
    add("--plain", action="store_true", help="do not accept zstd")
    add("--max-tokens-per-chunk", type=int, metavar="N", help="most tokens in a message")
    add("--min-chunk-interval-ms", type=int, metavar="N", help="least time between messages")


def _bench(arguments: argparse.Namespace) -> None:
    from streamsrv.bench.plot import check_plot, write_plot
    from streamsrv.bench.report_format import summary_lines

    endpoint, plans, workload = _endpoint(arguments), _plans(arguments), _workload(arguments)
    _within("--warmup", arguments.warmup, 0, _MAX_UINT32)
    _within("--processes", arguments.processes, 1, _MAX_PROCESSES)
    if arguments.seed is not None:
        _within("--seed", arguments.seed, 0, 2**63 - 1)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    list_ = uvloop.run(_measure(arguments, endpoint, plans, workload))
    if len(list_) > 1 and not arguments.json:
        print("\n".join(summary_lines(list_)))
    if arguments.plot is not None:
        write_plot(list_, arguments.plot)
        print(f"the plot is in {arguments.plot}", file=sys.stderr)


async def _measure(
    arguments: argparse.Namespace, endpoint: "Endpoint", plans: "list[Plan]", workload: "Workload"
) -> "list[Measured]":
    """Run the loads and print each one's report as it is there."""
    from streamsrv.bench.measure import bench
    from streamsrv.bench.report_format import as_lines, as_object

    list_ = []
    async with bench(
        endpoint,
        workload,
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        num_processes=arguments.processes,
        server_pid=arguments.server_pid,
    ) as running:
        for plan in plans:
            with _progress(plan) as on_progress:
                measured = await running.run(plan, num_warmup=arguments.warmup, on_progress=on_progress)
            list_.append(measured)
            if arguments.json:
                print(json.dumps(as_object(measured)), flush=True)
            else:
                print("\n".join(as_lines(measured)), end="\n\n" if len(plans) > 1 else "\n", flush=True)
    return list_


def _endpoint(arguments: argparse.Namespace) -> "Endpoint":
    from streamsrv.bench.endpoint import Endpoint
    from streamsrv.tls import KeyPair

    address = Address.parse(arguments.server, "--server")
    tls = credentials_of(arguments) is not None  # which checks the files, too
    pair = KeyPair(arguments.tls_cert, arguments.tls_key) if arguments.tls_cert else None
    return Endpoint(address, tls=tls, ca=arguments.tls_ca, pair=pair, api_key=api_key_of(arguments))


def _plans(arguments: argparse.Namespace) -> "list[Plan]":
    from streamsrv.bench.load import LoadPlan
    from streamsrv.bench.schedule import OpenPlan

    num_requests, duration_s = arguments.requests, arguments.duration
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise SettingsError(f"--duration is {duration_s}; it must be a number of seconds above 0")
    if num_requests is not None:
        _within("--requests", num_requests, 1, _MAX_UINT32)
    if arguments.rate is not None:
        if num_requests is None and duration_s is None:
            duration_s = _DEFAULT_OPEN_S
        rates = [_rate(text) for text in arguments.rate.split(",")]
        return [OpenPlan(rate, num_requests, duration_s) for rate in rates]
    plans: list[Plan] = []
    for text in (arguments.concurrency or _DEFAULT_CONCURRENCY).split(","):
        concurrency = _concurrency(text)
        if duration_s is not None:
            plans.append(LoadPlan(concurrency, duration_s=duration_s))
        else:
            count = 4 * concurrency if num_requests is None else num_requests
            plans.append(LoadPlan(min(concurrency, count), num_requests=count))
    return plans


def _concurrency(text: str) -> int:
    try:
        concurrency = int(text)
    except ValueError:
        raise SettingsError(
            f"--concurrency has {text!r}; it must be a whole number, or several as in 1,8,32"
        ) from None
    _within("--concurrency", concurrency, 1, _MAX_UINT32)
    return concurrency


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= _MAX_RATE:
        raise SettingsError(
            f"--rate has {text!r}; it must be a number of requests a second above 0, or several as in 1,2,4"
        )
    return rate


def _workload(arguments: argparse.Namespace) -> "Workload":
    from streamsrv.bench.lengths import parse_lengths
    from streamsrv.bench.prompt_file import read_prompts
    from streamsrv.bench.prompt_sets import PromptSet
    from streamsrv.bench.workload import RequestShape, Workload

    for flag, value, least in (
        ("--max-tokens-per-chunk", arguments.max_tokens_per_chunk, 1),
        ("--min-chunk-interval-ms", arguments.min_chunk_interval_ms, 0),
    ):
        if value is not None:
            _within(flag, value, least, _MAX_UINT32)
    return Workload(
        shape=RequestShape(
            model=arguments.model,
            zstd=not arguments.plain,
            max_tokens_per_chunk=arguments.max_tokens_per_chunk,
            min_chunk_interval_ms=arguments.min_chunk_interval_ms,
        ),
        prompt_lengths=parse_lengths(arguments.prompt_tokens, "--prompt-tokens"),
        output_lengths=parse_lengths(arguments.max_tokens, "--max-tokens"),
        prompts=None if arguments.prompts is None else read_prompts(arguments.prompts, "--prompts"),
        prompt_set=None if arguments.set is None else PromptSet(arguments.set),
    )


def _within(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise SettingsError(f"{flag} is {value}; it must be a whole number from {least} to {most}")


@contextmanager
def _progress(plan: "Plan") -> "Iterator[Callable[[Progress], None]]":
    """Show on a terminal how far a run is. On standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.completed} requests, {task.fields[tokens]} tokens, {task.fields[failed]} failed"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task("", total=plan.num_requests, tokens=0, failed=0)

        def on_progress(progress: Any) -> None:
            fields = bars.tasks[task].fields
            bars.update(
                task,
                advance=progress.num_requests,
                tokens=fields["tokens"] + progress.num_tokens,
                failed=fields["failed"] + progress.num_failed,
            )

        yield on_progress
