"""What ranks measured of their memory, and what was tried: the facts that memory policies decide on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

AttemptOutcome = Literal["fits", "out_of_memory", "leak"]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured on its device, in bytes.

    Total is available, reserved, and what peers hold: nothing is in two of them.

    Attributes:
        rank: Its number among the ranks that are sized together; on the way from a rank, within its group.
        pool: Identity of the memory: `cuda:GPU-<uuid>`, `cpu`, or `cpu limit of <pid>` for a limit of one process.
        total_bytes: What the process could use at most, were it alone.
        available_bytes: Free on the device; what the allocator of this process caches is not.
        reserved_bytes: Held by this process now, the allocator's caches included.
        weights_bytes: The weights among them.
        peak_bytes: Highest `reserved_bytes` during the attempt; 0 outside of one.
        kv_bytes: The KV cache that stood during the attempt.
        state_bytes: The states of all slots, and snapshots of states, which stood with it.
        released_bytes: What the teardown before the attempt gave back.
        adapter_bytes: What is set aside for adapters, since the weights were loaded.
        draft_bytes: The weights of the model that drafts.
        owner: Its group and its number there, for people; empty on the way from a rank.
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
        """What to call it in a message."""
        return self.owner or f"rank {self.rank}"


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What the worst batch of an encode rank needs beyond its weights; 0 bytes when the probe was skipped.

    `held` says that its allocator keeps the memory, so that it is no longer available to others. `pauses` says that the
    encoder may hold it while a step runs in the same process. `measured` says that batches ran; otherwise the size was
    given.
    """

    rank: int
    pool: str
    growth_bytes: int
    held: bool
    pauses: bool = False
    measured: bool = True


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A probe or a build that all ranks in the view carried out.

    `outcome` is the vote: a leak anywhere is a leak, out of memory anywhere is out of memory. `ranks` holds what each
    rank measured while it ran, and `message` what those said that it did not fit on. `headroom_bytes` were held
    meanwhile; without `profile`, no step ran.
    """

    action: Literal["probe", "build"]
    tokens: int
    outcome: AttemptOutcome
    message: str
    ranks: Sequence[RankMemory]
    headroom_bytes: int = 0
    profile: bool = True
