"""The client on bad networks: a real server, and a proxy before it that cuts, shreds, delays and loses."""

import asyncio
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from engines.scripted import ScriptedEngine
from streamsrv.client import Client, SyncClient
from streamsrv.errors import CallFailedError, StreamIncompleteError
from tests.integration.test_service import WORDS, Gate
from tests.proxy import Fault, FaultyProxy
from tests.servers import TestServer, running, until

NUM_TOKENS = 200
# Pings that notice a dead connection in a fraction of a second; the server allows one in 5 s, or with data.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 300),
    ("grpc.keepalive_timeout_ms", 300),
    ("grpc.http2.ping_timeout_ms", 300),
    ("grpc.min_reconnect_backoff_ms", 500),
)
both = pytest.mark.parametrize("kind", ["async", "sync"])
# The engine is so fast that a chunk has 8 tokens only where they are let gather.
ONE: dict[str, Any] = {"max_tokens_per_chunk": 1}
EIGHT: dict[str, Any] = {"max_tokens_per_chunk": 8, "min_chunk_interval_ms": 10_000}
each_shape = pytest.mark.parametrize(
    "shape",
    [{"zstd": zstd, **most} for zstd in (False, True) for most in (ONE, EIGHT)],
    ids=["plain-1", "plain-8", "zstd-1", "zstd-8"],
)


