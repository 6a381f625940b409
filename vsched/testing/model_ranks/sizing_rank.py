"""A model rank that executes the orders of a `KvNegotiation` on simulated memory, and a driver for groups.

It allocates like a real rank: weights once, the KV cache layer by layer, and a profiling run that
allocates and frees activations of many sizes. It measures the same quantities as a real rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from vsched.errors import DeviceOutOfMemory
from vsched.memory import Accepted, KvNegotiation
from vsched.policy import AttemptOutcome, Build, MemoryView, Probe, RankMemory
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.wire import Sized

_LAYERS = 4


@dataclass
class KvSizingRank:
    """One rank of a generate group.

    Attributes:
        activations: Allocation sizes of the profiling run, in order; every second one is freed at
            once.
        leaks: Whether a reference to each KV cache remains, so that teardown does not free it.
        phase: Current phase, for tests that inject failures.
    """

    memory: SimulatedMemory
    rank: int = 0
    weights: Sequence[int] = (24 << 20,)
    activations: Sequence[int] = (12 << 20, 3 << 20)
    bytes_per_token: int = 8192
    leaks: bool = False
    phase: str = "new"
    _kv: list[int] = field(default_factory=list)
    _kv_bytes: int = 0

    def load(self) -> RankMemory:
        """Allocate the weights and measure.

        Raises:
            DeviceOutOfMemory: When they do not fit.
        """
        self.phase = "load"
        for size in self.weights:
            self.memory.allocate(size)
        return self.measure(released_bytes=0)

    def carry_out(self, order: Probe | Build) -> Sized:
        """Tear down the old cache, build, hold the headroom, profile, measure; report the outcome."""
        action = "probe" if isinstance(order, Probe) else "build"
        profile = isinstance(order, Probe) or order.profile
        headroom_bytes = order.headroom_bytes if isinstance(order, Build) else 0
        old_bytes, released_bytes = self._kv_bytes, self.tear_down()
        self.memory.reset_peak()
        outcome: AttemptOutcome = "fits"
        message = ""
        if released_bytes < old_bytes:
            message = f"{released_bytes} of {old_bytes} bytes came back"
            return Sized(
                outcome="leak", message=message, memory=self.measure(released_bytes=released_bytes)
            )
        try:
            self.phase = f"{action}: kv"
            self._build(order.tokens)
            self.phase = f"{action}: headroom"
            with self.memory.hold(headroom_bytes):
                if profile:
                    self.phase = f"{action}: profiling run"
                    self.profile()
                measured = self.measure(released_bytes=released_bytes)
        except DeviceOutOfMemory as error:
            outcome, message = "out_of_memory", f"{self.phase}: {error}"
            measured = self.measure(released_bytes=released_bytes)
        return Sized(outcome=outcome, message=message, memory=measured)

    def tear_down(self) -> int:
        """Free the KV cache and the allocator's cache; return the number of freed bytes."""
        self.phase = "teardown"
        before_bytes = self.memory.allocated()
        if not self.leaks:
            for handle in self._kv:
                self.memory.free(handle)
        self._kv, self._kv_bytes = [], 0
        self.memory.release()
        return before_bytes - self.memory.allocated()

    def profile(self) -> None:
        """Run the largest step.

        Raises:
            DeviceOutOfMemory: When it does not fit; its allocations are freed.
        """
        held: list[int] = []
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

    def measure(self, *, released_bytes: int) -> RankMemory:
        """Return a rank's measurement of its device."""
        return RankMemory(
            rank=self.rank,
            pool=self.memory.pool,
            total_bytes=self.memory.total(),
            available_bytes=self.memory.available(),
            reserved_bytes=self.memory.reserved(),
            weights_bytes=sum(self.weights),
            peak_bytes=self.memory.peak(),
            kv_bytes=self._kv_bytes,
            released_bytes=released_bytes,
        )

    def _build(self, tokens: int) -> None:
        size = tokens * self.bytes_per_token
        for layer in range(_LAYERS):
            share = size // _LAYERS + (size % _LAYERS if layer == 0 else 0)
            self._kv.append(self.memory.allocate(share))
            self._kv_bytes += share


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
    order = negotiation.start()
    count = 0
    while not isinstance(order, Accepted):
        reports = [rank.carry_out(order) for rank in ranks]
        count += 1
        between(count)
        order = negotiation.take(reports)
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
