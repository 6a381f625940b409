"""Preemption policies: the running request to preempt when KV blocks run out, and how it resumes."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import Count, Preemption, PreemptionMode, PreemptionView, RequestPolicy
from vsched.policy.measured import Measured


class Youngest(RequestPolicy, frozen=True, kw_only=True):
    """Preempts the request that joined last, so that earlier ones finish.

    It is recomputed; with `mode = "swap"` its KV blocks are swapped to host memory
    (`generate.swap_memory`).
    """

    mode: PreemptionMode = "recompute"

    def needs(self) -> Sequence[str]:
        return ("swap",) if self.mode == "swap" else ()

    def victim(self, view: PreemptionView) -> Preemption:
        return Preemption(len(view.running) - 1, self.mode)


class Cheapest(Youngest, frozen=True, kw_only=True):
    """Preempts the request with the fewest computed tokens, the youngest among equals: it is the cheapest to recompute.

    With `mode = "swap"` its KV blocks are swapped to host memory instead
    (`generate.swap_memory`), as few as possible.
    """

    def victim(self, view: PreemptionView) -> Preemption:
        index = min(view.eligible, key=lambda index: (view.running[index].tokens, -index))
        return Preemption(index, self.mode)


class SwapLong(RequestPolicy, frozen=True, kw_only=True):
    """Preempts the request that joined last; swaps it if recomputation should take longer than the copies.

    Both times are estimated from the steps of the replica. Before there are any, and if a device
    copies asynchronously, a request with at least `tokens_min` tokens to recompute is swapped.
    Blocks shared with other requests count for neither: they stay cached.
    """

    tokens_min: Count = 512

    def needs(self) -> Sequence[str]:
        return ("swap",)

    def victim(self, view: PreemptionView) -> Preemption:
        one = view.running[-1]
        tokens = one.tokens - one.blocks_shared * view.block_tokens
        blocks = one.blocks - one.blocks_shared
        swap = tokens >= self.tokens_min
        token_ns, block_ns = prefill_token_ns(view.measured), swap_block_ns(view.measured)
        if token_ns is not None and block_ns is not None:
            swap = tokens * token_ns > 2 * blocks * block_ns
        if blocks > view.swap_blocks_free:
            swap = False
        return Preemption(len(view.running) - 1, "swap" if swap else "recompute")


def prefill_token_ns(measured: Measured) -> float | None:
    """Return the prefill time per prompt token, without the decodes of the step; None if it was not measured."""
    decoding = [one.busy_ns for one in measured.steps if one.busy_ns and not one.prefill_tokens]
    prefilling = [one for one in measured.steps if one.busy_ns and one.prefill_tokens]
    tokens = sum(one.prefill_tokens for one in prefilling)
    if not tokens:
        return None
    decode_ns = sum(decoding) / len(decoding) if decoding else 0.0
    return sum(max(one.busy_ns - decode_ns, 0.0) for one in prefilling) / tokens


def swap_block_ns(measured: Measured) -> float | None:
    """Return the copy time per block; None if it was not measured."""
    blocks = sum(one.blocks for one in measured.swaps)
    return sum(one.took_ns for one in measured.swaps) / blocks if blocks else None
