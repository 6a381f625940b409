"""A fixed share of the free memory after loading, without proof: the usual method, for comparison."""

from __future__ import annotations

from vsched import policy
from vsched.errors import limit_message
from vsched.memory import group_pools, size_text
from vsched.policy import AcceptBuild, Build, Fail, MemoryPolicy, MemoryView
from vsched_policies.memory.failures import highest_peak, leaked


class Fraction(MemoryPolicy, frozen=True, kw_only=True):
    """Builds the KV cache from a share of the memory left by the weights, without a profiling run.

    Reserves nothing for encoders.
    """

    mem_fraction: policy.Fraction = 0.9

    def plan(self, view: MemoryView) -> Build | AcceptBuild | Fail:
        """Return the size once, and keep it if it could be allocated."""
        if not view.attempts:
            return self._build(view)
        last = view.attempts[-1]
        if last.outcome == "leak":
            return leaked(view)
        if last.outcome == "fits":
            return AcceptBuild()
        peak = highest_peak([last])
        return Fail(
            limit_message(
                f"generate.memory: memory ran out on {peak.pool} ({last.message or 'no rank gave details'})",
                value=f"{last.tokens} tokens ({size_text(last.tokens * view.bytes_per_token)})",
                limit=f"total {size_text(peak.total_bytes)}",
                remedy=f"lower generate.memory.mem_fraction (now {self.mem_fraction:g}), "
                'or use = "auto-profile", which measures',
            )
        )

    def _build(self, view: MemoryView) -> Build | Fail:
        tokens = min(
            max(
                int(self.mem_fraction * pool.available_bytes) - view.state_bytes * len(pool.ranks),
                0,
            )
            // (view.bytes_per_token * len(pool.ranks))
            for pool in group_pools(view.ranks, ())
        )
        if tokens < view.tokens_min:
            return Fail(
                limit_message(
                    "generate.memory: the memory left by the weights holds too few tokens for one block",
                    value=f"{tokens} tokens",
                    limit=f"at least {view.tokens_min} tokens",
                    remedy=f"raise generate.memory.mem_fraction (now {self.mem_fraction:g}), "
                    "free the device, or take a larger one",
                )
            )
        return Build(tokens, profile=False)