@dataclass(frozen=True, slots=True)
class Received:
    """What a client made of a stream."""

    text: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Of each token, by the chunk it came in."""
    ended: bool
    num_chunks: int
    """Chunks that have tokens."""
    num_resumes: int
    num_resends: int

    @property
    def output(self) -> tuple[str, tuple[int, ...], bool]:
        return self.text, self.token_ids, self.ended


def _received(stream: Any, chunks: list[Any]) -> Received:
    text = "".join(chunk.text for chunk in chunks)
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    positions = [chunk.position + i for chunk in chunks for i in range(chunk.num_tokens)]
    assert (text, tuple(ids)) == (stream.received_text, stream.token_ids)
    ended = stream.usage is not None and stream.usage.num_completion_tokens == len(ids)
    num_chunks = sum(chunk.num_tokens > 0 for chunk in chunks)
    return Received(
        text, tuple(ids), tuple(positions), ended, num_chunks, stream.num_resumes, stream.num_resends
    )


async def receive(
    kind: str, target: str, *, client_options: dict[str, Any] | None = None, **options: Any
) -> Received:
    """Read one stream with a client of its own."""
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    if kind == "async":
        async with (
            Client(target, **client_options or {}) as client,
            client.generate("x", **options) as stream,
        ):
            return _received(stream, [chunk async for chunk in stream])

    def read() -> Received:
        with SyncClient(target, **client_options or {}) as client, client.generate("x", **options) as stream:
            return _received(stream, list(stream))

    return await asyncio.to_thread(read)


async def through(server: TestServer, faults: Iterable[Fault], kind: str, **options: Any) -> Received:
    async with FaultyProxy(server.target, faults) as proxy:
        return await receive(kind, proxy.target, **options)


async def cut_everywhere(kind: str, positions: int, **options: Any) -> None:
    """Cut the connection after so many numbers of bytes, evenly from none to all, and compare."""
    async with running() as server:
        async with FaultyProxy(server.target) as proxy:
            whole = await receive(kind, proxy.target, **options)
            total = proxy.bytes_down[0]
        assert (len(whole.token_ids), whole.positions) == (NUM_TOKENS, tuple(range(NUM_TOKENS)))
        assert whole.ended
        most = options["max_tokens_per_chunk"]
        assert (NUM_TOKENS - 1) / most <= whole.num_chunks <= NUM_TOKENS / most + 2
        cuts = sorted({number * total // positions for number in range(positions)})
        free = asyncio.Semaphore(6)
        resumed = set()

        async def cut_at(position: int) -> None:
            fault = Fault(position, reset=position % 2 == 1, server_unaware=position % 3 == 0)
            async with free:
                received = await through(server, [fault], kind, **options)
            assert received.output == whole.output, position
            assert received.positions == whole.positions, position
            if received.num_resumes:  # otherwise cut before the request was sent, or after the last message
                resumed.add(position)

        num_admitted = server.pool.num_admitted
        async with asyncio.TaskGroup() as group:
            for position in cuts:
                group.create_task(cut_at(position))
        assert len(resumed) > 0.8 * len(cuts)
        assert server.pool.num_admitted == num_admitted + len(cuts), "each request ran once"


@each_shape
async def test_a_connection_cut_anywhere_costs_nothing_and_repeats_nothing(shape: dict[str, Any]) -> None:
    await cut_everywhere("async", 60, **shape)


async def test_a_blocking_client_goes_on_after_a_cut_anywhere_too() -> None:
    await cut_everywhere("sync", 60, max_tokens_per_chunk=1)


# At one token a message, each of 200 messages takes some 43 bytes: these cut each at its border and within.
EVERYWHERE = 420


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_shape
async def test_a_connection_cut_at_every_message_costs_nothing(shape: dict[str, Any]) -> None:
    await cut_everywhere("async", EVERYWHERE, **shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_blocking_client_goes_on_after_a_cut_at_every_message_too() -> None:
    await cut_everywhere("sync", EVERYWHERE, zstd=True, **EIGHT)


@both
@each_shape
async def test_a_connection_that_is_cut_again_and_again_gets_there(kind: str, shape: dict[str, Any]) -> None:
    async with running() as server:
        whole = await receive(kind, server.target, **shape)
        faults = [Fault(size, reset=size % 2 == 1, piece_bytes=7) for size in range(900, 4000, 47)]
        received = await through(server, faults, kind, **shape)
        assert received.output == whole.output
        assert received.num_resumes >= 1
        assert server.pool.num_streams == 2


@both
async def test_a_connection_that_delivers_byte_by_byte_is_a_slow_one_and_no_more(kind: str) -> None:
    async with running() as server:
        whole = await receive(kind, server.target)
        received = await through(server, [Fault(piece_bytes=1)], kind)
        assert received.output == whole.output
        assert received.num_resumes == 0


@both
async def test_a_delay_is_waited_for(kind: str) -> None:
    async with running() as server:
        received = await through(server, [Fault(delay_s=0.05)], kind, max_tokens=5)
        assert (len(received.token_ids), received.num_resumes) == (5, 0)


@both
async def test_a_connection_that_says_nothing_any_more_is_noticed_and_replaced(kind: str) -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server, FaultyProxy(server.target) as proxy:
        reading = asyncio.ensure_future(receive(kind, proxy.target, client_options={"options": KEEPALIVE}))
        gate.let_through(50)
        await until(lambda: server.pool.num_steps >= 50)
        proxy.black_hole()
        gate.open_for_good()
        await until(lambda: not server.pool.num_running)
        began = time.monotonic()
        await until(lambda: proxy.num_connections >= 2)  # the first was given up
        assert time.monotonic() - began < 10
        assert not reading.done()
        proxy.lift()
        received = await reading
        whole = await receive(kind, server.target)
        assert received.output == whole.output
        assert received.num_resumes == 1


@both
async def test_a_request_lost_before_its_first_message_runs_once(kind: str) -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        # The request goes up when the server's settings have come down; its answer is cut short.
        faults = [Fault(190), Fault(190), Fault(190)]
        async with FaultyProxy(server.target, faults) as proxy:
            reading = asyncio.ensure_future(receive(kind, proxy.target, max_tokens=5))
            await until(lambda: proxy.num_connections == 4)
            gate.open_for_good()
            received = await reading
        assert (len(received.token_ids), received.num_resumes, received.num_resends) == (5, 1, 0)
        assert server.pool.num_streams == 1


async def test_a_lost_request_is_found_on_a_server_that_takes_no_new_ones() -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        FaultyProxy(server.target, [Fault(190)]) as proxy,
    ):
        reading = asyncio.ensure_future(receive("async", proxy.target, max_tokens=5))
        await until(lambda: server.pool.num_streams == 1)
        draining = asyncio.ensure_future(server.pool.drain(20))
        await asyncio.sleep(0)
        gate.open_for_good()
        assert len((await reading).token_ids) == 5
        assert await draining


# ---------------------------------------------------------------------------------------------------------
# Where resuming ends


async def broken_off(
    server: TestServer, proxy: FaultyProxy, gate: Gate, kind: str = "async"
) -> "asyncio.Future[Received]":
    """Begin to read, break the connection after 50 tokens or so, and let nothing through any more."""
    reading = asyncio.ensure_future(receive(kind, proxy.target))
    gate.let_through(50)
    await until(lambda: server.pool.num_steps >= 50)
    proxy.cut_all()
    proxy.black_hole()
    await until(lambda: not server.pool.num_read)
    return reading


async def incomplete(reading: "asyncio.Future[Received]") -> StreamIncompleteError:
    with pytest.raises(StreamIncompleteError) as caught:
        await reading
    return caught.value


@both
async def test_a_window_that_ended_is_raised_with_what_was_received(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(before_step=gate), max_resume_window_s=0.3) as server,
        FaultyProxy(server.target) as proxy,
    ):
        reading = await broken_off(server, proxy, gate, kind)
        gate.open_for_good()
        await until(lambda: not server.pool.num_streams)
        proxy.lift()
        error = await incomplete(reading)
        assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_EXPIRED")
        whole = await receive(kind, server.target)
        assert error.position == len(error.token_ids) <= 50
        assert error.token_ids == whole.token_ids[: error.position]
        assert whole.text.startswith(error.text)


async def test_a_position_that_the_server_holds_no_longer_is_raised() -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(before_step=gate), max_resume_window_s=2.0) as server,
        FaultyProxy(server.target) as proxy,
    ):
        reading = await broken_off(server, proxy, gate)
        gate.open_for_good()
        await until(lambda: not server.pool.num_running)
        for stream in server.pool._registry:
            stream.log.drop_before(NUM_TOKENS)
        proxy.lift()
        error = await incomplete(reading)
        assert (error.code, error.server_reason) == ("OUT_OF_RANGE", "POSITION_EVICTED")
        assert error.metadata["oldest_position"] == str(NUM_TOKENS)


async def test_a_stream_that_nobody_holds_any_more_goes_on_elsewhere_from_prompt_and_ids() -> None:
    gate = Gate()
    async with (
        running() as other,
        running(ScriptedEngine(before_step=gate), max_resume_window_s=2.0) as server,
        FaultyProxy(server.target) as proxy,
    ):
        whole = await receive("async", other.target)
        prompt_ids = await server.client.tokenize("x")
        reading = await broken_off(server, proxy, gate)
        gate.open_for_good()
        proxy.lead_to(other.target)
        proxy.cut_all()
        proxy.lift()
        error = await incomplete(reading)
        assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_OF_ANOTHER_INSTANCE")
        rest = other.client.generate(
            [*prompt_ids, *error.token_ids], max_tokens=NUM_TOKENS - len(error.token_ids), ignore_eos=True
        )
        await rest.text()
        ids = [*error.token_ids, *rest.token_ids]
        assert tuple(ids) == whole.token_ids
        assert await other.client.detokenize(ids, skip_special_tokens=True) == whole.text


async def test_a_server_that_does_not_come_back_is_given_up_when_the_window_ends() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate), max_resume_window_s=1.0) as server:
        async with FaultyProxy(server.target) as proxy:
            reading = await broken_off(server, proxy, gate)
        began = time.monotonic()
        error = await incomplete(reading)
        assert 0.5 < time.monotonic() - began < 10
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "")
        assert error.token_ids
        gate.open_for_good()


async def test_the_time_for_all_of_it_covers_the_resumes() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server, FaultyProxy(server.target) as proxy:
        began = time.monotonic()
        reading = asyncio.ensure_future(receive("async", proxy.target, timeout_s=1.0, resume_window_s=2.0))
        gate.let_through(50)
        await until(lambda: server.pool.num_steps >= 50)
        proxy.cut_all()
        error = await incomplete(reading)
        assert error.code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - began < 10
        assert error.token_ids
        gate.open_for_good()


async def test_without_a_window_a_cut_is_raised_at_once() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server, FaultyProxy(server.target) as proxy:
        stream = functools.partial(receive, "async", proxy.target, client_options={"resume_window_s": 0})
        reading = asyncio.ensure_future(stream())
        gate.let_through(50)
        await until(lambda: server.pool.num_steps >= 50)
        proxy.cut_all()
        assert (await incomplete(reading)).code == "UNAVAILABLE"
        gate.open_for_good()


async def test_a_server_that_is_not_there_is_said_soon() -> None:
    async with FaultyProxy("127.0.0.1:1") as proxy:
        target = proxy.target
    began = time.monotonic()
    for kind in ("async", "sync"):
        with pytest.raises(CallFailedError) as caught:
            await receive(kind, target)
        assert caught.value.code == "UNAVAILABLE"
        assert not isinstance(caught.value, StreamIncompleteError)
    assert time.monotonic() - began < 10
