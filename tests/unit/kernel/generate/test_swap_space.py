"""Host memory of swapped requests, call by call: blocks kept, copied and freed."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.kernel.setups import make_limits, request_state, words
from vsched.kernel.decisions import SwapCopies
from vsched.kernel.generate.blocks import BlockPool, SwapSpace
from vsched.kernel.request import RequestState
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicyFaults
from vsched.testing import make_request
from vsched.types import SamplingParams
from vsched_policies.eviction import Lru

BLOCK = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(32, GuardedOrder(Lru(), PolicyFaults()))


def space(places: int) -> SwapSpace:
    return SwapSpace(make_limits(block_size=BLOCK, swap_blocks=places))


def running(
    number: int, pool: BlockPool, blocks: int, *, prompt_logprobs: int | None = None
) -> RequestState:
    """A request of this number of blocks, whose last token is not computed."""
    request = make_request(f"r{number}", words(BLOCK * blocks))
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = msgspec.structs.replace(request, sampling=sampling)
    state = request_state(request, number)
    state.blocks = pool.take(blocks)
    return state


def pairs(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def waits(swap: SwapSpace) -> bool:
    """Return True if the next decision has copies."""
    return swap.pending


def test_requests_without_computed_blocks_or_with_prompt_logprobs_keep_nothing(
    pool: BlockPool,
) -> None:
    swap = space(8)
    assert swap.keep(running(1, pool, 2), 0, pool) is False
    assert swap.keep(running(2, pool, 2, prompt_logprobs=1), 7, pool) is False
    assert (len(swap), swap.free, swap.pending) == (0, 8, False)


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


def test_copies_wait_for_the_next_decision_whatever_else_is_kept(pool: BlockPool) -> None:
    swap = space(4)
    assert swap.keep(running(1, pool, 2), 7, pool)
    shared = running(2, pool, 2)
    pool.hold(shared.blocks)
    assert swap.keep(shared, 7, pool)
    assert waits(swap)
    assert swap.swap_in(shared, pool.take(2), cached=2, computed=8) == 0
    assert waits(swap)
    assert len(swap.take_copies().out) == 4
    assert not waits(swap)
    assert swap.take_copies() == SwapCopies([], [])


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


def test_kept_blocks_end_at_the_first_gap_of_the_cache(pool: BlockPool) -> None:
    swap, one = space(8), running(1, pool, 4)
    pool.hold(one.blocks[:2])
    assert swap.reach(one, 1) == 4
    assert swap.keep(one, 14, pool)
    assert [swap.reach(one, cached) for cached in range(5)] == [0, 4, 14, 14, 16]
    assert swap.keep(running(2, pool, 1), 3, pool)
    assert swap.reach(running(3, pool, 1), 1) == 4


def test_a_token_is_left_to_compute(pool: BlockPool) -> None:
    swap, one = space(8), running(1, pool, 3)
    assert swap.keep(one, 12, pool)
    assert swap.reach(one, 0) == 11


def test_only_blocks_missing_in_the_cache_are_swapped_in(pool: BlockPool) -> None:
    swap, one = space(8), running(1, pool, 4)
    assert swap.keep(one, 15, pool)
    place = dict(pairs(swap.take_copies().out))
    blocks = pool.take(4)
    assert swap.swap_in(one, blocks, cached=1, computed=15) == 3
    assert swap.pending
    back = pairs(swap.take_copies().back)
    assert back == [(place[one.blocks[index]], blocks[index]) for index in (1, 2, 3)]
    assert (len(swap), swap.free) == (0, 8)
    assert swap.swap_in(one, blocks, cached=1, computed=15) == 0


def test_dropped_blocks_are_not_copied_and_shared_ones_are(pool: BlockPool) -> None:
    """The places of the first go to a third in the same decision, whose copies stay."""
    swap = space(5)
    one, two, three = (running(number, pool, blocks) for number, blocks in ((1, 3), (2, 2), (3, 3)))
    assert swap.keep(one, 11, pool)
    assert swap.keep(two, 7, pool)
    assert swap.free == 0
    assert swap.drop(9) is False
    assert swap.drop(1) is True
    assert swap.free == 3
    assert swap.keep(three, 11, pool)
    out = pairs(swap.take_copies().out)
    assert [block for block, _ in out] == [*two.blocks, *three.blocks]
    assert len({place for _, place in out}) == 5
    assert swap.drop(3) is True
    assert swap.drop(3) is False
    assert (len(swap), swap.free) == (1, 3)
    swap.check([2])
