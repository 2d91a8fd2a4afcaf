"""`streamsrv bench`."""

import argparse
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from streamsrv.cli.server_flags import add_server_flag
from streamsrv.config import Address
from streamsrv.errors import SettingsError

if TYPE_CHECKING:
    from streamsrv.bench.load import LoadPlan, RequestRecord
    from streamsrv.bench.measure import Measured, RequestShape

_MAX_UINT32 = 2**32 - 1


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    bench = commands.add_parser(
        "bench",
        help="put load on a running server and report what it brings",
        description="Put load on a running server: each of N clients sends its next request when its last "
        "one has ended. Prompts are all different and of an exact length in tokens; outputs are greedy and "
        "of an exact length, too. Prints latencies, tokens/s, bytes and processor time.",
    )
    add_server_flag(bench)
    add = bench.add_argument
    add("--model", default="", metavar="NAME", help="a name from the server's list; default: its first")
    add("--concurrency", type=int, default=8, metavar="N", help="clients (default: 8)")
    until = bench.add_mutually_exclusive_group()
    until.add_argument(
        "--requests", type=int, metavar="N", help="requests in all; default: four for each client"
    )
    until.add_argument("--duration", type=float, metavar="S", help="begin requests for so many seconds")
    add("--warmup", type=int, default=0, metavar="N", help="requests before those that count (default: 0)")
    prompts = bench.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens", type=int, default=200, metavar="N", help="length of the prompts (default: 200)"
    )
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help="send the lines of a text file in turn, whole, instead"
    )
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    add("--seed", type=int, metavar="N", help="chooses the prompts; default: new ones each time")
    add("--plain", action="store_true", help="do not accept zstd")
    add("--max-tokens-per-chunk", type=int, metavar="N", help="most tokens in a message")
    add("--min-chunk-interval-ms", type=int, metavar="N", help="least time between messages")
    add("--wire", action="store_true", help="count the bytes on the connection, through a relay")
    add("--server-pid", type=int, metavar="PID", help="measure this process's time, if it runs here")
    add("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from streamsrv.bench.report_format import as_lines, as_object

    address = Address.parse(arguments.server, "--server")
    plan, shape = _plan(arguments), _shape(arguments)
    _at_least("--warmup", arguments.warmup, 0)
    with _progress(plan) as on_record:
        measured = uvloop.run(_measure(arguments, address, plan, shape, on_record))
    if arguments.json:
        print(json.dumps(as_object(measured)))
    else:
        print("\n".join(as_lines(measured)))


async def _measure(
    arguments: argparse.Namespace,
    address: Address,
    plan: "LoadPlan",
    shape: "RequestShape",
    on_record: "Callable[[RequestRecord], None]",
) -> "Measured":
    from streamsrv.bench.measure import measure

    return await measure(
        address,
        plan,
        shape,
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        num_warmup=arguments.warmup,
        count_wire=arguments.wire,
        server_pid=arguments.server_pid,
        on_record=on_record,
    )


def _plan(arguments: argparse.Namespace) -> "LoadPlan":
    from streamsrv.bench.load import LoadPlan

    _at_least("--concurrency", arguments.concurrency, 1)
    if arguments.duration is not None:
        if not 0 < arguments.duration < float("inf"):
            raise SettingsError(f"--duration is {arguments.duration}; it must be a number of seconds above 0")
        return LoadPlan(arguments.concurrency, duration_s=arguments.duration)
    num_requests = 4 * arguments.concurrency if arguments.requests is None else arguments.requests
    _at_least("--requests", num_requests, 1)
    return LoadPlan(min(arguments.concurrency, num_requests), num_requests=num_requests)


def _shape(arguments: argparse.Namespace) -> "RequestShape":
    from streamsrv.bench.measure import RequestShape

    _at_least("--prompt-tokens", arguments.prompt_tokens, 1)
    _at_least("--max-tokens", arguments.max_tokens, 1)
    for flag, value, least in (
        ("--max-tokens-per-chunk", arguments.max_tokens_per_chunk, 1),
        ("--min-chunk-interval-ms", arguments.min_chunk_interval_ms, 0),
    ):
        if value is not None:
            _at_least(flag, value, least)
    return RequestShape(
        num_prompt_tokens=arguments.prompt_tokens,
        prompts=None if arguments.prompts is None else _read_prompts(arguments.prompts),
        max_tokens=arguments.max_tokens,
        model=arguments.model,
        zstd=not arguments.plain,
        max_tokens_per_chunk=arguments.max_tokens_per_chunk,
        min_chunk_interval_ms=arguments.min_chunk_interval_ms,
    )


def _at_least(flag: str, value: int, least: int) -> None:
    if not least <= value <= _MAX_UINT32:
        raise SettingsError(f"{flag} is {value}; it must be a whole number from {least} to {_MAX_UINT32}")


def _read_prompts(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"cannot read --prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"--prompts {path} is not UTF-8 text (at byte {error.start})") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise SettingsError(f"--prompts {path} has no line with text; give one prompt a line")
    return prompts


@contextmanager
def _progress(plan: "LoadPlan") -> "Iterator[Callable[[RequestRecord], None]]":
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

        def on_record(record: "RequestRecord") -> None:
            fields = bars.tasks[task].fields
            bars.update(
                task,
                advance=1,
                tokens=fields["tokens"] + record.num_tokens,
                failed=fields["failed"] + (record.failure is not None),
            )

        yield on_record
