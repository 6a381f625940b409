"""Sizing over simulated ranks that run out of memory at every single allocation, leak, and get new neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.properties import REPEATABLE
from vsched.errors import DeviceOutOfMemory, MemoryLeak
from vsched.memory import Accepted, KvNegotiation
from vsched.policy import MemoryPolicy
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.testing.memory_check import KvSizingRank, load_view, negotiate
from vsched_policies.memory import AutoProfile, Pinned

MIB = 1 << 20
HEADROOM = 16 * MIB
AUTO = AutoProfile(headroom_bytes=HEADROOM)
PINNED = Pinned(tokens=20_000, headroom_bytes=HEADROOM)
WITHOUT_FAILURE = 53_504
"""Tokens that `AUTO` finds on these ranks."""
ORDERS_MAX = {"AutoProfile": 6, "Pinned": 1}
KNOBS = ("generate.max_batch_tokens", "generate.slots", "encode.admission.max_tokens")


def group(count: int = 2, total_mib: int = 512) -> list[KvSizingRank]:
    return [
        KvSizingRank(SimulatedMemory(total_mib * MIB, pool=f"device {rank}"), rank=rank)
        for rank in range(count)
    ]


class Ended:
    """End of a negotiation, with the invariants of every end."""

    def __init__(
        self, policy: MemoryPolicy, ranks: list[KvSizingRank], newcomer_bytes: int = 0
    ) -> None:
        self.negotiation = KvNegotiation(policy, load_view(ranks))
        self.accepted: Accepted | None = None
        self.error: Exception | None = None

        def between(_: int) -> None:
            if newcomer_bytes:
                ranks[0].memory.set_peers_bytes(newcomer_bytes)

        try:
            self.accepted = negotiate(self.negotiation, ranks, between=between)
        except (DeviceOutOfMemory, MemoryLeak) as error:
            self.error = error
        self.attempts = self.negotiation.attempts
        assert len(self.attempts) <= ORDERS_MAX[type(policy).__name__]
        for rank in ranks:
            rank.memory.check_invariants()
            rank.memory.heal()
            self._check_rank(rank)

    def _check_rank(self, rank: KvSizingRank) -> None:
        weights = sum(-(-size // 512) * 512 for size in rank.weights)
        if self.accepted is not None:
            # The accepted size fits again with its headroom, and only weights and KV stay allocated.
            rank.memory.reset_peak()
            with rank.memory.hold(HEADROOM):
                rank.profile()
            kv_bytes = self.accepted.tokens * rank.bytes_per_token
            assert 0 <= rank.memory.allocated() - weights - kv_bytes < 4 * 512
        if not rank.leaks:
            rank.tear_down()
            assert rank.memory.allocated() == weights, "activations or headroom were left behind"


def allocations_after_load(policy: MemoryPolicy, count: int) -> int:
    """Number of allocations of one rank in a negotiation without failures."""
    ranks = group(count)
    loaded = len(ranks[0].weights)
    assert negotiate(KvNegotiation(policy, load_view(ranks)), ranks)
    return ranks[0].memory.allocations - loaded


def phases(policy: MemoryPolicy, ranks: Sequence[KvSizingRank], number: int) -> list[str]:
    """Let an allocation after loading fail in each of these ranks, and return the failed attempts."""
    everybody = group()
    for rank in ranks:
        everybody[rank.rank] = rank
        rank.memory.fail_at(len(rank.weights) + number)
    ended = Ended(policy, everybody)
    assert ended.attempts[0].outcome == "out_of_memory" or len(ended.attempts) > 1
    if isinstance(policy, AutoProfile):
        assert ended.accepted is not None, "one failure is recovered"
        assert ended.accepted.tokens > 0.94 * WITHOUT_FAILURE
    else:
        assert isinstance(ended.error, DeviceOutOfMemory)
        assert all(knob in str(ended.error) for knob in KNOBS)
    return [
        f"{each.message} ({each.action})"
        for each in ended.attempts
        if each.outcome == "out_of_memory"
    ]


@pytest.mark.parametrize("policy", [AUTO, PINNED], ids=["auto-profile", "pinned"])
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]], ids=["first", "second", "all"])
def test_sizing_survives_each_allocation_failing(policy: MemoryPolicy, failing: list[int]) -> None:
    """If any allocation fails in any phase, in one rank or all, sizing ends without leftovers."""
    reported = []
    for number in range(1, allocations_after_load(policy, 2) + 1):
        chosen = [rank for rank in group() if rank.rank in failing]
        (message,) = phases(policy, chosen, number)
        assert message.startswith(f"rank {failing[0]}")
        reported.append(message)
    actions = ("probe", "build") if isinstance(policy, AutoProfile) else ("build",)
    parts = ("building the KV cache", "running the hardest steps")
    for action, part in [*itertools.product(actions, parts), ("build", "holding headroom")]:
        found = [one for one in reported if part in one and one.endswith(f"({action})")]
        assert found, f"nothing failed in a {action} while {part}"


@REPEATABLE
@given(
    failures=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=24, unique=True
    ),
    total_mib=st.integers(48, 512),
)
def test_sizing_survives_many_failures(failures: list[tuple[int, int]], total_mib: int) -> None:
    """Any number of them, on devices where it fits closely or not at all."""
    ranks = group(total_mib=total_mib)
    for rank, number in failures:
        ranks[rank].memory.fail_at(len(ranks[rank].weights) + number)
    ended = Ended(AUTO, ranks)
    if ended.accepted is None:
        assert isinstance(ended.error, DeviceOutOfMemory)
        assert all(knob in str(ended.error) for knob in KNOBS)
        assert all(f"device {rank}: " in str(ended.error) for rank in range(2)), "the ledger"


def test_sizing_gives_up_after_four_attempts() -> None:
    """The last error has the sizes of the first and the last attempt, the settings and the ledger."""
    ranks = group(1)
    probe_allocations = 4 + 2
    for number in range(50):
        ranks[0].memory.fail_at(len(ranks[0].weights) + probe_allocations + 1 + number)
    ended = Ended(AUTO, ranks)
    assert [attempt.action for attempt in ended.attempts] == ["probe", *["build"] * 4]
    first, last = ended.attempts[1].tokens, ended.attempts[-1].tokens
    assert first == WITHOUT_FAILURE
    assert last == pytest.approx(first * 0.95**3, rel=0.01)
    assert f"initial {first} tokens" in str(ended.error)
    assert f"final {last} tokens" in str(ended.error)
    assert "headroom 16.0 MiB" in str(ended.error)
    assert "Memory of device 0: 512.0 MiB = generate rank 0 weights 24.0 MiB" in str(ended.error)


@pytest.mark.parametrize(
    ("newcomer_mib", "fits"), [(8, True), (96, True), (300, True), (480, False)]
)
def test_sizing_makes_room_for_a_peer(newcomer_mib: int, fits: bool) -> None:
    """A process that comes between probe and build is seen by the build that fails, and memory is left for it."""
    ended = Ended(AUTO, group(), newcomer_bytes=newcomer_mib * MIB)
    assert ended.attempts[0].outcome == "fits"
    if not fits:
        assert "others peers 480.0 MiB" in str(ended.error)
        return
    assert ended.accepted is not None
    left_mib = 512 - newcomer_mib - 24 - 16 - 20
    assert 0.85 * left_mib < ended.accepted.tokens * 8192 / MIB <= left_mib


@pytest.mark.parametrize("leaking", [[0], [1], [0, 1]])
def test_sizing_stops_at_a_leak(leaking: list[int]) -> None:
    """A reference to the KV cache ends sizing at the first teardown, with an error of its own."""
    ranks = group()
    for rank in leaking:
        ranks[rank].leaks = True
    ended = Ended(AUTO, ranks)
    assert isinstance(ended.error, MemoryLeak)
    assert [attempt.outcome for attempt in ended.attempts] == ["fits", "leak"]
    others = f", and {len(leaking) - 1} more" if len(leaking) > 1 else ""
    assert f"rank {leaking[0]}{others}: the KV cache was dropped" in str(ended.error)
    assert f"value 0, limit at least {8192 * 8192}" in str(ended.error)


@pytest.mark.parametrize("kept_mib", [15, 65])
def test_sizing_stops_at_memory_that_stays_although_the_kv_cache_was_released(
    kept_mib: int,
) -> None:
    """A reference to a graph, an attention kernel or the headroom; libraries may keep less."""
    ranks = group()
    ranks[1].kept_bytes = kept_mib * MIB
    negotiation = KvNegotiation(AUTO, load_view(ranks))
    if kept_mib == 15:
        assert negotiate(negotiation, ranks)
        return
    with pytest.raises(MemoryLeak, match=f"value {65 * MIB}, limit {64 * MIB}"):
        negotiate(negotiation, ranks)
    assert [attempt.outcome for attempt in negotiation.attempts] == ["fits", "leak"]


@REPEATABLE
@given(
    total_mib=st.integers(256, 2048),
    weights=st.lists(st.integers(1, 24 * MIB), min_size=1, max_size=4),
    activations=st.lists(st.integers(1, 24 * MIB), min_size=1, max_size=6),
)
def test_sizing_comes_near_the_largest(
    total_mib: int, weights: list[int], activations: list[int]
) -> None:
    """With the whole budget and no headroom, only retries and the allocator's rounding cost memory."""
    rank = KvSizingRank(SimulatedMemory(total_mib * MIB), weights=weights, activations=activations)
    policy = AutoProfile(mem_fraction=1.0, headroom_bytes=0)
    accepted = negotiate(KvNegotiation(policy, load_view([rank])), [rank])
    held_bytes = peak_bytes = 0
    for number, size in enumerate(activations):
        peak_bytes = max(peak_bytes, held_bytes + size)
        held_bytes += 0 if number % 2 else size
    needed = sum(weights) + peak_bytes
    largest = (total_mib * MIB - needed) // rank.bytes_per_token
    rounding = (2 * 20 * MIB) * (len(weights) + len(activations)) // rank.bytes_per_token
    assert 0.85 * largest - rounding <= accepted.tokens <= largest
