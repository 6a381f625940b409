"""Policies for the size of the KV cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal, TypeAlias

import msgspec

from vsched.policy.base import Fraction, Policy, PolicyKey, decides

AttemptOutcome = Literal["fits", "out_of_memory", "leak"]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank's device, in bytes, as the rank measured it.

    The total is the sum of available memory, reserved memory and the memory of peers, without overlap.

    Attributes:
        rank: Number among the ranks that are sized together; in a rank's own report, the number within its group.
        pool: Identity of the memory: `cuda:GPU-<uuid>`, `cpu`, or `cpu limit of <rank>` for a limit of one process.
        total_bytes: Maximum that the process could use if it were alone.
        available_bytes: Free on the device, without the cache of this process's allocator.
        reserved_bytes: Currently held by this process, including the cache of its allocator.
        weights_bytes: Weights, a part of `reserved_bytes`.
        peak_bytes: Maximum of `reserved_bytes` during the attempt; 0 outside of one.
        kv_bytes: KV cache during the attempt.
        state_bytes: Recurrent states of all slots and state snapshots during the attempt.
        released_bytes: Memory returned by the teardown before the attempt.
        adapter_bytes: Memory set aside for adapters when the weights were loaded.
        draft_bytes: Weights of the draft model.
        owner: Name of its group and its number there, for messages; empty in a rank's own report.
    """

    rank: int
    pool: str
    total_bytes: int
    available_bytes: int
    reserved_bytes: int
    weights_bytes: int
    peak_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    released_bytes: int = 0
    adapter_bytes: int = 0
    draft_bytes: int = 0
    owner: str = ""

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.owner or f"rank {self.rank}"


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an encode rank's largest batch needs in addition to its weights; 0 bytes if the probe was skipped.

    `held` means that the allocator keeps the memory, so that others cannot use it. `pauses` means that the encoder may
    hold it while a generate step runs in the same process. `measured` means that batches were run; otherwise the size
    was configured.
    """

    rank: int
    pool: str
    growth_bytes: int
    held: bool
    pauses: bool = False
    measured: bool = True


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A probe or build that all ranks in the view carried out.

    Attributes:
        action: `probe` or `build`.
        tokens: Size of the KV cache in tokens.
        outcome: The outcome over all ranks: out of memory on any rank is out of memory, and so is a build that leaves
            too little for the reservations of encode ranks. A policy never sees a leak, which ends the sizing.
        message: Errors of the ranks that ran out of memory; empty for none.
        ranks: Measurements of each rank during the attempt.
        headroom_bytes: Bytes that were held during the attempt.
        profile: Whether a profiling run was done.
    """

    action: Literal["probe", "build"]
    tokens: int
    outcome: AttemptOutcome
    message: str
    ranks: Sequence[RankMemory]
    headroom_bytes: int = 0
    profile: bool = True

    @property
    def fits(self) -> bool:
        """Whether it fits on all ranks."""
        return self.outcome == "fits"

    @property
    def reason(self) -> str:
        """The message, or a replacement for an empty one, for use in an error."""
        return self.message or "no rank gave details"

    @property
    def tightest(self) -> RankMemory:
        """The rank whose peak came closest to its total."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes - rank.total_bytes)


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a memory policy: measurements of all ranks before the KV caches are built, which all get one size.

    Attributes:
        ranks: Ranks of all generate groups, measured after loading the weights. An attempt has its own measurements.
        reservations: Reservations of all encode ranks, on any device.
        bytes_per_token: KV cache bytes per token on one rank.
        block_size: Tokens per KV block.
        context_tokens: Maximum prompt and output tokens of one request.
        batch_tokens: Maximum tokens of a step.
        slots: Maximum running requests.
        state_bytes: Bytes of the recurrent states of all slots and of state snapshots on one rank, in addition to the
            KV cache and independent of its size; 0 for a model without recurrent states.
    """

    ranks: Sequence[RankMemory] = ()
    reservations: Sequence[Reservation] = ()
    bytes_per_token: int
    block_size: int
    context_tokens: int
    batch_tokens: int
    slots: int
    state_bytes: int = 0

    @property
    def tokens_min(self) -> int:
        """Minimum size of a KV cache in tokens: one block."""
        return self.block_size


class Probe(msgspec.Struct, frozen=True):
    """Build a KV cache of `tokens` tokens, do the profiling run, measure, and free it again."""

    tokens: int


class Build(msgspec.Struct, frozen=True):
    """Build a KV cache of `tokens` tokens and keep it.

    Attributes:
        tokens: Size of the KV cache in tokens.
        profile: Do the profiling run on it.
        headroom_bytes: Bytes of additional memory to hold during the profiling run.
    """

    tokens: int
    profile: bool = True
    headroom_bytes: int = 0


MemoryPlan: TypeAlias = Generator[Probe | Build, Attempt, None]
"""A generator that yields probes and builds, and receives an `Attempt` for each."""


class MemoryPolicy(Policy, frozen=True, kw_only=True):
    """Decides the size of the KV cache from measurements and attempts."""

    mem_fraction: Fraction = 0.95
    """Share of the measured budget to use, in (0, 1]: the one safety margin."""

    @decides(
        "memory",
        PolicyKey("generate.memory", "auto-profile", "Size of the KV cache."),
        remembers=False,
        yields=True,
        in_kernel=False,
    )
    def plan(self, view: MemoryView) -> MemoryPlan:
        """Yield probes and builds, 16 at most, and return to serve with the last build.

        Called once, when the KV caches are sized. `attempt = yield Build(tokens)` carries out the build on all ranks.
        If nothing fits, raise `DeviceOutOfMemory` with value, limit and remedy in the message; returning after a build
        that does not fit raises one. If memory is not released, the start fails without a call.
        """
        raise NotImplementedError
