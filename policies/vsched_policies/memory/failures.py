"""Error messages of the memory policies, with the same settings named in the same order."""

from __future__ import annotations

from vsched.errors import limit_message
from vsched.memory import size_text
from vsched.policy import Attempt, Fail, MemoryView, RankMemory


def leaked(view: MemoryView) -> Fail:
    """Describe a leak in the last attempt, for which no size would help."""
    last = view.attempts[-1]
    before = view.attempts[-2].ranks if len(view.attempts) > 1 else ()
    stood = {rank.rank: rank.kv_bytes for rank in before}
    rank = min(last.ranks, key=lambda rank: rank.released_bytes - stood.get(rank.rank, 0))
    return Fail(
        limit_message(
            f"generate.memory: the teardown before the {last.action} of {last.tokens} tokens did not give the KV "
            f"cache back ({last.message or 'no rank gave details'})",
            value=f"{rank.released_bytes} bytes released by {rank.name}",
            limit=f"at least the {stood.get(rank.rank, 0)} bytes allocated before",
            remedy="report it as a fault of the worker plug-in, which still refers to the cache: a smaller one would "
            'leak too. Until it is mended, give the size with generate.memory = {use = "pinned", tokens = ...}, '
            "which needs no teardown",
        ),
        leak=True,
    )


def too_small(view: MemoryView, tokens: int, *, mem_fraction: float, headroom_bytes: int) -> Fail:
    """Describe a KV cache that is too small for one request of the maximum context length."""
    least = max(tokens, 0)
    lower = (
        f"lower generate.context_tokens to {least} or less, " if least >= view.block_size else ""
    )
    return Fail(
        limit_message(
            "generate.memory: the KV cache that fits cannot hold one request of the longest context",
            value=f"{least} tokens ({size_text(least * view.bytes_per_token)}) beside headroom of "
            f"{size_text(headroom_bytes)}",
            limit=f"at least {view.context_tokens} tokens "
            f"({size_text(view.context_tokens * view.bytes_per_token)}), which is generate.context_tokens",
            remedy=f"in this order: {lower}{_raise(mem_fraction)}{lower_activations(view)}",
        )
    )


def lower_activations(view: MemoryView) -> str:
    """Name settings that reduce other memory, the cheapest first."""
    return (
        f"lower generate.max_batch_tokens (now {view.batch_tokens}), generate.slots (now {view.slots}) or "
        "encode.admission.max_tokens, raise generate.memory_limit where that is the limit, free the device of other "
        "processes, or take a larger one"
    )


def highest_peak(attempts: list[Attempt]) -> RankMemory:
    """Return the measurement of the rank that came closest to its total."""
    ranks = [rank for attempt in attempts for rank in attempt.ranks]
    return max(ranks, key=lambda rank: rank.peak_bytes - rank.total_bytes)


def _raise(mem_fraction: float) -> str:
    if mem_fraction >= 1:
        return ""
    return f"raise generate.memory.mem_fraction (now {mem_fraction:g}, 1.0 at most), "
