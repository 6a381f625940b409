"""Checks of a memory policy on simulated devices."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from vsched.errors import DeviceOutOfMemory, MemoryLeak
from vsched.memory import KvNegotiation
from vsched.policy import MemoryPolicy, Reservation
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.testing.model_ranks.sizing_rank import KvSizingRank, load_view, negotiate, random_group

ROOMY_BYTES = 1 << 40
"""Size of a device on which every policy should find a size."""


def check_memory_policy(policy: MemoryPolicy, rng: random.Random) -> object:
    """Size a KV cache with room to spare, and one with failing allocations, new processes, and leaks.

    Raises:
        AssertionError: Names the fault.
    """
    _check_roomy(policy)
    ranks = random_group(rng)
    try:
        view = load_view(ranks, context_tokens=rng.choice([16, 1024, 32768]))
    except DeviceOutOfMemory:
        return "the weights do not fit"
    growth = [rng.choice([0, rng.randrange(1 << 24)]) for _ in ranks]
    view = msgspec.structs.replace(
        view,
        reservations=_reservations(ranks, growth),
        block_size=rng.choice([1, 16]),
        batch_tokens=rng.choice([64, 2048, 16384]),
    )
    unlucky = rng.choice(ranks)
    unlucky.leaks = rng.random() < 0.1
    for _ in range(rng.choice([0, 0, 1, 3])):
        unlucky.memory.fail_at(rng.randint(1, 60))
    newcomer_bytes = rng.choice([0, rng.randrange(unlucky.memory.total() // 4)])

    def between(_: int) -> None:
        unlucky.memory.set_peers_bytes(newcomer_bytes)

    negotiation = KvNegotiation(policy, view)
    try:
        accepted = negotiate(negotiation, ranks, between=between)
    except DeviceOutOfMemory as error:
        _check_message(error)
        return str(error)
    except MemoryLeak as error:
        return str(error)
    _check_profiled(negotiation)
    for rank in ranks:
        rank.memory.check_invariants()
    return accepted


def _check_roomy(policy: MemoryPolicy) -> None:
    """Check that the policy ends with a profiled build on a large device, and leaves most of it to an encoder."""
    for reserved, fault in (
        (0, "it proves no build"),
        (ROOMY_BYTES * 3 // 4, "it leaves no room for what encode ranks reserve"),
    ):
        rank = KvSizingRank(SimulatedMemory(ROOMY_BYTES), bytes_per_token=1024)
        view = load_view([rank])
        view = msgspec.structs.replace(view, reservations=_reservations([rank], [reserved]))
        negotiation = KvNegotiation(policy, view)
        try:
            negotiate(negotiation, [rank])
        except DeviceOutOfMemory as error:
            _check_message(error)
            what = f"{fault}: {reserved} of {ROOMY_BYTES} bytes are reserved"
            raise AssertionError(f"{what}; {error}") from error
        _check_profiled(negotiation)


def _check_profiled(negotiation: KvNegotiation) -> None:
    build = negotiation.attempts[-1]
    assert build.profile, (
        f"it proves no build: {build.tokens} tokens are accepted without a profiling run"
    )


def _check_message(error: DeviceOutOfMemory) -> None:
    assert all(word in str(error) for word in ("value ", "limit ", "Remedy: ")), (
        f"the message must give value, limit and remedy: {str(error)!r}"
    )


def _reservations(ranks: Sequence[KvSizingRank], growth: Sequence[int]) -> list[Reservation]:
    return [
        Reservation(rank=rank.rank, pool=rank.memory.pool, growth_bytes=size, held=False)
        for rank, size in zip(ranks, growth, strict=True)
    ]
