"""Memory policies: the size of the KV cache.

`auto-profile` probes, builds the KV cache that fits by measurement, proves it by a profiling run, and shrinks it if
that fails. The probe is a small KV cache under the largest possible step: the peak without the cache is the memory
needed by everything else. Estimates from shapes miss fragmentation, workspaces and rounding in the allocator; the peak
does not. The rest is for the cache, reduced by `mem_fraction`: the only safety margin.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.memory import group_pools, size_text
from vsched.policy import (
    Attempt,
    Build,
    Count,
    MemoryPlan,
    MemoryPolicy,
    MemoryView,
    PositiveCount,
    Probe,
)

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

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Try at most two probes and `retries` + 1 builds."""
        probe = yield _first_probe(view)
        if not probe.fits:
            # Other memory can be measured with a KV cache of any size.
            little = _round_up(max(probe.tokens // 8, view.tokens_min), view.block_size)
            if little < probe.tokens:
                probe = yield Probe(little)
        if not probe.fits:
            raise _no_probe(view, probe)
        builds: list[Attempt] = []
        tokens = self._target(view, probe, probe)
        while len(builds) <= self.retries:
            build = yield self._build(view, tokens)
            if build.fits:
                return
            builds.append(build)
            # Includes processes that started since the probe, for which shrinking by a share would
            # not suffice.
            shrunk = int(build.tokens * (1 - self.shrink))
            tokens = min(shrunk, self._target(view, probe, build))
        raise self._out_of_retries(view, builds)

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

    def _build(self, view: MemoryView, tokens: int) -> Build:
        """Return a build order in whole blocks, if one request of maximum length fits in them."""
        whole = tokens // view.block_size * view.block_size
        if whole < max(view.context_tokens, view.tokens_min):
            raise self._too_small(view, whole)
        return Build(whole, headroom_bytes=self.headroom_bytes)

    def _too_small(self, view: MemoryView, tokens: int) -> DeviceOutOfMemory:
        lower = (
            f"lower generate.context_tokens to {tokens} or less, "
            if tokens >= view.block_size
            else ""
        )
        increase = (
            f"raise generate.memory.mem_fraction (now {self.mem_fraction:g}, 1.0 at most), "
            if self.mem_fraction < 1
            else ""
        )
        return _out_of_memory(
            "the KV cache that fits cannot hold one request of the longest context",
            value=f"{tokens} tokens ({size_text(tokens * view.bytes_per_token)}) next to headroom of "
            f"{size_text(self.headroom_bytes)}",
            limit=f"at least {view.context_tokens} tokens "
            f"({size_text(view.context_tokens * view.bytes_per_token)}), which is generate.context_tokens",
            remedy=f"in this order: {lower}{increase}{lower_activations(view)}",
        )

    def _out_of_retries(self, view: MemoryView, builds: list[Attempt]) -> DeviceOutOfMemory:
        first, last = builds[0], builds[-1]
        peak = max(
            (build.tightest for build in builds),
            key=lambda rank: rank.peak_bytes - rank.total_bytes,
        )
        pools = group_pools(last.ranks, view.reservations)
        peers = size_text(max(pool.peers_bytes for pool in pools))
        return _out_of_memory(
            f"memory ran out on {peak.pool} in every one of {len(builds)} attempts ({last.reason})",
            value=f"initial {_sized(view, first)}, final {_sized(view, last)}, "
            f"peak {size_text(peak.peak_bytes)}, headroom {size_text(self.headroom_bytes)}",
            limit=f"total {size_text(peak.total_bytes)}, other processes {peers}",
            remedy=f"in this order: lower generate.memory.mem_fraction (now {self.mem_fraction:g}), "
            f"{lower_activations(view)}",
        )


def _out_of_memory(what: str, *, value: str, limit: str, remedy: str) -> DeviceOutOfMemory:
    message = limit_message(f"generate.memory: {what}", value=value, limit=limit, remedy=remedy)
    return DeviceOutOfMemory(message)


def lower_activations(view: MemoryView) -> str:
    """Name settings that reduce other memory, the cheapest first."""
    return (
        f"lower generate.max_batch_tokens (now {view.batch_tokens}), generate.slots (now {view.slots}) or "
        "encode.admission.max_tokens, raise generate.memory_limit where that is the limit, free the device of other "
        "processes, or take a larger one"
    )


def _first_probe(view: MemoryView) -> Probe:
    """Return a probe of the largest step or 8,192 tokens, or less if not even that is free."""
    rooms = []
    for pool in group_pools(view.ranks, view.reservations):
        state_bytes = view.state_bytes * len(pool.ranks)
        room_bytes = max(pool.available_bytes - pool.unheld_bytes - state_bytes, 0)
        tokens = room_bytes // (view.bytes_per_token * len(pool.ranks))
        rooms.append((tokens // view.block_size * view.block_size, pool.name))
    free, tightest = min(rooms)
    least = view.tokens_min
    if free < least:
        raise _out_of_memory(
            f"no memory for a KV cache is left on {tightest} after loading",
            value=f"{free} tokens",
            limit=f"at least {least} tokens ({size_text(least * view.bytes_per_token)})",
            remedy="in this order: raise generate.memory_limit where that is the limit, free the device of other "
            "processes, lower encode.admission.max_tokens, "
            "or take a larger device",
        )
    wanted = _round_up(max(view.batch_tokens + view.slots, PROBE_TOKENS), view.block_size)
    return Probe(min(wanted, free))


def _no_probe(view: MemoryView, probe: Attempt) -> DeviceOutOfMemory:
    peak = probe.tightest
    return _out_of_memory(
        f"memory ran out on {peak.pool} before there was a KV cache to speak of ({probe.reason})",
        value=f"a probe of {_sized(view, probe)}, peak {size_text(peak.peak_bytes)}",
        limit=f"{size_text(peak.total_bytes)} in all, of which {size_text(peak.weights_bytes)} are weights",
        remedy=f"in this order: {lower_activations(view)}",
    )


def _round_up(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def _sized(view: MemoryView, attempt: Attempt) -> str:
    return f"{attempt.tokens} tokens ({size_text(attempt.tokens * view.bytes_per_token)})"


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
        build = yield Build(self._tokens(view), headroom_bytes=self.headroom_bytes)
        if not build.fits:
            peak = build.tightest
            raise _out_of_memory(
                f"memory ran out on {peak.pool} with a KV cache of the given size ({build.reason})",
                value=f"{build.tokens} tokens ({size_text(build.tokens * view.bytes_per_token)}), "
                f"peak {size_text(peak.peak_bytes)}, headroom {size_text(self.headroom_bytes)}",
                limit=f"total {size_text(peak.total_bytes)}",
                remedy=f'in this order: lower {self._key} (use = "auto-profile" finds the largest that fits), '
                f"{lower_activations(view)}",
            )

    def _tokens(self, view: MemoryView) -> int:
        """Return the size in tokens.

        Raises:
            DeviceOutOfMemory: If it is less than a block, or more than what is free.
        """
        tokens = self.tokens if self.bytes is None else self.bytes // view.bytes_per_token
        assert tokens is not None, "checked by __post_init__"
        if tokens < view.tokens_min:
            raise _out_of_memory(
                "the KV cache holds too few tokens for one block",
                value=f"{tokens} tokens",
                limit=f"at least {view.tokens_min} tokens",
                remedy=f"raise {self._key} to {self._amount(view, view.tokens_min)} or more",
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
                raise _out_of_memory(
                    f"the KV cache does not fit on {pool.name}",
                    value=f"{tokens} tokens x {view.bytes_per_token} bytes = {kv_bytes} bytes",
                    limit=f"{room_bytes} bytes ({tokens_max} tokens), which is mem_fraction {self.mem_fraction} "
                    f"of the {free_bytes} bytes that are free of {pool.total_bytes}",
                    remedy=f"lower {self._key} to {self._amount(view, tokens_max)} or less, "
                    "raise generate.memory.mem_fraction (1.0 at most), raise generate.memory_limit where that "
                    "is the limit, or free the device",
                )
        return tokens

    @property
    def _key(self) -> str:
        return "generate.memory.tokens" if self.bytes is None else "generate.memory.bytes"

    def _amount(self, view: MemoryView, tokens: int) -> int:
        return tokens if self.bytes is None else tokens * view.bytes_per_token
