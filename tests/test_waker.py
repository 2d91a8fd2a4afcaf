import asyncio

from streamsrv.waker import Waker


async def test_a_wait_ends_with_the_next_change_and_only_with_one_after_it_began() -> None:
    waker = Waker()
    waker.wake()  # nobody waits: whoever waits looks first
    waiting = asyncio.create_task(waker.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waker.wake()
    waker.wake()
    await waiting


async def test_a_pause_lasts_its_time_whatever_changes() -> None:
    loop, waker = asyncio.get_running_loop(), Waker()
    for delay_s in (0.0, 0.01, 0.02):
        loop.call_later(delay_s, waker.wake)
    began_s = loop.time()
    await waker.pause(0.05, lambda: False)
    assert loop.time() - began_s >= 0.049


async def test_a_pause_ends_with_the_change_that_ends_it_or_does_not_begin() -> None:
    waker, ended = Waker(), asyncio.Event()
    pausing = asyncio.create_task(waker.pause(60.0, ended.is_set))
    await asyncio.sleep(0)
    waker.wake()
    await asyncio.sleep(0)
    assert not pausing.done()
    ended.set()
    waker.wake()
    await pausing
    await waker.pause(60.0, ended.is_set)


async def test_after_a_pause_that_was_cancelled_every_change_wakes() -> None:
    waker = Waker()
    pausing = asyncio.create_task(waker.pause(60.0, lambda: False))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    waiting = asyncio.create_task(waker.wait())
    await asyncio.sleep(0)
    waker.wake()
    await waiting
