"""The profile of our server, as a table."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from streamsrv.bench.errors import BenchError
from streamsrv.bench.frontend.profiled import begin_file, end_file, read_profile
from streamsrv.bench.frontend.rig import SERVE_FLAGS, Cores, Rig
from streamsrv.bench.frontend.sample import Sample
from streamsrv.bench.frontend.sampler import Profile
from streamsrv.bench.frontend.variant import EIGHT, ONE, PACED, Server, Variant
from streamsrv.bench.processes import LISTENING, listening_process, on_core
from streamsrv.bench.suite.markdown import section

NUM_STREAMS = 256
VARIANTS = {"one token a message": ONE, "eight": EIGHT, "each 50 ms": PACED}
_MOST_ROWS = 25
_NAMES = {"MainThread": "event loop", "streamsrv-worker": "worker"}
_STEPS = "Worker._take_steps "
"""What the event loop does for the worker's steps: scheduling them, and telling what they brought."""
_POLLER = "_poll_wrapper"


def thread_name(name: str) -> str:
    """Name a thread by what it does."""
    return "grpc's poller" if _POLLER in name else _NAMES.get(name, name)


def profile_rows(profile: Profile, num_tokens: int) -> list[list[str]]:
    """The threads with their shares, then the loop's functions that took most by themselves."""

    def row(what: str, own_s: float, all_s: float | None = None) -> list[str]:
        with_called = "" if all_s is None else f"{100 * all_s / profile.total_s:.1f}%"
        return [what, f"{100 * own_s / profile.total_s:.1f}%", with_called, f"{own_s / num_tokens * 1e6:.2f}"]

    rows = [
        row(f"**{thread_name(name)}**", seconds)
        for name, seconds in _most(profile.threads_s)
        if seconds > profile.total_s / 200
    ]
    rows.append(row("**threads outside Python**", profile.native_s))
    steps_s = sum(s for function, s in profile.all_s.items() if function.startswith(_STEPS))
    worker_s = profile.threads_s.get("streamsrv-worker", 0.0)
    rows.append(row("**front end: neither the worker nor its steps**", profile.total_s - worker_s - steps_s))
    for function, seconds in _most(profile.own_s)[:_MOST_ROWS]:
        rows.append(row(f"`{function}`", seconds, profile.all_s[function]))
    return rows


def _most(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


async def profile_sections(
    cores: Cores,
    h2load: str | None,
    say: Callable[[str], None],
    variants: Mapping[str, Variant] = VARIANTS,
    num_streams: int = NUM_STREAMS,
) -> str:
    """Profile each of some variants, by what they are called.

    Raises:
        BenchError: the server cannot be started, or a request failed.
    """
    sections = []
    for name, variant in variants.items():
        say(f"profiling {num_streams} streams, {name}")
        profile, sample = await _profile(cores, h2load, variant, num_streams)
        sections.append(
            section(
                f"Where the server's time goes: {num_streams} streams, {name}",
                f"{sample.num_tokens:,} tokens in {sample.num_messages:,} messages, "
                f"{sample.cpu_us_per_token:.1f} us of the server's processor time a token, what sampling "
                "costs included. First the threads (the worker's has the engine, the sampling of tokens and "
                "the detokeniser, the event loop's everything else), then the functions of the event loop. A "
                "function's own time has that of the C code that it calls (grpc, uvloop, protobuf, zstd); "
                "what is called by none of ours is `Runner.run`'s.",
                ("thread, or function of the event loop", "own", "with called", "own us a token"),
                profile_rows(profile, sample.num_tokens),
            )
        )
    return "\n".join(sections)


async def _profile(
    cores: Cores, h2load: str | None, variant: Variant, num_streams: int
) -> tuple[Profile, Sample]:
    with tempfile.TemporaryDirectory() as name, on_core(cores.load):
        path = Path(name) / "profile"
        command = ("-m", "streamsrv.bench.frontend.profiled", str(path), "serve", *SERVE_FLAGS)
        says = (LISTENING, "metrics on ")
        async with listening_process("the server", *command, says=says, core=cores.server) as process:
            rig = Rig({Server.OURS: process}, Path(name), cores, h2load)
            await rig.run(variant, num_streams, num_streams)
            begin_file(path).touch()
            sample = await rig.run(variant, num_streams, 4 * num_streams)
            end_file(path).touch()
            for _ in range(100):
                if path.exists():
                    return read_profile(path), sample
                await asyncio.sleep(0.1)
    raise BenchError("the profiled server wrote no profile; does it still run?")
