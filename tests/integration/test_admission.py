"""Who gets in, and what happens when a worker is lost, over gRPC."""

import asyncio
import threading

import pytest

from engines.api import EngineError, StepBatch
from engines.scripted import ScriptedEngine
from streamsrv import worker
from tests.integration.test_service import WORDS, Gate, refused
from tests.servers import running, until


async def test_a_caller_may_fill_its_share_of_the_queue_and_no_more() -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, max_running=1, max_waiting=10, max_waiting_per_caller=2) as server:
        streams = []
        for _ in range(3):
            streams.append(server.client.generate("x"))
            await streams[-1].start()
            await until(lambda: server.pool.num_waiting == len(streams) - 1)
        error = await refused(server.client.generate("x"))
        assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "CALLER_SHARE_USED")
        assert error.retry_after_s == 1.0
        gate.open_for_good()
        assert [await stream.text() for stream in streams] == [WORDS] * 3


async def test_a_burst_that_can_run_does_not_count_as_waiting() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), max_running=3, max_waiting=0) as server:
        streams = [server.client.generate("x") for _ in range(3)]
        await asyncio.gather(*(stream.start() for stream in streams))
        error = await refused(server.client.generate("x"))
        assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING")
        gate.open_for_good()
        assert [await stream.text() for stream in streams] == [WORDS] * 3


async def test_waiting_prompt_tokens_are_bounded_and_one_request_always_may_wait() -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, max_running=1, max_waiting_tokens=100) as server:
        first = server.client.generate("x")
        await first.start()
        await until(lambda: not server.pool.num_waiting)
        big = server.client.generate([5] * 150)
        await big.start()
        error = await refused(server.client.generate("x"))
        assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING")
        assert "150 prompt tokens" in str(error)
        gate.open_for_good()
        await asyncio.gather(first.text(), big.text())


@pytest.mark.parametrize("failure", [EngineError("broken"), RuntimeError("broken"), SystemExit("broken")])
async def test_a_step_that_dies_ends_its_streams_before_the_worker_is_made_again(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_FIRST_RESTART_S", 2.0)  # a busy machine takes its time over five streams
    fail = threading.Event()

    def before_step(_: StepBatch) -> None:
        if fail.is_set():
            raise failure

    async with running(ScriptedEngine(WORDS, before_step=before_step, step_s=0.01)) as server:
        streams = [server.client.generate("x", ignore_eos=True) for _ in range(5)]
        await asyncio.gather(*(stream.start() for stream in streams))
        fail.set()
        for stream in streams:
            error = await refused(stream)
            assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
            assert "broken" in str(error)
        assert not server.pool.healthy
        error = await refused(server.client.generate("x", echo=True))  # its log has the prompt already
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        fail.clear()
        await until(lambda: server.pool.healthy)
        assert await server.client.generate("x").text() == WORDS


async def test_a_step_that_hangs_is_given_up_and_the_server_still_stops() -> None:
    hang, release = threading.Event(), threading.Event()

    def before_step(_: StepBatch) -> None:
        if hang.is_set():
            release.wait(60)

    async with running(ScriptedEngine(WORDS, before_step=before_step), stuck_after_s=0.2) as server:
        hang.set()
        error = await refused(server.client.generate("x"))
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        assert "did not end within 0.2 s" in str(error)
        hang.clear()
        await until(lambda: server.pool.healthy)
        assert await server.client.generate("x").text() == WORDS
    release.set()


async def test_a_worker_that_cannot_restart_keeps_trying_and_health_says_so() -> None:
    fail = threading.Event()

    class Failing(ScriptedEngine):
        attempts = 0

        def create_context(self):  # type: ignore[no-untyped-def]
            Failing.attempts += 1
            if fail.is_set():
                raise EngineError("no device")
            return super().create_context()

    def before_step(_: StepBatch) -> None:
        if fail.is_set():
            raise EngineError("gone")

    async with running(Failing(WORDS, before_step=before_step)) as server:
        fail.set()
        await refused(server.client.generate("x"))
        await until(lambda: Failing.attempts >= 3)
        assert not server.pool.healthy
        fail.clear()
        await until(lambda: server.pool.healthy)
        assert await server.client.generate("x").text() == WORDS
