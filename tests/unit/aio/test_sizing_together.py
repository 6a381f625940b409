"""Groups that share a memory are sized together: the rank side of several groups over one simulated device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tests.unit.aio.test_sizing import Roll, turns
from tests.unit.worker.device_fakes import KV_BYTES, LOAD, MIB, MeasuredGenerator, model_info
from vsched.aio.kv_sizing import EIGHTHS_MIN, Sizing
from vsched.errors import DeviceOutOfMemory, MemoryLeak
from vsched.memory import LedgerLine, Sized
from vsched.policy import MemoryPolicy, MemoryView
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.wire import Loaded, SizeKv
from vsched.worker.sizing import KvBuilder
from vsched_policies.memory import AutoProfile, Pinned

NAMES = ("generate-0", "generate-1", "generate-2")
ROW_BYTES = (64 << 10, 256 << 10, 512 << 10)
HEADROOM = 16 * MIB
AUTO = AutoProfile(headroom_bytes=HEADROOM)


class OneDevice:
    """A device on which several processes allocate."""

    def __init__(self, total_bytes: int, *, pool: str = "device") -> None:
        self.total_bytes, self.pool = total_bytes, pool
        self.memories: list[SharedMemory] = []


class SharedMemory(SimulatedMemory):
    """The device as one process sees it."""

    def __init__(self, device: OneDevice) -> None:
        super().__init__(device.total_bytes, pool=device.pool)
        self._device = device
        device.memories.append(self)

    def available(self) -> int:
        held_bytes = sum(memory.reserved() for memory in self._device.memories)
        return self._device.total_bytes - held_bytes


class Group:
    """A leader with one rank, which carries orders out as a rank does."""

    def __init__(self, device: OneDevice, row_bytes: int) -> None:
        self.device = device
        self.memory = SharedMemory(device)
        self.worker = MeasuredGenerator(self.memory, row_bytes=row_bytes)
        self.sizing = KvBuilder(self.worker, model_info(), LOAD, collect=lambda: None)
        self.loaded = Roll([Loaded(self.sizing.measure())])
        self.orders: list[SizeKv] = []
        self.votes: list[Sized] = []
        self.accepted: list[int] = []

    async def size(self, order: SizeKv) -> list[Sized]:
        self.orders.append(order)
        await turns(3)  # others could begin meanwhile
        self.votes.append(self.sizing.carry_out(order))
        return self.votes[-1:]

    def accept(self, blocks: int) -> None:
        self.accepted.append(blocks)

    def die(self) -> None:
        self.device.memories.remove(self.memory)


def sizing_of(
    names: Sequence[str] = NAMES, policy: MemoryPolicy = AUTO, **changes: object
) -> Sizing:
    view = MemoryView(
        bytes_per_token=KV_BYTES, block_size=16, context_tokens=128, batch_tokens=40, slots=4
    )
    changes.setdefault("host_free", lambda: 1 << 60)
    return Sizing(policy, view, encode={}, generate=dict.fromkeys(names, ""), **changes)  # type: ignore[arg-type]


async def lead_all(sizing: Sizing, groups: dict[str, Group], order: Sequence[str] = ()) -> None:
    leading = []
    for name in order or groups:
        leading.append(asyncio.ensure_future(sizing.lead(name, groups[name])))  # type: ignore[arg-type]
        await turns()
    try:
        await asyncio.gather(*leading)
    finally:
        for one in leading:
            one.cancel()
        await asyncio.gather(*leading, return_exceptions=True)


def groups_on(device: OneDevice) -> dict[str, Group]:
    return {name: Group(device, size) for name, size in zip(NAMES, ROW_BYTES, strict=True)}


async def sized(order: Sequence[str] = ()) -> tuple[OneDevice, Sizing, dict[str, Group]]:
    device, sizing = OneDevice(1024 * MIB), sizing_of()
    groups = groups_on(device)
    await lead_all(sizing, groups, order)
    return device, sizing, groups


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
async def test_sizing_together_does_not_depend_on_the_order_of_starts(order: Sequence[str]) -> None:
    """All groups get the same in each order of starting, and the largest steps of all fit at once."""
    _, sizing, groups = await sized(order)
    sizes = {one.accepted[0] for one in groups.values()}
    assert sizes == {4519}
    peaks = [one.votes[-1].memory.peak_bytes for one in groups.values()]
    assert 0.9 * 1024 * MIB < sum(peaks) <= 1024 * MIB
    ledger = sizing.ledger
    assert ledger is not None
    lines = {(line.owner, line.line): line.bytes for line in ledger.of_pool("device")}
    for name in NAMES:
        assert lines[f"{name} rank 0", "kv"] == 4519 * 16 * KV_BYTES
        assert lines[f"{name} rank 0", "headroom"] == HEADROOM
    assert lines["others", "peers"] == 0, "the groups count as peers"
    assert [phase.owner for phase in ledger.phases] == ["generate-0 to generate-2"] * 2


async def test_sizing_together_restarts_keep_to_their_shares() -> None:
    """Twice in a row, while the memory of the lost group is free: no more, no less, and no profiling."""
    device, sizing, groups = await sized()
    received = [len(one.orders) for one in groups.values()]
    for name in ("generate-1", "generate-1", "generate-0"):
        groups[name].die()
        again = Group(device, ROW_BYTES[0])
        await sizing.lead(name, again)  # type: ignore[arg-type]
        assert again.accepted == groups[name].accepted
        assert again.orders == [SizeKv(again.accepted[0] * 16, profile=False, headroom_bytes=0)]
        again.orders = groups[name].orders
        groups[name] = again
    assert [len(one.orders) for one in groups.values()] == received


async def test_sizing_together_that_does_not_fit_names_all_and_the_remedy() -> None:
    device = OneDevice(144 * MIB)
    groups = groups_on(device)
    sizing = sizing_of(policy=Pinned(tokens=8192, headroom_bytes=HEADROOM))
    with pytest.raises(DeviceOutOfMemory) as caught:
        await lead_all(sizing, groups)
    message = str(caught.value)
    assert all(f"{name} rank 0 weights 8.0 MiB" in message for name in NAMES)
    assert "device: 144.0 MiB = " in message
    for words in ("value 8192 tokens", "limit ", "Remedy: ", "fewer generate.replicas need less"):
        assert words in message
    assert not any(one.accepted for one in groups.values())
    assert sizing.ledger is not None, "it can still be read"
    assert sizing.ledger.totals == {"device": 144 * MIB}


async def test_sizing_together_drops_all_caches_before_one_is_built_again() -> None:
    """On a retry, caches of the last attempt are dropped first: one failure costs one step of shrinking."""
    device = OneDevice(1024 * MIB)
    groups = groups_on(device)
    last = groups["generate-2"].memory
    carry_out = groups["generate-2"].sizing.carry_out

    def failing_once(order: SizeKv) -> Sized:
        if order.tokens and len(groups["generate-2"].votes) == 2:
            last.fail_at(2)
        return carry_out(order)

    groups["generate-2"].sizing.carry_out = failing_once  # type: ignore[method-assign]
    await lead_all(sizing_of(), groups)
    tokens = [[order.tokens // 16 for order in one.orders] for one in groups.values()]
    assert tokens == [[512, 0, 4519, 0, 4293]] * 3
    assert [vote.outcome for vote in groups["generate-2"].votes].count("out_of_memory") == 1


async def test_sizing_together_finds_a_leak_of_any_group() -> None:
    """The leak shows when the caches are dropped, and nothing is built on top of it."""
    groups = groups_on(OneDevice(1024 * MIB))
    groups["generate-1"].worker.leaks = True
    with pytest.raises(MemoryLeak, match="generate-1 rank 0: the KV cache was .* value 0, "):
        await lead_all(sizing_of(), groups)
    assert [order.tokens for order in groups["generate-0"].orders] == [8192, 0]


def groups_on_a_host() -> dict[str, Group]:
    """Groups with limits of their own, in the memory of one host."""
    devices = [OneDevice(1024 * MIB, pool=f"cpu limit of {number}") for number in (1, 2)]
    return {name: Group(device, ROW_BYTES[0]) for name, device in zip(NAMES, devices, strict=False)}


async def test_sizing_together_shares_out_the_memory_of_a_host() -> None:
    """If the limits of ranks exceed the memory of their host together, the free memory there bounds them."""
    groups = groups_on_a_host()
    engine = [LedgerLine("host", "engine", "arena", 100 * MIB)]
    sizing = sizing_of([*groups], more=engine, host_free=lambda: 900 * MIB)
    await lead_all(sizing, groups)
    kv_bytes = [one.accepted[0] * 16 * KV_BYTES for one in groups.values()]
    assert kv_bytes[0] == kv_bytes[1]
    assert 0.9 * 400 * MIB < kv_bytes[0] + HEADROOM <= 400 * MIB
    held_bytes = sum(one.votes[-1].memory.peak_bytes for one in groups.values())
    loaded_bytes = sum(
        one.loaded.complete.result()[0].memory.reserved_bytes for one in groups.values()
    )
    assert held_bytes - loaded_bytes <= 800 * MIB


async def test_sizing_together_on_a_host_that_is_too_small_names_the_groups_that_share_it() -> None:
    groups = groups_on_a_host()
    with pytest.raises(DeviceOutOfMemory) as caught:
        await lead_all(sizing_of([*groups], host_free=lambda: 30 * MIB), groups)
    message = str(caught.value)
    assert "The host has 30.0 MiB free" in message
    assert (
        "generate-0 rank 0, generate-1 rank 0 may take 15.0 MiB each. Lower arena.pixel" in message
    )


# --- a restarted group has a smaller KV cache if something else took its memory, or a step ran out of it ---

NAME = "generate-1"


async def led_again(sizing: Sizing, before: Group) -> Group:
    """Return the group after a loss and a restart."""
    before.die()
    again = Group(before.device, ROW_BYTES[1])
    await sizing.lead(NAME, again)  # type: ignore[arg-type]
    return again


async def test_group_comes_back_with_the_size_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    """A later full size was proved at the first start; a smaller size is proved again."""
    device, sizing, groups = await sized()
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
    _, sizing, groups = await sized()
    group, (blocks,) = groups[NAME], groups[NAME].accepted
    for eighths in (7, 6, 5, 4, 4):
        sizing.ran_out([NAME])
        group = await led_again(sizing, group)
        assert group.accepted == [blocks * eighths // 8]


async def test_group_without_memory_for_half_of_its_cache_does_not_start() -> None:
    device, sizing, groups = await sized()
    device.total_bytes -= groups[NAME].votes[-1].memory.kv_bytes
    with pytest.raises(DeviceOutOfMemory, match=r"had before it was lost.*what is free on the"):
        await led_again(sizing, groups[NAME])
