"""Measure what a message and a token cost our front end, beside two floors.

Our server replays a text (the scripted engine) and is kept to one processor; the load comes from another, by
h2load. The floors are a bare grpc.aio handler that sends prebuilt messages of the same bytes, and FastAPI on
uvicorn that streams the same tokens as server-sent events.
"""

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from engines.api import StreamsrvError
from streamsrv.bench.errors import BenchError
from streamsrv.bench.frontend.load import INSTALL, find_h2load
from streamsrv.bench.frontend.profile_section import profile_sections
from streamsrv.bench.frontend.rig import MAX_TOKENS, MOST_STREAMS, Cores, running_rig
from streamsrv.bench.frontend.rounds import Samples, measure_rounds
from streamsrv.bench.frontend.sse_server import is_installed
from streamsrv.bench.frontend.sse_server import parser as sse_parser
from streamsrv.bench.frontend.tables import GOAL_STREAMS, goal_section, speed_section
from streamsrv.bench.frontend.variant import VARIANTS
from streamsrv.bench.suite.machine import describe_load, describe_machine

_STREAMS = (1, 64, 256, 1024)
_QUICK_STREAMS = (1, 256)


def main() -> None:
    """Measure what the flags say; exit 1 with a sentence if it cannot be."""
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING)
    try:
        uvloop.run(_measure(arguments))
    except StreamsrvError as error:
        sys.exit(f"bench_frontend: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_frontend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Tables of Markdown go to standard output, progress to standard error. Without h2load "
        f"({INSTALL}) a small client of our own puts the load.",
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, 1 and 256 streams, shorter runs")
    parser.add_argument(
        "--streams",
        type=_streams,
        metavar="N,...",
        help=f"streams at the same time, up to {MOST_STREAMS} (default: 1,64,256,1024)",
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE as well")
    parser.add_argument(
        "--profile", action="store_true", help="show where our server's time goes instead, with 256 streams"
    )
    arguments = parser.parse_args()
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(
            f"--json {arguments.json}: there is no folder {arguments.json.parent}"
        )  # not after minutes
    return arguments


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _streams(text: str) -> tuple[int, ...]:
    counts = tuple(_positive(part) for part in text.split(","))
    for count in counts:
        if count > MOST_STREAMS:
            raise argparse.ArgumentTypeError(f"{count} streams are too many; at most {MOST_STREAMS} fit")
    return counts


async def _measure(arguments: argparse.Namespace) -> None:
    began_s = time.monotonic()
    quick = arguments.quick
    num_rounds = arguments.rounds or (2 if quick else 5)
    streams = arguments.streams or (_QUICK_STREAMS if quick else _STREAMS)
    h2load, cores = find_h2load(), Cores.choose()
    if h2load is None:
        _say(f"h2load is not installed ({INSTALL}); a small client of our own puts the load")
    print(f"{describe_machine()} At the start: {describe_load()}.\n", flush=True)
    if arguments.profile:
        print(await profile_sections(cores, h2load, _say), flush=True)
        return
    measured: dict[int, Samples] = {}
    async with running_rig(cores, h2load) as rig:
        variants = [variant for variant in VARIANTS if rig.can_run(variant)]
        for num_streams in streams:
            measured[num_streams] = await measure_rounds(
                rig, variants, num_streams, num_rounds, _say, quick=quick
            )
    print(speed_section(measured, _how(cores, h2load, num_rounds)), flush=True)
    goal_streams = GOAL_STREAMS if GOAL_STREAMS in measured else max(measured)
    print(goal_section(measured[goal_streams], goal_streams), flush=True)
    if arguments.json:
        _write_json(arguments.json, measured, load="h2load" if h2load else "own client")
    print(f"Measured in {time.monotonic() - began_s:.0f} s. At the end: {describe_load()}.")


def _how(cores: Cores, h2load: str | None, num_rounds: int) -> str:
    where = (
        "The servers share one processor, one at work at a time, and the load has another"
        if cores.server is not None
        else "**There is only one processor: servers and load share it**"
    )
    load = (
        "h2load"
        if h2load
        else f"**a small client of our own in Python, since h2load is missing ({INSTALL})**"
    )
    sse = (
        f"SSE (uvicorn with uvloop and {sse_parser()}) forms each event with json.dumps and has no engine "
        "behind it"
        if is_installed()
        else "**SSE was not measured: fastapi and uvicorn are missing (pip install 'streamsrv[bench]')**"
    )
    return (
        f"{MAX_TOKENS} tokens a stream of the scripted engine, whose own steps, with the scheduler's and the "
        "sampler's, are part of our server's time; the worker is the thread of the engine, the sampling of "
        f"tokens and the detokeniser. {where}; it comes from {load}: gRPC with up to 64 streams a "
        "connection, SSE over HTTP/1.1 with a connection a stream. Of a fixed number of tokens a message "
        "the first has one and goes at once, the others are cut when all is there; 'ready' sends what there "
        "is whenever the last message has gone. Streams' first and last messages are counted. The bare "
        f"handler sends the very bytes of our messages; {sse}. CPU is the server's processor time; wire "
        f"bytes are all that it sent, HTTP framing included. Medians of {num_rounds} interleaved rounds, "
        "with the least and the greatest."
    )


def _write_json(path: Path, measured: Mapping[int, Samples], load: str) -> None:
    samples: list[dict[str, Any]] = [
        {
            "streams": num_streams,
            "server": variant.server.value,
            "tokens_per_message": variant.tokens_per_message,
            "interval_ms": variant.interval_ms,
            "zstd": variant.zstd,
            "round": round_,
            **dataclasses.asdict(sample),
        }
        for num_streams, by_variant in measured.items()
        for variant, own in by_variant.items()
        for round_, sample in enumerate(own)
    ]
    try:
        path.write_text(
            json.dumps({"machine": describe_machine(), "load": load, "samples": samples}, indent=1)
        )
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}; name another file with --json") from None


def _say(what: str) -> None:
    print(f"bench_frontend: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
