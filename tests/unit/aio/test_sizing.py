"""The way of a generate group to its KV cache: whom it waits for, who votes, and what a restart builds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from tests.unit.rank.crews import KV_TOKENS, LOAD, kv_sizing
from vsched.errors import DeviceOutOfMemory, MemoryLeak
from vsched.policy import RankMemory, Reservation
from vsched.wire import Reserved, Sized, SizeKv
from vsched_policies.memory import AutoProfile

MIB = 1 << 20
LOADED = RankMemory(
    rank=0,
    pool="cpu limit of 1",
    total_bytes=100 * MIB,
    available_bytes=90 * MIB,
    reserved_bytes=10 * MIB,
    weights_bytes=10 * MIB,
)


class Roll:
    """Answers that are there, or never come."""

    def __init__(self, answers: Sequence[object] | None) -> None:
        self.complete: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if answers is not None:
            self.complete.set_result(list(answers))


class Group:
    """A leader whose ranks answer orders with what a function makes of them."""

    def __init__(
        self,
        answer: Callable[[SizeKv], list[Sized]] = lambda order: [Sized("fits", "", LOADED)],
        *,
        ranks: Sequence[RankMemory] = (LOADED,),
        growth_bytes: int | None = 0,
    ) -> None:
        self.loaded = Roll(ranks)
        reports = [
            Reserved(
                LOADED,
                Reservation(rank=0, pool=LOADED.pool, growth_bytes=growth_bytes or 0, held=False),
            )
        ]
        self.reserved = Roll(None if growth_bytes is None else reports)
        self.orders: list[SizeKv] = []
        self.accepted: list[int] = []
        self._answer = answer

    async def size(self, order: SizeKv) -> list[Sized]:
        self.orders.append(order)
        return self._answer(order)

    def accept(self, blocks: int) -> None:
        self.accepted.append(blocks)


def measured(order: SizeKv, *, activations_bytes: int) -> Sized:
    kv_bytes = order.tokens * 8
    peak_bytes = LOADED.reserved_bytes + kv_bytes + order.canary_bytes + activations_bytes
    memory = msgspec.structs.replace(LOADED, peak_bytes=peak_bytes, kv_bytes=kv_bytes)
    return Sized("fits", "", memory)


async def test_sizing_waits_for_every_encoder_and_never_reads_a_missing_reservation_as_none() -> (
    None
):
    """B8: the policy is not asked before the encode group has told what it reserves."""
    sizing = kv_sizing([["encode"], ["generate"]])
    generate = Group()
    leading = asyncio.ensure_future(sizing.lead(generate))  # type: ignore[arg-type]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sizing.missing() == ["encode rank 0"]
    assert generate.orders == []
    await sizing.publish(Group(growth_bytes=5))  # type: ignore[arg-type]
    await leading
    assert sizing.missing() == []
    assert generate.accepted == [KV_TOKENS // LOAD.block_size]


async def test_sizing_of_a_restarted_group_builds_what_was_accepted_without_stress() -> None:
    """F6: the kernel goes on with the blocks that it knows; nothing is measured again."""
    sizing = kv_sizing([["generate"]], policy=AutoProfile(canary_bytes=MIB))
    first = Group(lambda order: [measured(order, activations_bytes=MIB)])
    await sizing.lead(first)  # type: ignore[arg-type]
    assert [order.probe for order in first.orders] == [True, False]
    again = Group()
    await sizing.lead(again)  # type: ignore[arg-type]
    assert again.orders == [SizeKv(first.orders[-1].tokens, stress=False, canary_bytes=0)]
    assert again.accepted == first.accepted


async def test_sizing_counts_the_larger_of_two_stages_that_take_turns_in_one_process() -> None:
    """C4, B7: an encoder in the same process needs its memory while the language model does not."""
    tokens = {}
    for activations_mib, growth_mib in ((1, 0), (1, 30), (30, 1), (30, 30)):
        sizing = kv_sizing([["encode", "generate"]], policy=AutoProfile(canary_bytes=MIB))
        await sizing.publish(Group(growth_bytes=growth_mib * MIB))  # type: ignore[arg-type]
        used = activations_mib * MIB
        generate = Group(
            lambda order, used=used: [measured(order, activations_bytes=used)]  # type: ignore[misc]
        )
        await sizing.lead(generate)  # type: ignore[arg-type]
        tokens[activations_mib, growth_mib] = generate.accepted[0]
    assert tokens[1, 30] == tokens[30, 1] == tokens[30, 30] < tokens[1, 0]


async def test_sizing_of_processes_apart_on_one_memory_counts_both() -> None:
    """C4: what an encoder of its own does not hold now, it will need at the same time."""
    tokens = []
    for growth_mib in (0, 30):
        sizing = kv_sizing([["encode"], ["generate"]], policy=AutoProfile(canary_bytes=MIB))
        await sizing.publish(Group(growth_bytes=growth_mib * MIB))  # type: ignore[arg-type]
        generate = Group(lambda order: [measured(order, activations_bytes=MIB)])
        await sizing.lead(generate)  # type: ignore[arg-type]
        tokens.append(generate.accepted[0] * LOAD.block_size)
    assert tokens[0] - tokens[1] == pytest.approx(0.95 * 30 * MIB / 8, abs=LOAD.block_size)


@pytest.mark.parametrize(
    ("outcome", "error"), [("out_of_memory", DeviceOutOfMemory), ("leak", MemoryLeak)]
)
async def test_sizing_that_fails_says_why_and_keeps_the_ledger(
    outcome: str, error: type[Exception]
) -> None:
    """C16, C17: the vote of one rank ends it, by its type, and the table is there to look at."""
    sizing = kv_sizing([["generate"]])
    generate = Group(lambda order: [Sized(outcome, "no room", LOADED)])  # type: ignore[arg-type]
    with pytest.raises(error, match="no room"):
        await sizing.lead(generate)  # type: ignore[arg-type]
    assert generate.accepted == []
    assert sizing.ledger is not None
    assert sizing.ledger.totals == {LOADED.pool: LOADED.total_bytes}
