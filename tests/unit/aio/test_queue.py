"""A queue whose entries can be put back: nothing is lost, nothing counted twice, everybody wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.patience import patience
from vsched.aio import FifoQueue


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def filled(*items: int) -> FifoQueue[int]:
    queue: FifoQueue[int] = FifoQueue()
    for item in items:
        queue.put_nowait(item)
    return queue


def contents(queue: FifoQueue[int]) -> list[int]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


async def test_queue_is_first_in_first_out() -> None:
    queue = filled(1, 2)
    await queue.put(3)
    assert [await queue.get(), queue.get_nowait(), await queue.get()] == [1, 2, 3]


async def test_queue_refused_entries_return_to_the_front() -> None:
    """A5, A6, A10: the exact remaining order, after one and after several are put back."""
    queue = filled(100, 500, 100)
    first, second = queue.get_nowait(), queue.get_nowait()
    queue.put_front(second)
    assert (first, contents(queue)) == (100, [500, 100])
    queue = filled(1, 2, 3, 4)
    taken = [queue.get_nowait() for _ in range(3)]
    for item in reversed(taken):
        queue.put_front(item)
    assert contents(queue) == [1, 2, 3, 4]


@pytest.mark.parametrize("refusals", [0, 1, 5])
async def test_queue_put_front_does_not_count_as_new_work(refusals: int) -> None:
    """A10: put, get, refuse, task_done, then join returns."""
    queue = filled(1)
    for _ in range(refusals):
        queue.put_front(queue.get_nowait())
        assert queue.statistics().unfinished == 1
    joining = asyncio.ensure_future(queue.join())
    await settle()
    assert not joining.done()
    queue.get_nowait()
    queue.task_done()
    await settle()
    assert joining.done()
    assert queue.statistics() == (0, 0, 0)


async def test_queue_join_waits_for_every_entry() -> None:
    """A10: an entry that is back in the queue is not done."""
    queue = filled(1, 2)
    joining = asyncio.ensure_future(queue.join())
    queue.get_nowait()
    queue.task_done()
    queue.put_front(queue.get_nowait())
    await settle()
    assert not joining.done()
    queue.get_nowait()
    queue.task_done()
    await joining
    queue.put_nowait(3)
    again = asyncio.ensure_future(queue.join())
    await settle()
    assert not again.done()
    again.cancel()


async def test_queue_join_of_an_empty_queue_returns_at_once() -> None:
    await filled().join()


@pytest.mark.parametrize("misuse", ["put_front", "task_done"])
async def test_queue_misuse_is_an_error(misuse: str) -> None:
    """A10: an entry that was never taken cannot be returned, nor marked done."""
    call: dict[str, Callable[[FifoQueue[int]], None]] = {
        "put_front": lambda queue: queue.put_front(1),
        "task_done": lambda queue: queue.task_done(),
    }
    with pytest.raises(ValueError, match=misuse):
        call[misuse](filled())
    queue = filled(1)
    queue.get_nowait()
    queue.task_done()
    with pytest.raises(ValueError, match=misuse):
        call[misuse](queue)
    with pytest.raises(ValueError, match="none was taken"):
        filled(1).put_front(2)


@pytest.mark.parametrize("back", [False, True])
async def test_queue_wakes_a_waiting_consumer(back: bool) -> None:
    """A10: an entry that is put back wakes a blocked consumer just as a new one does."""
    queue = filled(1)
    if back:
        queue.get_nowait()
    else:
        queue.get_nowait()
        queue.task_done()
    getting = asyncio.ensure_future(queue.get())
    await settle()
    assert queue.statistics().waiting_getters == 1
    if back:
        queue.put_front(1)
    else:
        queue.put_nowait(1)
    async with patience():
        assert await getting == 1


async def test_queue_serves_consumers_in_their_order() -> None:
    """E15: who waited first is served first."""
    queue = filled()
    served: list[tuple[str, int]] = []

    async def consume(name: str) -> None:
        served.append((name, await queue.get()))

    async with patience(), asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(consume(name))
            await settle()
        for item in (1, 2, 3):
            queue.put_nowait(item)
    assert served == [("a", 1), ("b", 2), ("c", 3)]


async def test_queue_consumer_that_is_overtaken_waits_again() -> None:
    """`get_nowait` may take an entry whose consumer is awake but has not run."""
    queue = filled()
    getting = asyncio.ensure_future(queue.get())
    await settle()
    queue.put_nowait(1)
    assert queue.get_nowait() == 1
    await settle()
    assert not getting.done()
    queue.put_nowait(2)
    assert await getting == 2


async def test_queue_cancelled_consumer_loses_nothing() -> None:
    """A9, A10: cancelled after it was woken and before it ran, it passes the wake-up on."""
    queue = filled()
    first = asyncio.ensure_future(queue.get())
    second = asyncio.ensure_future(queue.get())
    await settle()
    queue.put_nowait(1)
    first.cancel()
    async with patience():
        assert await second == 1
    assert first.cancelled()
    assert queue.statistics() == (0, 0, 1)


async def test_queue_consumer_cancelled_while_waiting_is_forgotten() -> None:
    queue = filled()
    getting = asyncio.ensure_future(queue.get())
    await settle()
    getting.cancel()
    await settle()
    assert queue.statistics().waiting_getters == 0
    queue.put_nowait(1)
    assert queue.get_nowait() == 1


@pytest.mark.parametrize("others", [0, 1])
async def test_queue_put_right_after_a_cancellation_loses_nothing(others: int) -> None:
    """A9, A10: the cancelled consumer has not run yet when the entry comes; it ends as cancelled, quietly."""
    queue = filled()
    first = asyncio.ensure_future(queue.get())
    rest = [asyncio.ensure_future(queue.get()) for _ in range(others)]
    await settle()
    first.cancel()
    queue.put_nowait(1)
    await settle()
    assert first.cancelled()
    assert first.done()
    taken = [task.result() for task in rest] if rest else [queue.get_nowait()]
    assert taken == [1]


async def test_queue_wait_with_a_deadline_takes_nothing_when_it_passes() -> None:
    """F2: `asyncio.timeout` around `get` is safe."""
    queue = filled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await queue.get()
    queue.put_nowait(1)
    assert queue.peek() == 1


async def test_queue_peek_takes_nothing() -> None:
    queue = filled(1, 2)
    assert (queue.peek(), queue.qsize()) == (1, 2)
    queue.get_nowait()
    assert queue.peek() == 2
    queue.put_front(1)
    assert queue.peek() == 1


async def test_queue_empty_raises() -> None:
    for call in (filled().peek, filled().get_nowait):
        with pytest.raises(asyncio.QueueEmpty):
            call()


async def test_queue_many_consumers_and_refusals_lose_nothing() -> None:
    """A9, A10: every entry is done once, however consumers refuse and are cancelled."""
    queue = filled()
    done: list[int] = []
    refused: dict[int, int] = {}

    async def consume() -> None:
        while True:
            item = await queue.get()
            if refused.setdefault(item, 0) < item % 3:
                refused[item] += 1
                queue.put_front(item)
                await asyncio.sleep(0)
                continue
            await asyncio.sleep(0)
            done.append(item)
            queue.task_done()

    consumers = [asyncio.ensure_future(consume()) for _ in range(4)]
    for item in range(60):
        queue.put_nowait(item)
        if item % 7 == 0:
            waiting = asyncio.ensure_future(queue.get())
            await asyncio.sleep(0)
            if not waiting.cancel():
                queue.put_front(waiting.result())
        await asyncio.sleep(0)
    async with patience():
        await queue.join()
    for consumer in consumers:
        consumer.cancel()
    assert sorted(done) == list(range(60))
