"""A fixed share of the free memory after loading, without proof: the usual method, for comparison."""

from __future__ import annotations

from vsched import policy
from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.memory import group_pools
from vsched.policy import Build, MemoryPlan, MemoryPolicy, MemoryView


class Fraction(MemoryPolicy, frozen=True, kw_only=True):
    """Builds the KV cache from a share of the memory left by the weights, without a profiling run.

    Ignores what encoders reserve. `check_policy` finds both faults.
    """

    mem_fraction: policy.Fraction = 0.9

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Build one size."""
        tokens = min(
            max(
                int(self.mem_fraction * pool.available_bytes) - view.state_bytes * len(pool.ranks),
                0,
            )
            // (view.bytes_per_token * len(pool.ranks))
            for pool in group_pools(view.ranks, ())
        )
        if tokens < view.tokens_min:
            raise DeviceOutOfMemory(
                limit_message(
                    "generate.memory: the memory left by the weights holds too few tokens for one block",
                    value=f"{tokens} tokens",
                    limit=f"at least {view.tokens_min} tokens",
                    remedy=f"raise generate.memory.mem_fraction (now {self.mem_fraction:g}), "
                    "free the device, or take a larger one",
                )
            )
        yield Build(tokens, profile=False)
