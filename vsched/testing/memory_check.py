"""Checks of a memory policy on simulated devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from vsched.errors import DeviceOutOfMemory, MemoryLeak
from vsched.memory import Accepted, KvNegotiation, Sized
from vsched.policy import Build, MemoryPolicy, MemoryView, Probe, RankMemory, Reservation
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInGenerator, stand_in_info
from vsched.wire import SizeKv
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits

_LAYERS = 4
_LIMITS = StepLimits(slots=1, batch_tokens=1, chunk_tokens=1, context_tokens=1, block_size=1)


@dataclass
class KvSizingRank:
    """One rank of a generate group.

    Attributes:
        activations: Allocation sizes of the profiling run, in order; every second one is freed at
            once.
        leaks: Whether a reference to each KV cache remains, so that teardown does not free it.
        kept_bytes: Size of an allocation of each profiling run that remains: a captured graph, an attention kernel, or
            headroom.
    """

    memory: SimulatedMemory
    rank: int = 0
    weights: Sequence[int] = (24 << 20,)
    activations: Sequence[int] = (12 << 20, 3 << 20)
    bytes_per_token: int = 8192
    leaks: bool = False
    kept_bytes: int = 0

    def load(self) -> RankMemory:
        """Allocate the weights and measure.

        Raises:
            DeviceOutOfMemory: When they do not fit.
        """
        self._builder = _SimulatedBuilder(self)
        return self._builder.measure()

    def carry_out(self, order: Probe | Build) -> Sized:
        """Tear down the old cache, build, hold the headroom, profile, measure; report the outcome."""
        if isinstance(order, Probe):
            order = Build(order.tokens)
        return self._builder.carry_out(SizeKv(order.tokens, order.profile, order.headroom_bytes))

    def tear_down(self) -> None:
        """Free the KV cache and the allocator's cache."""
        self._builder.carry_out(SizeKv(0, profile=False, headroom_bytes=0))

    def profile(self) -> None:
        """Run the largest step.

        Raises:
            DeviceOutOfMemory: When it does not fit; its allocations are freed.
        """
        held: list[int] = []
        if self.kept_bytes:
            self.memory.allocate(self.kept_bytes)
        try:
            for number, size in enumerate(self.activations):
                handle = self.memory.allocate(size)
                if number % 2:
                    self.memory.free(handle)
                else:
                    held.append(handle)
        finally:
            for handle in held:
                self.memory.free(handle)


class _LayeredGenerator(StandInGenerator):
    """A model whose weights and KV cache are several allocations."""

    def __init__(self, rank: KvSizingRank) -> None:
        super().__init__(rank.memory, kv_bytes_per_token=rank.bytes_per_token)
        self._rank = rank
        for size in rank.weights:
            self.memory.allocate(size)
        self.weights_bytes = sum(rank.weights)

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        size = blocks * block_size * self._kv_bytes_per_token
        for layer in range(_LAYERS):
            share = size // _LAYERS + (size % _LAYERS if layer == 0 else 0)
            self._kv.append(self.memory.allocate(share))

    def drop_kv(self) -> None:
        if self._rank.leaks:
            self._kv = []
        super().drop_kv()


class _SimulatedBuilder(KvBuilder):
    """The real one with the profiling run of the simulated model."""

    def __init__(self, rank: KvSizingRank) -> None:
        info = stand_in_info(kv_bytes_per_token=rank.bytes_per_token)
        worker = _LayeredGenerator(rank)
        super().__init__(worker, info, _LIMITS, rank=rank.rank, collect=lambda: None)
        self._profile = rank.profile

    def _run_profile(self, *, probe: bool) -> None:
        self._profile()


def load_view(ranks: Sequence[KvSizingRank], **changes: int) -> MemoryView:
    """Load the ranks and return the view for a memory policy.

    Raises:
        DeviceOutOfMemory: When the weights do not fit.
    """
    view = MemoryView(
        ranks=[rank.load() for rank in ranks],
        bytes_per_token=ranks[0].bytes_per_token,
        block_size=16,
        context_tokens=1024,
        batch_tokens=2048,
        slots=64,
    )
    return msgspec.structs.replace(view, **changes)


def negotiate(
    negotiation: KvNegotiation,
    ranks: Sequence[KvSizingRank],
    *,
    between: Callable[[int], None] = lambda _: None,
) -> Accepted:
    """Run a negotiation to its end; `between` is called with the number of orders executed so far.

    Raises:
        DeviceOutOfMemory: When the cache does not fit.
        MemoryLeak: When memory was not freed.
    """
    order = negotiation.first_order()
    count = 0
    while not isinstance(order, Accepted):
        reports = [rank.carry_out(order) for rank in ranks]
        count += 1
        between(count)
        order = negotiation.next_order(reports)
    return order


def random_group(rng: random.Random) -> list[KvSizingRank]:
    """Return one to three ranks on devices of one random size, with other processes, and weights that mostly fit."""
    mib = 1 << 20
    total_bytes = rng.choice([64, 256, 1024, 8192]) * mib
    bytes_per_token = rng.choice([1024, 8192, 57344])
    weights = [rng.randrange(1, total_bytes // 8) for _ in range(rng.randint(1, 4))]
    activations = [rng.randrange(1, total_bytes // 16) for _ in range(rng.randint(1, 6))]
    return [
        KvSizingRank(
            SimulatedMemory(
                total_bytes,
                pool=f"simulated {rank}",
                peers_bytes=rng.choice([0, rng.randrange(total_bytes // 3)]),
            ),
            rank=rank,
            weights=weights,
            activations=activations,
            bytes_per_token=bytes_per_token,
        )
        for rank in range(rng.randint(1, 3))
    ]


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
