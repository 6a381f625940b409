"""The loop on a virtual clock: time, threads, and the same run for the same code; see also `tests/sim`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time

import pytest

from tests.patience import PATIENCE_S
from tests.unit.sim.virtual import current, play
from vsched.sim.loop import _CANCELLED_MIN, VirtualDeadlock, VirtualLoop

DAY_S = 86_400.0


@pytest.mark.sim
async def test_loop_jumps_to_the_next_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current()._virtual, "poll", lambda _: pytest.fail("it waits for real"))
    await asyncio.sleep(DAY_S)
    assert current().now_ns() == 86_400 * 10**9
    assert current().time() == DAY_S


@pytest.mark.sim
async def test_loop_idles_with_a_jump_for_each_heartbeat() -> None:
    """Two timers, one every 5 s and one every 30 s that is reset each time; cancelled ones are removed."""
    loop = current()
    beats = 0
    timers_max = 0
    deadline = loop.call_later(30, pytest.fail, "the deadline passed")

    def beat() -> None:
        nonlocal beats, deadline, timers_max
        beats += 1
        timers_max = max(timers_max, len(loop._timers))
        deadline.cancel()
        deadline = loop.call_later(30, pytest.fail, "the deadline passed")
        loop.call_later(5, beat)

    loop.call_later(5, beat)
    await asyncio.sleep(DAY_S / 10)
    assert beats == 1_728
    assert timers_max <= _CANCELLED_MIN + 5, "cancelled timers pile up"


@pytest.mark.sim
async def test_loop_fires_equal_deadlines_in_the_order_they_were_set() -> None:
    """Among more timers than asyncio's heap keeps in order by chance; 0.1 + 0.2 and 0.3 are one nanosecond."""
    loop = current()
    fired: list[int] = []
    loop.call_at(0.1 + 0.2, fired.append, -2)
    loop.call_at(0.3, fired.append, -1)
    for index in range(200):
        loop.call_at(1.0 if index % 3 else 2.0, fired.append, index)
    await asyncio.sleep(5)
    first = [index for index in range(200) if index % 3]
    assert fired == [-2, -1, *first, *range(0, 200, 3)]


@pytest.mark.sim
async def test_loop_ends_a_wait_that_floating_point_left_too_short() -> None:
    """`while time() < deadline: sleep(deadline - time())` must not set the same timer for ever."""
    loop = current()
    deadline_s, rounds = 0.1 + 0.2, 0
    while (left_s := deadline_s - loop.time()) > 0:
        await asyncio.sleep(left_s)
        rounds += 1
    assert rounds <= 2
    assert loop.now_ns() <= 300_000_001


@pytest.mark.sim
async def test_loop_carries_sockets_within_the_process() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(3))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"abc")
    async with asyncio.timeout(0.5):
        assert await reader.read() == b"abc"
    writer.close()
    server.close()
    assert current().time() == 0


def test_loop_reports_a_hang_with_the_wait_of_every_task() -> None:
    """A cancelled timer is no hope."""

    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2)
        asyncio.get_running_loop().call_later(1, print).cancel()
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_nothing(), name="idler")
            group.create_task(asyncio.Queue[int]().get(), name="reader")

    with pytest.raises(VirtualDeadlock) as caught:
        play(main())
    message = str(caught.value)
    assert message.startswith("at 2.000000000 s: nothing can run")
    assert "3 tasks wait" in message
    idler = message.index("idler waits in")
    assert idler < message.index("wait_for_nothing") < message.index("reader waits in")
    assert "queues.py" in message


async def race(tasks: int = 6) -> tuple[list[int], list[int]]:
    """Return the order in which tasks finished, and that of plain callbacks."""
    order: list[int] = []
    plain: list[int] = []

    async def run(index: int) -> None:
        await asyncio.sleep(1)
        order.append(index)

    for index in range(tasks):
        asyncio.get_running_loop().call_soon(plain.append, index)
    await asyncio.gather(*(run(index) for index in range(tasks)))
    return order, plain


def test_ties_run_first_come_first_served_or_in_an_order_of_the_seed() -> None:
    """`call_soon` promises first in, first out: plain callbacks keep their order."""
    assert play(race()) == (list(range(6)), list(range(6)))
    raced = [play(race(), tie_seed=seed) for seed in range(20)]
    assert raced == [play(race(), tie_seed=seed) for seed in range(20)]
    assert len({tuple(order) for order, _ in raced}) > 15
    for order, plain in raced:
        assert sorted(order) == plain == list(range(6))


def test_tasks_have_the_names_and_the_order_in_sets_of_their_numbers_on_the_loop() -> None:
    """A group cancels its tasks in the order of a set, which would be that of their addresses."""

    async def main() -> list[str]:
        cancelled: list[str] = []

        async def wait() -> None:
            task = asyncio.current_task()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(task.get_name() if task else "")

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(wait())
        return cancelled

    # Rests of earlier runs let tasks have other addresses.
    rests = [bytearray(size) for size in range(0, 100_000, 1000)]
    first = play(main())
    del rests[::3]
    assert play(main()) == first
    assert sorted(first) == sorted(f"Task-{number}" for number in range(2, 22))


def test_ties_never_reorder_events_due_at_different_times() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for index in random.Random(1).sample(range(50), 50):
            asyncio.get_running_loop().call_at(index / 1000, order.append, index)
        await asyncio.sleep(1)
        return order

    assert all(play(main(), tie_seed=seed) == list(range(50)) for seed in range(10))


@pytest.mark.sim
async def test_clock_stands_while_a_thread_works() -> None:
    """No timer fires meanwhile; a call that is cancelled at work goes on, and belongs to the same moment."""
    loop = current()
    ended: list[int] = []

    def work() -> None:
        loop.call_soon_threadsafe(call.cancel)
        time.sleep(0.01)
        ended.append(loop.now_ns())

    call = asyncio.ensure_future(asyncio.to_thread(work))
    async with asyncio.timeout(1e-6):
        await asyncio.wait([call])
    assert call.cancelled()
    await asyncio.sleep(1)
    assert ended == [0]


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

    calls = [asyncio.ensure_future(call(index)) for index in range(4)]
    await asyncio.sleep(0)
    order.append("loop")
    calls[2].cancel()  # before its turn: it never begins
    await asyncio.wait(calls)
    turns = [f"{what} {index}" for index in (0, 1, 3) for what in ("begin", "end", "heard")]
    assert order == ["loop", *turns]


@pytest.mark.sim
async def test_posts_of_a_thread_precede_its_result_and_wait_until_nothing_else_can_run() -> None:
    """However fast the thread is: anything that was ready before is done first."""
    loop = current()
    received: list[object] = []

    def work() -> str:
        for index in range(3):
            loop.call_soon_threadsafe(received.append, index)
        return "result"

    received.append(await asyncio.to_thread(work))
    assert received == [0, 1, 2, "result"]
    received.clear()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(received.append, "posted"))
    thread.start()
    thread.join()
    for _ in range(5):
        await asyncio.sleep(0)
        received.append("ready")
    await asyncio.sleep(1)
    assert received == ["ready"] * 5 + ["posted"]


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
