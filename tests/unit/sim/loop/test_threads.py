from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest

from tests.patience import PATIENCE_S
from tests.unit.sim.virtual import current
from vsched.sim.loop import VirtualDeadlock, VirtualLoop


@pytest.mark.sim
async def test_clock_stands_while_a_thread_works() -> None:
    """A timer of a microsecond does not fire during 20 ms of real work."""
    async with asyncio.timeout(1e-6):
        await asyncio.to_thread(time.sleep, 0.02)
    assert current().now_ns() == 0
    assert current().statistics().calls == 1


@pytest.mark.sim
async def test_clock_stands_while_an_abandoned_call_goes_on() -> None:
    """A running call cannot be stopped; everything it does until it ends belongs to the same moment."""
    loop = current()
    ended: list[int] = []

    def work() -> None:
        loop.call_soon_threadsafe(call.cancel)
        time.sleep(0.01)
        ended.append(loop.now_ns())

    call = asyncio.ensure_future(asyncio.to_thread(work))
    await asyncio.sleep(1)
    assert ended == [0]
    assert call.cancelled()


@pytest.mark.sim
async def test_threads_take_turns_in_the_order_of_the_calls() -> None:
    """Threads run one at a time, and not while the loop runs, so there are no races."""
    order: list[str] = []

    def work(index: int) -> None:
        order.append(f"begin {index}")
        time.sleep(0.006 - 0.002 * index)
        order.append(f"end {index}")

    async def call(index: int) -> None:
        await asyncio.to_thread(work, index)
        order.append(f"heard {index}")

    calls = asyncio.gather(*(call(index) for index in range(3)))
    await asyncio.sleep(0)
    order.append("loop")
    await calls
    turns = [f"{what} {index}" for index in range(3) for what in ("begin", "end", "heard")]
    assert order == ["loop", *turns]


@pytest.mark.sim
async def test_call_that_is_cancelled_before_its_turn_never_begins() -> None:
    began: list[int] = []
    calls = [asyncio.ensure_future(asyncio.to_thread(began.append, index)) for index in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert began == [0, 2]


@pytest.mark.sim
async def test_posts_of_a_thread_precede_its_result_in_order() -> None:
    loop = current()
    received: list[object] = []

    def work() -> str:
        for index in range(3):
            loop.call_soon_threadsafe(received.append, index)
        return "result"

    received.append(await asyncio.to_thread(work))
    assert received == [0, 1, 2, "result"]


@pytest.mark.sim
async def test_posts_of_a_thread_wait_until_nothing_else_can_run() -> None:
    """However fast the thread is: anything that was ready before is done first."""
    loop = current()
    received: list[str] = []
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(received.append, "posted"))
    thread.start()
    thread.join()
    for _ in range(5):
        await asyncio.sleep(0)
        received.append("ready")
    await asyncio.sleep(1)
    assert received == ["ready"] * 5 + ["posted"]


@pytest.mark.sim
async def test_a_thread_can_wait_for_a_coroutine() -> None:
    loop = current()

    async def answer() -> int:
        return 42

    def work() -> int:
        return asyncio.run_coroutine_threadsafe(answer(), loop).result(5)

    assert await asyncio.to_thread(work) == 42


@pytest.mark.sim
async def test_results_and_errors_of_other_executors_arrive() -> None:
    def fail() -> None:
        raise ValueError("no")

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        loop = current()
        assert await loop.run_in_executor(threads, pow, 2, 5) == 32
        with pytest.raises(ValueError, match="no"):
            await loop.run_in_executor(threads, fail)
    with pytest.raises(RuntimeError, match="after shutdown"):
        await loop.run_in_executor(threads, fail)


@pytest.mark.sim
async def test_frozen_waits_for_a_thread_that_the_loop_does_not_know() -> None:
    loop = current()
    done = asyncio.Event()
    thread = threading.Timer(0.01, loop.call_soon_threadsafe, [done.set])
    with loop.frozen():
        thread.start()
        async with asyncio.timeout(1e-6):
            await done.wait()
    thread.join()
    assert loop.now_ns() == 0


def test_a_thread_that_never_comes_back_is_a_hang() -> None:
    gate = threading.Event()

    async def main() -> None:
        await asyncio.gather(asyncio.to_thread(gate.wait, 5), asyncio.sleep(1))

    loop = VirtualLoop(outside_limit_s=0.02)
    try:
        with pytest.raises(VirtualDeadlock, match="a thread has not come back for 0.02 s"):
            loop.run_until_complete(main())
    finally:
        gate.set()
        loop._outside_limit_s = PATIENCE_S
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
