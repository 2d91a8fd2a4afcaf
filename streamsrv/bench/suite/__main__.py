"""Measure this machine, and print tables of Markdown."""

import argparse
import logging
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

from engines.api import StreamsrvError
from streamsrv.bench.suite.constrained import constraint_section
from streamsrv.bench.suite.engines import engines_section
from streamsrv.bench.suite.lookup import lookup_section
from streamsrv.bench.suite.machine import describe_load, describe_machine
from streamsrv.bench.suite.memory import memory_section
from streamsrv.bench.suite.newcomer import newcomer_section
from streamsrv.bench.suite.prefix import prefix_section
from streamsrv.bench.suite.roofline import roofline_section
from streamsrv.bench.suite.sampled import sampling_section
from streamsrv.bench.suite.startup import startup_section
from streamsrv.bench.suite.throughput import throughput_section
from streamsrv.bench.suite.trouble import cancel_section, stall_section, streams_section
from streamsrv.bench.suite.wire import wire_section

_SECTIONS = (
    *("startup", "memory", "throughput", "engines", "roofline", "newcomer", "prefix", "lookup"),
    *("constraint", "sampling", "wire", "streams", "cancel", "stall"),
)


def main() -> None:
    """Run the sections asked for; exit 1 with a sentence if one cannot be measured."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes, in four minutes")
    parser.add_argument("--model", default="demo", metavar="PATH", help="a model's path (default: demo)")
    parser.add_argument(
        "--only", choices=_SECTIONS, action="append", help="measure this alone; may be repeated"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    try:
        uvloop.run(_measure(arguments.model, tuple(arguments.only or _SECTIONS), quick=arguments.quick))
    except StreamsrvError as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


async def _measure(model: str, wanted: tuple[str, ...], *, quick: bool) -> None:
    sections: dict[str, Callable[[], Awaitable[str]]] = {
        "startup": lambda: startup_section(model, 1 if quick else 3, _say),
        "memory": lambda: memory_section(model, _say),
        "throughput": lambda: throughput_section(
            model, (1, 32) if quick else (1, 8, 32, 64), 2 if quick else 5, _say
        ),
        "engines": lambda: engines_section(model, (1, 32) if quick else (1, 8, 32), 2 if quick else 5, _say),
        "roofline": lambda: roofline_section(
            model, (1, 32) if quick else (1, 8, 32, 64), 2 if quick else 5, _say
        ),
        "newcomer": lambda: newcomer_section(model, 5 if quick else 30, _say),
        "prefix": lambda: prefix_section(model, 2 if quick else 5, _say),
        "lookup": lambda: lookup_section(model, 2 if quick else 6, _say),
        "constraint": lambda: constraint_section(model, 2 if quick else 5, _say),
        "sampling": lambda: sampling_section(model, 4 if quick else 20, _say),
        "wire": lambda: wire_section(model, _say),
        "streams": lambda: streams_section(_say),
        "cancel": lambda: cancel_section(100 if quick else 500, _say),
        "stall": lambda: stall_section(3 if quick else 9, _say),
    }
    began_s = time.monotonic()
    print(f"{describe_machine()} At the start: {describe_load()}.\n", flush=True)
    for name in wanted:
        print(await sections[name](), flush=True)
    print(f"Measured in {time.monotonic() - began_s:.0f} s. At the end: {describe_load()}.")


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
