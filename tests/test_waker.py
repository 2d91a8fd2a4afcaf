import asyncio

from streamsrv.waker import Waker


async def test_a_wait_ends_with_the_next_change_and_only_with_one_after_it_began() -> None:
    waker = Waker()
    waker.wake()  # nobody waits: whoever waits looks first
    waiting = asyncio.ensure_future(waker.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waker.wake()
    waker.wake()
    await waiting


async def test_a_pause_lasts_its_time_where_nothing_changes() -> None:
    loop, waker = asyncio.get_running_loop(), Waker()
    began_s = loop.time()
    await waker.pause(0.05)
    assert loop.time() - began_s >= 0.049


async def test_a_pause_ends_with_a_change() -> None:
    waker = Waker()
    pausing = asyncio.create_task(waker.pause(60.0))
    await asyncio.sleep(0)
    assert not pausing.done()
    waker.wake()
    await pausing


async def test_after_a_pause_that_was_cancelled_changes_wake() -> None:
    waker = Waker()
    pausing = asyncio.create_task(waker.pause(60.0))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    waiting = asyncio.ensure_future(waker.wait())
    await asyncio.sleep(0)
    waker.wake()
    await waiting
