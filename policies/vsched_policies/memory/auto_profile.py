"""Probe, build the KV cache that fits by measurement, prove it by a profiling run, shrink it if it fails.

The probe is a small KV cache under the largest possible step: the peak without the cache is the
memory needed by everything else. Estimates from shapes miss fragmentation, workspaces and rounding
in the allocator; the peak does not. The rest is for the cache, reduced by `mem_fraction`: the only
safety margin.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.errors import limit_message
from vsched.memory import group_pools, size_text
from vsched.policy import (
    AcceptBuild,
    Attempt,
    Build,
    Count,
    Fail,
    MemoryPolicy,
    MemoryView,
    Probe,
    RankMemory,
)
from vsched_policies.memory.failures import highest_peak, leaked, lower_activations, too_small

PROBE_TOKENS = 8192
Retries = Annotated[int, Meta(ge=0, le=12)]
Shrink = Annotated[float, Meta(gt=0, lt=1)]


class AutoProfile(MemoryPolicy, frozen=True, kw_only=True):
    """Measures the memory needed by everything else, then builds and proves the largest KV cache that fits.

    Attributes:
        headroom_bytes: Held while a build is proved, so that this much memory remains free.
        retries: Number of retries with a smaller size after running out of memory.
        shrink: Share by which a build shrinks for the next attempt.
    """

    headroom_bytes: Count = 256 << 20
    retries: Retries = 3
    shrink: Shrink = 0.05

    def plan(self, view: MemoryView) -> Probe | Build | AcceptBuild | Fail:
        """Return the next of at most two probes and `retries` + 1 builds."""
        if not view.attempts:
            return _first_probe(view)
        last = view.attempts[-1]
        if last.outcome == "leak":
            return leaked(view)
        if last.action == "build":
            return AcceptBuild() if last.outcome == "fits" else self._after_failed_build(view)
        if last.outcome == "fits":
            return self._build(view, self._target(view, last, last))
        return self._after_failed_probe(view, last)

    def _after_failed_probe(self, view: MemoryView, last: Attempt) -> Probe | Fail:
        """Probe once more with a small size: other memory can be measured with any KV cache."""
        little = _round_up(max(last.tokens // 8, view.tokens_min), view.block_size)
        probes = sum(attempt.action == "probe" for attempt in view.attempts)
        if probes == 1 and little < last.tokens:
            return Probe(little)
        peak = highest_peak([last])
        return Fail(
            limit_message(
                f"generate.memory: memory ran out on {peak.pool} before there was a KV cache to speak of "
                f"({last.message or 'no rank gave details'})",
                value=f"a probe of {last.tokens} tokens ({size_text(last.tokens * view.bytes_per_token)}), "
                f"peak {size_text(peak.peak_bytes)}",
                limit=f"{size_text(peak.total_bytes)} in all, of which {size_text(peak.weights_bytes)} are weights",
                remedy=f"in this order: {lower_activations(view)}",
            )
        )

    def _after_failed_build(self, view: MemoryView) -> Build | Fail:
        builds = [attempt for attempt in view.attempts if attempt.action == "build"]
        last = builds[-1]
        if len(builds) > self.retries:
            return self._out_of_tries(view, builds)
        probe = next(attempt for attempt in reversed(view.attempts) if attempt.action == "probe")
        # Includes processes that started since the probe, for which shrinking by a share would not
        # suffice.
        shrunk = int(last.tokens * (1 - self.shrink))
        return self._build(view, min(shrunk, self._target(view, probe, last)))

    def _target(self, view: MemoryView, probe: Attempt, last: Attempt) -> int:
        """Return the tokens that fit by measurement in the tightest pool, at least 1.

        Memory other than KV is known from the probe, that of other processes from the last attempt.
        """
        non_kv_bytes = {
            rank.rank: max(rank.peak_bytes - rank.kv_bytes, 0) + self.headroom_bytes
            for rank in probe.ranks
        }
        targets = []
        for pool in group_pools(last.ranks, view.reservations):
            own_bytes = sum(non_kv_bytes[rank.rank] for rank in pool.ranks)
            budget_bytes = pool.total_bytes - own_bytes - pool.peers_bytes - pool.unheld_bytes
            per_token = view.bytes_per_token * len(pool.ranks)
            targets.append(int(self.mem_fraction * max(budget_bytes, 0)) // per_token)
        return max(min(targets), 1)

    def _build(self, view: MemoryView, tokens: int) -> Build | Fail:
        """Return a build order in whole blocks, if one request of maximum length fits in them."""
        whole = tokens // view.block_size * view.block_size
        if whole < max(view.context_tokens, view.tokens_min):
            return too_small(
                view, whole, mem_fraction=self.mem_fraction, headroom_bytes=self.headroom_bytes
            )
        return Build(whole, profile=True, headroom_bytes=self.headroom_bytes)

    def _out_of_tries(self, view: MemoryView, builds: list[Attempt]) -> Fail:
        peak = highest_peak(builds)
        return Fail(
            limit_message(
                f"generate.memory: memory ran out on {peak.pool} in every one of {len(builds)} attempts "
                f"({builds[-1].message or 'no rank gave details'})",
                value=f"initial {_sized(view, builds[0])}, final {_sized(view, builds[-1])}, "
                f"peak {size_text(peak.peak_bytes)}, headroom {size_text(self.headroom_bytes)}",
                limit=f"total {size_text(peak.total_bytes)}, {_peers(view, builds[-1])}",
                remedy=f"in this order: lower generate.memory.mem_fraction (now {self.mem_fraction:g}), "
                f"{lower_activations(view)}",
            )
        )


def _first_probe(view: MemoryView) -> Probe | Fail:
    """Return a probe of the largest step or 8,192 tokens, or less if not even that is free."""
    wanted = _round_up(max(view.batch_tokens + view.slots, PROBE_TOKENS), view.block_size)
    tightest, free = _tightest(view)
    least = max(view.tokens_min, view.block_size)
    if free < least:
        return Fail(
            limit_message(
                f"generate.memory: no memory for a KV cache is left on {tightest.pool} after loading",
                value=f"{free} tokens",
                limit=f"at least {least} tokens ({size_text(least * view.bytes_per_token)})",
                remedy="in this order: raise generate.memory_limit where that is the limit, free the device of other "
                "processes, lower encode.admission.max_tokens, "
                "or take a larger device",
            )
        )
    return Probe(min(wanted, free))


def _tightest(view: MemoryView) -> tuple[RankMemory, int]:
    """Return the rank with the least memory, and the tokens that fit on it now, in whole blocks."""
    rooms = []
    for pool in group_pools(view.ranks, view.reservations):
        state_bytes = view.state_bytes * len(pool.ranks)
        room_bytes = max(pool.available_bytes - pool.unheld_bytes - state_bytes, 0)
        tokens = room_bytes // (view.bytes_per_token * len(pool.ranks))
        rooms.append((pool.ranks[0], tokens // view.block_size * view.block_size))
    return min(rooms, key=lambda room: room[1])


def _round_up(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def _sized(view: MemoryView, attempt: Attempt) -> str:
    return f"{attempt.tokens} tokens ({size_text(attempt.tokens * view.bytes_per_token)})"


def _peers(view: MemoryView, attempt: Attempt) -> str:
    pools = group_pools(attempt.ranks, view.reservations)
    return f"other processes {size_text(max(pool.peers_bytes for pool in pools))}"
