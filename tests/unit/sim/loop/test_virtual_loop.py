from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.sim.virtual import current, play
from vsched.sim.loop import _CANCELLED_MIN, TASKS_SHOWN_MAX, VirtualDeadlock, VirtualLoop

DAY_S = 86_400.0


async def test_loop_of_unmarked_tests_is_the_usual_one() -> None:
    """The plug-in does not change tests without its marker."""
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)


@pytest.mark.sim
async def test_loop_jumps_to_the_next_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current()._virtual, "poll", lambda _: pytest.fail("it waits for real"))
    await asyncio.sleep(DAY_S)
    assert current().now_ns() == 86_400 * 10**9
    assert current().time() == DAY_S
    assert current().statistics().jumps == 1


@pytest.mark.slow
@pytest.mark.sim
async def test_loop_idles_a_day_of_heartbeats_with_a_jump_for_each() -> None:
    """24 hours of two timers, one every 5 s and one every 30 s that is reset each time; cancelled ones are removed."""
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
    await asyncio.sleep(DAY_S)
    assert beats == loop.statistics().jumps == 17_280
    assert timers_max <= _CANCELLED_MIN + 5, "cancelled timers pile up"


@pytest.mark.sim
async def test_loop_fires_equal_deadlines_in_the_order_they_were_set() -> None:
    """Among more timers than asyncio's heap keeps in order by chance, and with other deadlines in between."""
    loop = current()
    fired: list[int] = []
    for index in range(200):
        loop.call_at(1.0 if index % 3 else 2.0, fired.append, index)
    await asyncio.sleep(5)
    first = [index for index in range(200) if index % 3]
    assert fired == first + [index for index in range(200) if index % 3 == 0]


@pytest.mark.sim
async def test_loop_takes_deadlines_that_float_apart_for_equal() -> None:
    """0.1 + 0.2 and 0.3 are the same nanosecond, so the order of setting counts."""
    fired: list[str] = []
    current().call_at(0.1 + 0.2, fired.append, "first")
    current().call_at(0.3, fired.append, "second")
    await asyncio.sleep(1)
    assert fired == ["first", "second"]


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
async def test_loop_fires_timers_far_in_the_future() -> None:
    """Even if floats are coarser than a nanosecond."""
    await asyncio.sleep(3e7)
    await asyncio.sleep(1e-9)
    await asyncio.sleep(0.001)
    assert current().time() == pytest.approx(3e7 + 0.001, abs=1e-6)


@pytest.mark.sim
async def test_loop_runs_nothing_that_was_cancelled() -> None:
    loop = current()
    fired: list[int] = []
    timers = [loop.call_later(1 + index, fired.append, index) for index in range(1000)]
    for index, timer in enumerate(timers):
        if index % 100:
            timer.cancel()
    await asyncio.sleep(2000)
    assert fired == list(range(0, 1000, 100))


@pytest.mark.sim
async def test_loop_times_out_what_takes_too_long() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(9):
            await asyncio.sleep(10)
    assert current().time() == 9
    async with asyncio.timeout(9):
        await asyncio.sleep(1)


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


# --- hangs ---


def test_loop_reports_a_hang_with_what_every_task_waits_for() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2)
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


def test_loop_names_the_task_that_a_task_waits_for() -> None:
    async def main() -> None:
        sleeper = asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="sleeper")
        await sleeper

    with pytest.raises(VirtualDeadlock, match="Task-1 waits for sleeper in"):
        play(main())


def test_loop_reports_a_hang_of_many_tasks_briefly() -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(TASKS_SHOWN_MAX + 9)))

    with pytest.raises(VirtualDeadlock, match="and 10 more"):
        play(main())


def test_loop_does_not_take_a_cancelled_timer_for_hope() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="at 0.0"):
        play(main())


# --- ties ---


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


def test_ties_run_first_come_first_served_without_a_seed() -> None:
    assert play(race()) == (list(range(6)), list(range(6)))


def test_ties_run_in_an_order_of_the_seed() -> None:
    orders = [tuple(play(race(), tie_seed=seed)[0]) for seed in range(20)]
    assert orders == [tuple(play(race(), tie_seed=seed)[0]) for seed in range(20)]
    assert len(set(orders)) > 15
    assert all(sorted(order) == list(range(6)) for order in orders)


def test_ties_leave_plain_callbacks_in_order() -> None:
    """`call_soon` promises first in, first out; only orders that asyncio leaves open are permuted."""
    assert all(play(race(), tie_seed=seed)[1] == list(range(6)) for seed in range(20))


def test_ties_between_tasks_reach_every_order() -> None:
    orders = {tuple(play(race(3), tie_seed=seed)[0]) for seed in range(100)}
    assert len(orders) == 6


def test_ties_never_reorder_what_is_due_at_different_times() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for index in random.Random(1).sample(range(50), 50):
            asyncio.get_running_loop().call_at(index / 1000, order.append, index)
        await asyncio.sleep(1)
        return order

    assert all(play(main(), tie_seed=seed) == list(range(50)) for seed in range(10))


@pytest.mark.sim(seeds=[3])
async def test_ties_can_be_switched_while_the_loop_runs() -> None:
    loop = current()
    loop.permute_ties(None)
    assert (await race())[0] == list(range(6))
    loop.permute_ties(4)
    drawn = (await race())[0]
    loop.permute_ties(4)
    assert (await race())[0] == drawn != list(range(6))
