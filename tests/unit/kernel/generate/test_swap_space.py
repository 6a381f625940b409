"""Host memory of swapped requests, call by call: blocks kept, copied and freed."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import make_limits, request_state, words
from vsched.kernel.generate.blocks import BlockPool, SwapSpace
from vsched.kernel.request import RequestState
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicyFaults
from vsched.testing import make_request
from vsched_policies.eviction import Lru

BLOCK = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(32, GuardedOrder(Lru(), PolicyFaults()))


def space(places: int) -> SwapSpace:
    return SwapSpace(make_limits(block_size=BLOCK, swap_blocks=places))


def running(number: int, pool: BlockPool, blocks: int) -> RequestState:
    """A request of this number of blocks, whose last token is not computed."""
    state = request_state(make_request(f"r{number}", words(BLOCK * blocks)), number)
    state.blocks = pool.take(blocks)
    return state


def pairs(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def test_a_request_is_kept_if_its_own_blocks_just_fit(pool: BlockPool) -> None:
    """Of four blocks, another request holds the first."""
    one = running(1, pool, 4)
    pool.hold(one.blocks[:1])
    assert space(2).keep(one, 15, pool) is False
    swap = space(3)
    assert swap.keep(one, 15, pool) is True
    assert (len(swap), swap.free, swap.pending) == (1, 0, True)
    copies = swap.take_copies()
    assert [block for block, _ in pairs(copies.out)] == one.blocks[1:]
    assert sorted(place for _, place in pairs(copies.out)) == [0, 1, 2]


def test_places_that_a_decision_reads_are_not_written_by_it(pool: BlockPool) -> None:
    """A request joins with its blocks, and the next one takes the slot of another: ranks copy out first."""
    swap, back, victim = space(3), running(1, pool, 2), running(2, pool, 2)
    assert swap.keep(back, 7, pool)
    swap.take_copies()
    assert swap.swap_in(back, pool.take(2), cached=0, computed=7) == 2
    assert swap.keep(victim, 7, pool) is False, "one place is free, the others are read"
    copies = swap.take_copies()
    assert (len(copies.back), copies.out, swap.free) == (4, [], 3)
    assert swap.keep(victim, 7, pool)
