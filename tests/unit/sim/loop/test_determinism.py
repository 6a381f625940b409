"""The same code gives the same run, task for task; `tests/sim/test_determinism.py` compares processes."""

from __future__ import annotations

import asyncio
import contextlib

from tests.unit.sim.virtual import play


def test_group_cancels_its_tasks_in_the_order_they_were_made() -> None:
    """On other loops the order is that of addresses in memory; objects allocated in between would change it."""

    async def main() -> list[int]:
        order: list[int] = []
        junk: list[list[object]] = []

        async def wait(index: int) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                order.append(index)
                raise

        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for index in range(40):
                    group.create_task(wait(index))
                    junk.append([object() for _ in range(index * 7 % 13)])
                    del junk[: index % 3]
                await asyncio.sleep(1)
                raise ValueError
        return order

    orders = [play(main()) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(40))


def test_tasks_are_named_by_their_number_on_the_loop() -> None:
    """Not by their number in the process, which depends on earlier runs."""

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(asyncio.sleep(0)), loop.create_task(asyncio.sleep(0), name="own")]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert play(main()) == play(main()) == ["Task-2", "own"]
