"""`streamsrv bench`."""

import argparse
import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from engines.api import StreamsrvError
from streamsrv.cli.bench_flags import add_load_flags, add_request_flags, endpoint_of, plans_of, workload_of
from streamsrv.cli.flag_values import check_whole
from streamsrv.cli.interrupts import CommandInterruptedError, stopping_on_interrupt
from streamsrv.cli.load_progress import load_progress
from streamsrv.cli.server_flags import add_server_flags

if TYPE_CHECKING:
    from streamsrv.bench.endpoint import Endpoint
    from streamsrv.bench.load_messages import Plan
    from streamsrv.bench.measure import Bench, Measured
    from streamsrv.bench.workload import Workload

_MAX_PID = 2**31 - 1


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
        "and of an exact length; a request that --timeout gives up has failed. Ctrl-C ends the load and "
        "reports what was measured until then; a second one gives that up, too.",
        epilog="The texts of --set and of the default prompts were written for this project.",
    )
    add_server_flags(bench)
    add_load_flags(bench)
    add_request_flags(bench)
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
    bench.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from streamsrv.bench.plot import check_plot, write_plot
    from streamsrv.bench.report_format import summary_lines

    endpoint, plans, workload = endpoint_of(arguments), plans_of(arguments), workload_of(arguments)
    check_whole("--server-pid", arguments.server_pid, 1, _MAX_PID)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    list_: list[Measured] = []
    try:
        early_end = uvloop.run(_measure(arguments, endpoint, plans, workload, seed, list_))
    except asyncio.CancelledError:
        raise CommandInterruptedError("interrupted twice; gave up without a report") from None
    except KeyboardInterrupt:
        raise CommandInterruptedError("interrupted before the load began; nothing was measured") from None
    if len(list_) > 1 and not arguments.json:
        print("\n".join(summary_lines(list_)))
    if arguments.plot is not None and list_:
        write_plot(list_, arguments.plot)
        print(f"the plot is in {arguments.plot}", file=sys.stderr)
    if early_end is not None:
        raise early_end


async def _measure(
    arguments: argparse.Namespace,
    endpoint: "Endpoint",
    plans: "list[Plan]",
    workload: "Workload",
    seed: int,
    list_: "list[Measured]",
) -> StreamsrvError | None:
    """Run the loads, print each one's report as it is there, and add it to the list.

    Gives what ended them early, after what there is to report; None if nothing did.

    Raises:
        CallFailedError: the server could not be asked about itself.
        BenchError: nothing at all could be measured.
    """
    from streamsrv.bench.errors import BenchError
    from streamsrv.bench.measure import LOST_AFTER_S, bench
    from streamsrv.bench.report_format import as_lines, as_object

    async with bench(
        endpoint,
        workload,
        seed=seed,
        num_processes=arguments.processes,
        server_pid=arguments.server_pid,
    ) as running:
        with stopping_on_interrupt(lambda: _stop(running)):
            for number, plan in enumerate(plans, start=1):
                left = "" if number == len(plans) else f"; loads not begun: {len(plans) - number}"
                try:
                    with load_progress(plan, seed, arguments.warmup) as shown:
                        measured = await running.run(
                            plan,
                            num_warmup=arguments.warmup,
                            on_warmup=shown.warmed_up,
                            on_progress=shown.loaded,
                        )
                except BenchError as error:
                    if running.is_stopped and not running.is_lost:
                        return CommandInterruptedError(
                            f"interrupted; nothing of this load was measured: {error}{left}"
                        )
                    return BenchError(f"{error}{left}")
                list_.append(measured)
                if arguments.json:
                    print(json.dumps(as_object(measured)), flush=True)
                else:
                    print("\n".join(as_lines(measured)), end="\n\n" if len(plans) > 1 else "\n", flush=True)
                covered = f"after {_covered(measured)}, which the report is of{left}"
                if running.is_lost:
                    return BenchError(
                        f"the server did not answer for {LOST_AFTER_S:g} s, so the load was ended {covered}"
                    )
                if measured.was_stopped:
                    return CommandInterruptedError(f"interrupted {covered}")
    return None


def _stop(running: "Bench") -> None:
    print("streamsrv: stopping; Ctrl-C again gives up at once", file=sys.stderr, flush=True)
    running.stop()


def _covered(measured: "Measured") -> str:
    """Tell how much of its plan a load has come to."""
    plan, report = measured.plan, measured.report
    if plan.num_requests is None:
        return f"{report.whole.seconds:.1f} of {plan.duration_s:g} s"
    return f"{report.num_completed + report.num_failed} of {plan.num_requests} requests"
