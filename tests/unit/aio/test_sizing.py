"""Sizing of the KV cache of a generate group: waits, votes, and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import pytest

from tests.unit.rank.worker_groups import KV_TOKENS, LOAD, make_sizing
from vsched.errors import DeviceOutOfMemory
from vsched.memory import Sized
from vsched.policy import RankMemory, Reservation
from vsched.wire import Loaded, SizeKv
from vsched_policies.memory import AutoProfile, Pinned

MIB = 1 << 20
TOGETHER = [["encode", "generate"]]
APART = [["encode"], ["generate"]]
TWO = [["encode-0"], ["encode-1"], ["generate-0"], ["generate-1"]]
LOADED = RankMemory(
    rank=0,
    pool="cpu",
    total_bytes=100 * MIB,
    available_bytes=90 * MIB,
    reserved_bytes=10 * MIB,
    weights_bytes=10 * MIB,
)


class Roll:
    """The reports of ranks that have loaded."""

    def __init__(self, reports: Sequence[Loaded]) -> None:
        self.complete: asyncio.Future[list[Loaded]] = asyncio.get_running_loop().create_future()
        self.complete.set_result(list(reports))


class Group:
    """A leader of one rank with this memory, whose steps take `activations_bytes`; `going` holds its votes back."""

    def __init__(
        self,
        memory: RankMemory = LOADED,
        *,
        activations_bytes: int = MIB,
        growth_bytes: int = 0,
        pauses: bool = False,
    ) -> None:
        reservation = Reservation(
            rank=0, pool=memory.pool, growth_bytes=growth_bytes, held=False, pauses=pauses
        )
        self.loaded = Roll([Loaded(memory, reservation)])
        self.orders: list[SizeKv] = []
        self.accepted: list[int] = []
        self.vote = Sized("fits", "", memory)
        self.going = asyncio.Event()
        self.going.set()
        self._loaded_bytes = memory.reserved_bytes + activations_bytes

    async def size(self, order: SizeKv) -> list[Sized]:
        self.orders.append(order)
        await self.going.wait()
        kv_bytes = order.tokens * 8
        peak_bytes = self._loaded_bytes + kv_bytes + order.headroom_bytes
        measured = {"kv_bytes": kv_bytes, "peak_bytes": peak_bytes}
        memory = msgspec.structs.replace(self.vote.memory, **measured)
        return [msgspec.structs.replace(self.vote, memory=memory)]

    def accept(self, blocks: int) -> None:
        self.accepted.append(blocks)


async def tokens_next_to(
    groups: list[list[str]],
    growth_mib: int = 0,
    *,
    activations_mib: int = 1,
    pauses: bool = False,
    host: str = "",
) -> int:
    """Return the size of the KV cache next to an encoder with this growth."""
    sizing = make_sizing(groups, policy=AutoProfile(headroom_bytes=MIB))
    encode = Group(growth_bytes=growth_mib * MIB, pauses=pauses)
    await sizing.publish("encode", encode, host)  # type: ignore[arg-type]
    generate = Group(activations_bytes=activations_mib * MIB)
    await sizing.lead("generate", generate)  # type: ignore[arg-type]
    return generate.accepted[0] * LOAD.block_size


async def test_sizing_counts_the_larger_of_two_stages_that_take_turns_in_one_process() -> None:
    """An encoder in the same process needs its memory while the language model does not."""
    none, *some = [
        await tokens_next_to(TOGETHER, growth, activations_mib=activations)
        for activations, growth in ((1, 0), (1, 30), (30, 1), (30, 30))
    ]
    assert some[0] == some[1] == some[2] < none


@pytest.mark.parametrize("apart", [True, False])
async def test_sizing_counts_both_stages_if_they_need_memory_at_once(*, apart: bool) -> None:
    """In processes apart, unless on another host, and if a batch of images pauses for the largest steps."""
    groups = APART if apart else TOGETHER
    without, with_both = [
        await tokens_next_to(groups, growth, activations_mib=30, pauses=not apart)
        for growth in (0, 30)
    ]
    assert without - with_both == pytest.approx(0.95 * 30 * MIB / 8, abs=LOAD.block_size)
    if apart:
        assert await tokens_next_to(APART, 30, activations_mib=30, host="far") == without


@pytest.mark.parametrize("pausing", [True, False])
async def test_sizing_proves_steps_next_to_a_batch_that_waits(*, pausing: bool) -> None:
    """Also for a size that was not measured; not if nothing pauses or nothing is proved."""
    sizing = make_sizing(TOGETHER, pausing=pausing)
    encode = Group(growth_bytes=30 * MIB, pauses=True)
    await sizing.publish("encode", encode)  # type: ignore[arg-type]
    first, again = Group(), Group()
    for generate in (first, again):
        await sizing.lead("generate", generate)  # type: ignore[arg-type]
    headroom_bytes = Pinned(tokens=KV_TOKENS).headroom_bytes
    assert [(one.profile, one.headroom_bytes) for one in (*first.orders, *again.orders)] == [
        (True, headroom_bytes + pausing * 30 * MIB),
        (False, 0),
    ]


@pytest.mark.parametrize(("growth_mib", "fits"), [(80, True), (90, False)])
async def test_sizing_leaves_room_for_the_encoder(growth_mib: int, *, fits: bool) -> None:
    """Ranks ran no batch next to the KV cache; a policy that takes too much fails, whatever the result of its steps."""
    sizing, generate = make_sizing(TOGETHER, policy=Pinned(tokens=MIB)), Group()
    await sizing.publish("encode", Group(growth_bytes=growth_mib * MIB))  # type: ignore[arg-type]
    words = "batch of images does not fit next to the KV"
    with nullcontext() if fits else pytest.raises(DeviceOutOfMemory, match=words):
        await sizing.lead("generate", generate)  # type: ignore[arg-type]
    assert generate.accepted == [MIB // LOAD.block_size] * fits


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_sizing_waits_for_the_encoders_of_all_groups() -> None:
    """One board for all encode groups; a restarted group publishes again."""
    sizing = make_sizing(TWO)
    generators = {name: Group() for name in ("generate-0", "generate-1")}
    leading = [
        asyncio.ensure_future(sizing.lead(name, group))  # type: ignore[arg-type]
        for name, group in generators.items()
    ]
    await sizing.publish("encode-1", Group())  # type: ignore[arg-type]
    await sizing.publish("encode-1", Group())  # type: ignore[arg-type]
    await turns()
    assert (
        "encode-0 rank 0 did not: value 1 of 2 reservations, limit all of them, within deadlines.ready_s. "
        "Remedy: look for the reason in the log of the encode group"
    ) in sizing.waited_for(["generate-0"])
    assert not any(group.orders for group in generators.values())
    await sizing.publish("encode-0", Group())  # type: ignore[arg-type]
    await asyncio.gather(*leading)
    accepted = [KV_TOKENS // LOAD.block_size]
    assert [group.accepted for group in generators.values()] == [accepted, accepted]


async def test_sizing_of_groups_apart_overlaps() -> None:
    """Groups on separate memories carry an order out at the same time."""
    sizing = make_sizing([["generate-0"], ["generate-1"]])
    groups = [Group(), Group(msgspec.structs.replace(LOADED, pool="cpu limit of 2"))]
    leading = []
    for number, group in enumerate(groups):
        group.going.clear()
        leading.append(asyncio.ensure_future(sizing.lead(f"generate-{number}", group)))  # type: ignore[arg-type]
    await turns()
    assert [len(group.orders) for group in groups] == [1, 1]
    for group in groups:
        group.going.set()
    await asyncio.gather(*leading)
    assert groups[0].accepted == groups[1].accepted != []


async def test_sizing_gives_all_groups_the_size_of_the_smallest() -> None:
    """The kernel uses the smallest. A group that comes back must have room for it again."""
    sizing = make_sizing([["generate-0"], ["generate-1"]], policy=AutoProfile(headroom_bytes=0))
    small = msgspec.structs.replace(LOADED, pool="small", total_bytes=60 * MIB)
    groups = [Group(), Group(msgspec.structs.replace(small, available_bytes=50 * MIB))]
    await asyncio.gather(*(sizing.lead(f"generate-{n}", one) for n, one in enumerate(groups)))  # type: ignore[arg-type]
    expected = 0.95 * (60 - 10 - 1) * MIB / 8 // LOAD.block_size
    assert [one.accepted for one in groups] == [[expected], [expected]]
    full = Group()
    full.vote = Sized("out_of_memory", "no room", LOADED)
    words = r"had before it was lost \(no room\): value \d+ tok"
    with pytest.raises(DeviceOutOfMemory, match=words):
        await sizing.lead("generate-1", full)  # type: ignore[arg-type]


async def test_sizing_keeps_the_reservation_of_an_encoder_from_its_first_start() -> None:
    """Its memory is named after the rank, not the process, and once after the host of its latest start."""
    sizing = make_sizing(APART)
    assert sizing.reserved_bytes("encode", 0) is None
    for number, growth_bytes, host in ((7, 5, "far"), (8, 50, "farther")):
        memory = msgspec.structs.replace(LOADED, pool=f"cpu limit of {number}")
        await sizing.publish("encode", Group(memory, growth_bytes=growth_bytes), host)  # type: ignore[arg-type]
        assert sizing.reserved_bytes("encode", 0) == 5
    await sizing.lead("generate", Group())  # type: ignore[arg-type]
    assert sizing.ledger is not None
    assert sorted(sizing.ledger.totals) == ["cpu", "farther: cpu limit of encode rank 0"]


async def test_sizing_names_the_group_that_has_not_loaded() -> None:
    sizing = make_sizing([["generate-0"], ["generate-1"]])
    leading = asyncio.ensure_future(sizing.lead("generate-0", Group()))  # type: ignore[arg-type]
    await turns()
    assert sizing.waited_for(["generate-0"]) == "generate-1 has not loaded"
    assert sizing.waited_for(["generate-1"]) == ""
    assert sizing.waited_for(["encode"]) == ""
    await sizing.lead("generate-1", Group())  # type: ignore[arg-type]
    await leading
