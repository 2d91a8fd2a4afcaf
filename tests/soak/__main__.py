"""Run the soak: `scripts/soak`."""

import argparse
import asyncio
import random
import sys
import time
import traceback
from collections import Counter

import grpc
from hypothesis import HealthCheck, given, settings
from rich.console import Console
from rich.progress import Progress

from engines.scripted import DEFAULT_SCRIPT
from streamsrv.errors import CallFailedError
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.test_any_request import cases_strategy, run_cases
from tests.soak.behaviours import BEHAVIOURS, LIMIT_S, BreachError, Soak
from tests.soak.server import IDLE_GAUGES, SoakedServer, soaked_server

# Statuses that a soaked client can be given for what it did or what the queue was like.
EXPECTED = {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CONSUMER_STALLED"}
# Memory may grow while pools, caches and allocators fill: flat is judged from here on.
SETTLED = 0.3
GROWTH_MIB = 24.0
# OpenVINO keeps what it has prepared for 200 numbers of tokens, up to half a megabyte each. Measured: 480 MiB
# after 300 requests, 550 after 1,200, and from the 1,500th of 3,000 on 583 to 609.
DEMO_GROWTH_MIB = 100.0

FLAGS = [
    "--stall-limit-s",
    "1",
    "--max-resume-window-s",
    "3",
    "--log-level",
    "warning",
    "--drain-grace-s",
    "10",
]
SCRIPTED = [
    "--engine", "scripted", "--script-step-ms", "1", "--max-running", "24", "--max-waiting-per-caller", "256",
]  # fmt: skip
# Long enough for a reader to stall in, however much its transport takes.
SCRIPT = " ".join([DEFAULT_SCRIPT] * 4)
DEMO = ["--model", "demo", "--kv-cache-gib", "0.1", "--max-running", "24", "--max-waiting-per-caller", "256"]


async def soak(
    name: str, flags: list[str], script: str | None, num_requests: int, clients: int, seed: int
) -> bool:
    """Send the requests; True if nothing was lost, left behind or grew."""
    breaches: list[str] = []
    outcomes: Counter[tuple[str, str]] = Counter()
    tenths: list[tuple[int, float, dict[str, float]]] = []
    rng = random.Random(seed)
    began_s = time.monotonic()
    async with (
        soaked_server([*FLAGS, *flags]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        shared = Soak(
            server.address, channel, InferenceServiceStub(channel), rng, script, 300 if script else 48
        )
        turn = iter(range(num_requests))
        names = list(BEHAVIOURS)

        async def client() -> None:
            for _ in turn:
                behaviour = rng.choices(names, list(BEHAVIOURS.values()))[0]
                try:
                    outcome = await asyncio.wait_for(behaviour(shared), LIMIT_S)
                except CallFailedError as error:
                    outcome = error.server_reason or error.code
                    if error.code not in EXPECTED and outcome not in EXPECTED:
                        breaches.append(f"{behaviour.__name__}: {error} ({outcome})")
                except TimeoutError:
                    outcome = "FORGOTTEN"
                    breaches.append(f"{behaviour.__name__}: nothing came for {LIMIT_S:g} s")
                except BreachError as error:
                    outcome = "BREACH"
                    breaches.append(f"{behaviour.__name__}: {error}")
                outcomes[behaviour.__name__, outcome] += 1
                bars.advance(bar)
                num_done = outcomes.total()
                if num_done % (num_requests // 10) == 0:
                    tenths.append((num_done, server.resident_mib, await server.metrics()))

        with Progress(console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(name, total=num_requests)
            await asyncio.gather(*(client() for _ in range(clients)))
        breaches += await left_behind(server)
    settled = [mib for number, mib, _ in tenths if number >= SETTLED * num_requests]
    if settled[-1] - settled[0] > (DEMO_GROWTH_MIB if script is None else GROWTH_MIB):
        breaches.append(f"memory grew by {settled[-1] - settled[0]:.0f} MiB after it had settled")
    report(name, num_requests, time.monotonic() - began_s, outcomes, tenths, breaches)
    return not breaches


async def left_behind(server: SoakedServer) -> list[str]:
    """Wait for windows to end, then look for what is still there."""
    for _ in range(100):
        gauges = {gauge: (await server.metrics())[gauge] for gauge in IDLE_GAUGES}
        if not any(gauges.values()):
            return []
        await asyncio.sleep(0.2)
    return [f"{gauge} is {value:g} when nobody asks for anything" for gauge, value in gauges.items() if value]


def report(
    name: str,
    num_requests: int,
    seconds: float,
    outcomes: Counter[tuple[str, str]],
    tenths: list[tuple[int, float, dict[str, float]]],
    breaches: list[str],
) -> None:
    """Print tables that can be pasted into a page."""
    print(f"\n## {name}: {num_requests:,} requests in {seconds:.0f} s\n")
    print("| client | outcome | times |\n|---|---|--:|")
    for (behaviour, outcome), times in sorted(outcomes.items()):
        print(f"| {behaviour} | {outcome} | {times:,} |")
    print(
        "\n| requests | resident MiB | running | waiting | streams | blocks used | log bytes | preemptions |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for number, mib, gauges in tenths:
        values = [gauges[f"streamsrv_{gauge}"] for gauge in (
            "requests_running", "requests_waiting", "streams", "cache_blocks_used", "log_bytes",
            "preemptions_total",
        )]  # fmt: skip
        print(f"| {number:,} | {mib:.0f} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    print(f"\n{len(breaches)} breaches" + "".join(f"\n- {breach}" for breach in breaches[:20]), flush=True)


def any_requests(num_requests: int) -> bool:
    """Send requests with any bytes and any field values, as hypothesis finds them."""
    began_s, num_sent = time.monotonic(), 0

    @given(cases_strategy)
    @settings(
        max_examples=num_requests // 20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    def send(cases: list[tuple[str, bytes]]) -> None:
        nonlocal num_sent
        asyncio.run(run_cases(cases))
        num_sent += len(cases)

    try:
        send()
    except Exception:
        traceback.print_exc()
        print("\n1 breach: a request was answered with a fault of the server's; it is above", flush=True)
        return False
    finally:
        seconds = time.monotonic() - began_s
        print(f"\n## any bytes and any values: {num_sent:,} requests in {seconds:.0f} s", flush=True)
    print("\n0 breaches", flush=True)
    return True


def main() -> None:
    """Soak the scripted engine and the demo model, then send what is no sense."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="on the scripted engine (10000)")
    parser.add_argument("--demo-requests", type=int, default=500, help="on the demo model (500)")
    parser.add_argument("--any-requests", type=int, default=10_000, help="with any content (10000)")
    parser.add_argument("--clients", type=int, default=48, help="at the same time (48)")
    parser.add_argument("--seed", type=int, default=1, help="of what the clients do (1)")
    arguments = parser.parse_args()
    fine = True
    for name, flags, script, count in (
        ("scripted engine", [*SCRIPTED, "--script-text", SCRIPT], SCRIPT, arguments.requests),
        ("demo model", DEMO, None, arguments.demo_requests),
    ):
        if count:
            fine &= asyncio.run(soak(name, flags, script, max(count, 10), arguments.clients, arguments.seed))
    if arguments.any_requests:
        fine &= any_requests(max(arguments.any_requests, 20))
    sys.exit(0 if fine else 1)


main()
