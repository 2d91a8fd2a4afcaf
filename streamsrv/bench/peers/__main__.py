"""Compare streamsrv with other engines and servers on this machine, and print a table of Markdown.

Each gets the demo model's weights in a form that it is fast with, the same prompts (token ids, no two
alike), the same processors and as many threads, and decodes greedily. Each has a virtual environment of its
own, which is made the first time and used again. One runs at a time, in turn. A peer that cannot be
installed or started is a row that says why. Nothing but the installing needs the network.
"""

import argparse
import json
import logging
import os
import secrets
import shlex
import sys
import time
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import uvloop
from tokenizers import Tokenizer

from engines.api import StreamsrvError
from engines.demo_model import model_path
from engines.memory import usable_processors
from engines.registry import inspect_model
from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.catalog import DEFAULT_PEERS, PEERS
from streamsrv.bench.peers.checks import check_known
from streamsrv.bench.peers.contestants import running_peer, served
from streamsrv.bench.peers.peer import Contestant
from streamsrv.bench.peers.peer_process import PeerSize
from streamsrv.bench.peers.rounds import OURS, Results, Rounds
from streamsrv.bench.peers.table import peers_json, peers_table
from streamsrv.bench.prompts import PromptMaker, shipped_text
from streamsrv.bench.suite.machine import describe_load, describe_machine


@dataclass(frozen=True, slots=True)
class _Plan:
    peers: tuple[str, ...]
    batches: tuple[int, ...]
    num_rounds: int
    num_prompt_tokens: int
    max_tokens: int
    flags: tuple[str, ...]
    """Further ones of our server's."""
    environments: Path
    seed: int


def main() -> None:
    """Compare; exit 1 with a sentence if streamsrv itself cannot be measured."""
    arguments = _parser().parse_args()
    quick = arguments.quick
    plan = _Plan(
        peers=arguments.peers,
        batches=arguments.streams or ((8,) if quick else (1, 8, 32, 64)),
        num_rounds=arguments.rounds or (1 if quick else 3),
        num_prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        flags=tuple(shlex.split(arguments.serve_flags)),
        environments=arguments.environments or platformdirs.user_cache_path("streamsrv") / "bench_peers",
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
    )
    logging.basicConfig(level=logging.WARNING)
    try:
        if arguments.cores:
            _use_cores(arguments.cores)
        if arguments.json:  # what cannot be written shall be known before, not after
            arguments.json.touch()
        text, numbers = uvloop.run(_compare(plan))
        print(text)
        if arguments.json:
            arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")
    except (StreamsrvError, OSError) as error:
        sys.exit(f"bench_peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round with 8 streams")
    parser.add_argument(
        "--peers",
        type=_peer_names,
        default=DEFAULT_PEERS,
        metavar="A,B",
        help=f"of {', '.join(PEERS)} (default: {','.join(DEFAULT_PEERS)})",
    )
    parser.add_argument(
        "--streams", type=_counts, metavar="N,N", help="streams at the same time (default: 1,8,32,64)"
    )
    parser.add_argument("--rounds", type=_count, metavar="N", help="rounds that are counted (default: 3)")
    parser.add_argument(
        "--prompt-tokens", type=_count, default=200, metavar="N", help="of each prompt (default: 200)"
    )
    parser.add_argument(
        "--max-tokens", type=_count, default=64, metavar="N", help="of each output (default: 64)"
    )
    parser.add_argument(
        "--cores", type=_cores, metavar="N,N", help="processors for all, by number (default: all usable ones)"
    )
    parser.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help="further flags of `streamsrv serve`, as one argument: --serve-flags='--engine onnxruntime'",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        help="where the virtual environments and converted models are kept (default: in the user's cache)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="for the same prompts again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each round's numbers there, too")
    return parser


def _peer_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is no peer; there are {', '.join(PEERS)}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _cores(text: str) -> frozenset[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} must be processors' numbers, as in 0,1")
    return frozenset(int(part) for part in text.split(","))


