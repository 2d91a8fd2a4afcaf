"""The flags of `streamsrv bench` that say what is sent, and what they mean."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from streamsrv.cli.flag_values import check_seconds, check_text, check_whole
from streamsrv.cli.server_flags import server_of
from streamsrv.errors import SettingsError

if TYPE_CHECKING:
    from streamsrv.bench.endpoint import Endpoint
    from streamsrv.bench.load_messages import Plan
    from streamsrv.bench.workload import Workload

_MAX_DURATION_S = 1e6
_MAX_CONCURRENCY = 100_000  # each is a task that lives as long as the load
_MAX_RATE = 1e6
_MAX_DUE = 10_000_000  # all are drawn before the first is sent
_MAX_PROCESSES = 64
_MAX_SEED = 2**63 - 1
_DEFAULT_OPEN_S = 20.0
_LENGTHS = "N, a range N-M, or lognormal:MEDIAN:SIGMA[:N-M]"


def add_load_flags(bench: argparse.ArgumentParser) -> None:
    """Add the flags of the load."""
    group = bench.add_argument_group("the load")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency", metavar="N[,N...]", default="8", help="closed loop of N clients (default: 8)"
    )
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


def add_request_flags(bench: argparse.ArgumentParser) -> None:
    """Add the flags of the requests."""
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


def endpoint_of(arguments: argparse.Namespace) -> "Endpoint":
    """Read which server is to be loaded.

    Raises:
        SettingsError: a flag about the server is wrong.
    """
    from streamsrv.bench.endpoint import Endpoint

    server = server_of(arguments)
    tls = server.credentials is not None
    return Endpoint(server.address, tls=tls, ca=server.ca, pair=server.pair, api_key=server.api_key)


def plans_of(arguments: argparse.Namespace) -> "list[Plan]":
    """Read how much load: one plan for each of a list.

    Raises:
        SettingsError: a number is none, or out of its range.
    """
    from streamsrv.bench.load import LoadPlan
    from streamsrv.bench.schedule import OpenPlan

    check_whole("--warmup", arguments.warmup, 0)
    check_whole("--processes", arguments.processes, 1, _MAX_PROCESSES)
    check_whole("--seed", arguments.seed, 0, _MAX_SEED)
    check_whole("--requests", arguments.requests, 1)
    check_seconds("--duration", arguments.duration, _MAX_DURATION_S)
    num_requests, duration_s = arguments.requests, arguments.duration
    if arguments.rate is not None:
        if num_requests is None and duration_s is None:
            duration_s = _DEFAULT_OPEN_S
        rates = [_rate(text) for text in arguments.rate.split(",")]
        count = num_requests if duration_s is None else max(rates) * duration_s
        if count is not None and count > _MAX_DUE:
            raise SettingsError(
                f"--rate {max(rates):g} would send some {count:g} requests; a schedule holds at most "
                f"{_MAX_DUE}: give a shorter --duration or fewer --requests"
            )
        return [OpenPlan(rate, num_requests, duration_s) for rate in rates]
    plans: list[Plan] = []
    for text in arguments.concurrency.split(","):
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
    check_whole("--concurrency", concurrency, 1, _MAX_CONCURRENCY)
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


def workload_of(arguments: argparse.Namespace) -> "Workload":
    """Read what the requests are; a file of prompts is read whole.

    Raises:
        SettingsError: a length or a file cannot be read, or a number is out of its range.
    """
    from streamsrv.bench.lengths import MAX_PROMPT_LENGTH, parse_lengths
    from streamsrv.bench.prompt_file import read_prompts
    from streamsrv.bench.prompt_sets import PromptSet
    from streamsrv.bench.workload import RequestShape, Workload

    check_whole("--max-tokens-per-chunk", arguments.max_tokens_per_chunk, 1)
    check_whole("--min-chunk-interval-ms", arguments.min_chunk_interval_ms, 0)
    check_text("--model", arguments.model)
    return Workload(
        shape=RequestShape(
            model=arguments.model,
            zstd=not arguments.plain,
            max_tokens_per_chunk=arguments.max_tokens_per_chunk,
            min_chunk_interval_ms=arguments.min_chunk_interval_ms,
        ),
        prompt_lengths=parse_lengths(arguments.prompt_tokens, "--prompt-tokens", MAX_PROMPT_LENGTH),
        output_lengths=parse_lengths(arguments.max_tokens, "--max-tokens"),
        prompts=None if arguments.prompts is None else read_prompts(arguments.prompts, "--prompts"),
        prompt_set=None if arguments.set is None else PromptSet(arguments.set),
        timeout_s=arguments.timeout,
    )
