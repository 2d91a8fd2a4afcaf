import asyncio

import pytest

from streamsrv.errors import ConsumerStalledError
from streamsrv.stall_watch import StallWatch


async def write_after(pause_s: float, limit_s: float) -> float:
    """Begin a write that never ends; returns how long it lasted."""
    loop = asyncio.get_running_loop()
    began_s = 0.0
    try:
        async with StallWatch(limit_s) as watch:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            watch.begin()
            await asyncio.Event().wait()
    except ConsumerStalledError:
        pass
    return loop.time() - began_s


async def test_a_write_that_begins_late_has_the_whole_limit_and_is_ended_then() -> None:
    assert await write_after(0.0, 0.01) >= 0.01
    assert await write_after(0.03, 0.05) >= 0.05


async def test_waiting_for_something_to_write_is_no_stall() -> None:
    async with StallWatch(0.005) as watch:
        for _ in range(5):
            watch.begin()
            await asyncio.sleep(0)
            watch.end()
            await asyncio.sleep(0.01)


async def test_a_cancel_and_an_error_pass_through_as_they_are() -> None:
    async def write(error: Exception | None) -> None:
        async with StallWatch(60.0) as watch:
            watch.begin()
            if error is not None:
                raise error
            await asyncio.Event().wait()

    task = asyncio.create_task(write(None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(KeyError):
        await write(KeyError("x"))
