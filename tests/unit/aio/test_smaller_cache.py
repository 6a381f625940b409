"""A restarted group has a smaller KV cache if something else took its memory, or a step ran out of it."""

from __future__ import annotations

import logging

import pytest

from tests.unit.aio.ranks import TWO_GENERATE, ShellHarness, state_of
from tests.unit.aio.test_sizing_together import (
    ROW_BYTES,
    Group,
    OneDevice,
    groups_on,
    lead_all,
    sizing_of,
)
from vsched.aio.kv_sizing import EIGHTHS_MIN, Sizing
from vsched.errors import DeviceOutOfMemory
from vsched.failures import ErrorKind
from vsched.wire import RankFailed

MIB = 1 << 20
NAME = "generate-1"


async def led_again(sizing: Sizing, before: Group) -> Group:
    """Return the group after a loss and a restart."""
    before.die()
    again = Group(before.device, ROW_BYTES[1])
    await sizing.lead(NAME, again)  # type: ignore[arg-type]
    return again


async def test_group_comes_back_with_what_fits_and_with_all_of_it_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The steps of a smaller size are proved again; those of the whole size were proved at the first start."""
    device, sizing = OneDevice(1024 * MIB), sizing_of()
    groups = groups_on(device)
    await lead_all(sizing, groups)
    group, (blocks,) = groups[NAME], groups[NAME].accepted
    taken = group.votes[-1].memory.kv_bytes // 3
    device.total_bytes -= taken
    with caplog.at_level(logging.WARNING):
        group = await led_again(sizing, group)
    assert blocks * EIGHTHS_MIN // 8 <= group.accepted[0] < blocks
    assert [order.profile for order in group.orders] == [False] + [True] * (len(group.orders) - 1)
    assert f"{group.accepted[0] * 16} tokens of KV cache instead of {blocks * 16}: " in caplog.text
    device.total_bytes += taken
    group = await led_again(sizing, group)
    assert group.accepted == [blocks]
    assert [order.profile for order in group.orders] == [False]


async def test_each_step_that_runs_out_of_memory_costs_an_eighth_down_to_a_half() -> None:
    sizing = sizing_of()
    groups = groups_on(OneDevice(1024 * MIB))
    await lead_all(sizing, groups)
    group, (blocks,) = groups[NAME], groups[NAME].accepted
    for eighths in (7, 6, 5, 4, 4):
        sizing.ran_out([NAME])
        group = await led_again(sizing, group)
        assert group.accepted == [blocks * eighths // 8]


async def test_group_without_memory_for_half_of_its_cache_does_not_start() -> None:
    device, sizing = OneDevice(1024 * MIB), sizing_of()
    groups = groups_on(device)
    await lead_all(sizing, groups)
    device.total_bytes -= groups[NAME].votes[-1].memory.kv_bytes
    with pytest.raises(DeviceOutOfMemory, match=r"had before it was lost.*what is free on the"):
        await led_again(sizing, groups[NAME])


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_kernel_uses_the_blocks_that_a_group_came_back_with(
    played: ShellHarness, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = played.ranks
    await played.stop()
    ranks.blocks = 10_000
    await played.start(TWO_GENERATE)
    ranks.blocks = 9_000
    ranks.say("generate-1", RankFailed(ErrorKind.OUT_OF_MEMORY, "DeviceOutOfMemory", "no room"))
    await ranks.until(lambda: state_of(played, "generate-1") == "up" and played.shell.healthy)
    groups = played.shell.statistics()["generate"]["groups"]
    assert [groups[f"generate-{number}"]["blocks_total"] for number in (0, 1)] == [10_000, 9_000]
    assert played.shell.groups["generate-1"].worker_group.restarts == 1
    assert "generate-1" in caplog.text
    assert "after a step ran out of memory" in caplog.text
