"""A KV cache of a given size, proved by a profiling run; start-up fails if it cannot fit."""

from __future__ import annotations

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.memory import group_pools, size_text
from vsched.policy import Build, Count, MemoryPlan, MemoryPolicy, MemoryView, PositiveCount
from vsched_policies.memory.auto_profile import lower_activations


class Pinned(MemoryPolicy, frozen=True, kw_only=True):
    """Builds a KV cache of a given size, in tokens or in bytes, with one profiling run and no probe.

    Attributes:
        tokens: The size in tokens; give this or `bytes`.
        bytes: The size in bytes, rounded down to whole tokens.
        headroom_bytes: Held during the profiling run; none by default, since the given size leaves
            the intended rest.
    """

    tokens: PositiveCount | None = None
    bytes: PositiveCount | None = None
    headroom_bytes: Count = 0

    def __post_init__(self) -> None:
        """Refuse a size that is given twice, or not at all."""
        if (self.tokens is None) == (self.bytes is None):
            given = "neither" if self.tokens is None else "both"
            message = limit_message(
                "the size of the KV cache must be given once",
                value=f"{given} of tokens and bytes",
                limit="exactly one",
                remedy='set tokens or bytes, as in {use = "pinned", tokens = 16384}',
            )
            raise ValueError(message)

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Build the one size, unless it is too small or cannot fit."""
        build = yield Build(self._tokens(view), headroom_bytes=self.headroom_bytes)
        if not build.fits:
            peak = build.tightest
            raise DeviceOutOfMemory(
                limit_message(
                    f"generate.memory: memory ran out on {peak.pool} with a KV cache of the given size "
                    f"({build.reason})",
                    value=f"{build.tokens} tokens ({size_text(build.tokens * view.bytes_per_token)}), "
                    f"peak {size_text(peak.peak_bytes)}, headroom {size_text(self.headroom_bytes)}",
                    limit=f"total {size_text(peak.total_bytes)}",
                    remedy=f'in this order: lower {self._key} (use = "auto-profile" finds the largest that fits), '
                    f"{lower_activations(view)}",
                )
            )

    def _tokens(self, view: MemoryView) -> int:
        """Return the size in tokens.

        Raises:
            DeviceOutOfMemory: If it is less than a block, or more than what is free.
        """
        tokens = self.tokens if self.bytes is None else self.bytes // view.bytes_per_token
        assert tokens is not None, "checked by __post_init__"
        if tokens < view.tokens_min:
            raise DeviceOutOfMemory(
                limit_message(
                    "generate.memory: the KV cache holds too few tokens for one block",
                    value=f"{tokens} tokens",
                    limit=f"at least {view.tokens_min} tokens",
                    remedy=f"raise {self._key} to {self._amount(view, view.tokens_min)} or more",
                )
            )
        kv_bytes = tokens * view.bytes_per_token
        for pool in group_pools(view.ranks, view.reservations):
            # Free memory is held neither by this group nor by other processes; mem_fraction applies
            # to it.
            kept_bytes = pool.unheld_bytes + view.state_bytes * len(pool.ranks)
            free_bytes = max(pool.available_bytes - kept_bytes - self.headroom_bytes, 0)
            room_bytes = int(self.mem_fraction * free_bytes) // len(pool.ranks)
            if kv_bytes > room_bytes:
                tokens_max = room_bytes // view.bytes_per_token
                raise DeviceOutOfMemory(
                    limit_message(
                        f"generate.memory: the KV cache does not fit on {pool.name}",
                        value=f"{tokens} tokens x {view.bytes_per_token} bytes = {kv_bytes} bytes",
                        limit=f"{room_bytes} bytes ({tokens_max} tokens), which is mem_fraction {self.mem_fraction} "
                        f"of the {free_bytes} bytes that are free of {pool.total_bytes}",
                        remedy=f"lower {self._key} to {self._amount(view, tokens_max)} or less, "
                        "raise generate.memory.mem_fraction (1.0 at most), raise generate.memory_limit where that "
                        "is the limit, or free the device",
                    )
                )
        return tokens

    @property
    def _key(self) -> str:
        return "generate.memory.tokens" if self.bytes is None else "generate.memory.bytes"

    def _amount(self, view: MemoryView, tokens: int) -> int:
        return tokens if self.bytes is None else tokens * view.bytes_per_token