def _use_cores(cores: frozenset[int]) -> None:
    usable = os.sched_getaffinity(0)
    if not cores <= usable:
        raise BenchError(f"--cores names processors that cannot be used; there are {_numbers(usable)}")
    os.sched_setaffinity(0, cores)  # the processes started from here on inherit it


def _numbers(values: Seq[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(values)))


async def _compare(plan: _Plan) -> tuple[str, dict[str, object]]:
    began_s = time.monotonic()
    source = model_path("demo")
    tokenizer = Tokenizer.from_str(inspect_model(source).vocabulary.tokenizer_json)
    text_ids = tokenizer.encode(shipped_text(), add_special_tokens=False).ids
    size = PeerSize(
        num_threads=usable_processors(),
        num_streams=max(plan.batches),
        num_cells=plan.num_prompt_tokens + plan.max_tokens + 1,
    )
    load_before = describe_load()
    results = Results()
    contestants: dict[str, Contestant] = {}
    async with AsyncExitStack() as stack:
        _say(f"starting {OURS}")
        flags = ("--threads", str(size.num_threads), *plan.flags)
        contestants[OURS] = await stack.enter_async_context(served(flags))
        await check_known(contestants[OURS], tokenizer)
        for name in plan.peers:
            try:
                contestant = await stack.enter_async_context(
                    running_peer(PEERS[name], source, plan.environments, size, _say)
                )
                await check_known(contestant, tokenizer)
                contestants[name] = contestant
            except (BenchError, OSError) as error:
                results.failures[name] = str(error)
                _say(f"{name} is left out: {error}")
        versions = {name: contestant.version for name, contestant in contestants.items()}
        maker = PromptMaker(text_ids, plan.num_prompt_tokens, plan.seed)
        await Rounds(maker, plan.max_tokens, results).run(contestants, plan.batches, plan.num_rounds, _say)
    precisions = {
        OURS: _own_precision(plan.flags),
        **{name: PEERS[name].precision for name in plan.peers},
    }
    text = "\n\n".join(
        [
            f"{describe_machine()} At the start: {load_before}.",
            _what_was_done(plan, size, results, versions),
            peers_table(results, precisions, plan.batches),
            f"Measured in {time.monotonic() - began_s:.0f} s. At the end: {describe_load()}.",
        ]
    )
    return text, {"versions": versions, "seed": plan.seed, **peers_json(results, precisions)}


def _own_precision(flags: Seq[str]) -> str:
    return f"by {shlex.join(flags)}" if flags else "int8 per channel, cache f16"


def _what_was_done(plan: _Plan, size: PeerSize, results: Results, versions: dict[str, str]) -> str:
    driven = "; ".join(f"{name}: {PEERS[name].driven}" for name in plan.peers)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    rounds = "one round" if plan.num_rounds == 1 else f"{plan.num_rounds} rounds"
    return (
        f"N streams at the same time: the same prompts of {plan.num_prompt_tokens} token ids, no two alike, "
        f"{plan.max_tokens} tokens out, greedy; {size.num_threads} threads each, on the same processors. The "
        f"weights are those of {model_path('demo').name}, converted as the table says. {OURS} is "
        f"served over gRPC to a Python client on the same processors. {driven}. Prefix caches and prompt "
        f"lookup are off. {rounds.capitalize()}, each running alone, in changing order; others are loaded "
        f"and idle (together they took at most {100 * results.idle_cpu:.1f}% of a processor). Medians; a "
        "ratio is our number divided by the peer's of the same round: the median, with the least and the "
        "greatest. Tokens/s are of the whole run; decode: while all streams had their first token and none "
        "its last. Of the tokens of a message, the first counts all of the wait and the others none. Same "
        "first token: the part of the prompts after which a peer begins as ours does. Before, each was asked "
        f"what is known, and of each output the length was checked. Versions: {named}."
    )


def _say(what: str) -> None:
    print(f"bench_peers: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
