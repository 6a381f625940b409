"""Where a prefill chunk ends, and which embeddings it reads."""

from __future__ import annotations

from vsched.kernel.decisions import ChunkItem
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.probes import probe


def chunk_stop(
    state: RequestState,
    start: int,
    budget: int,
    *,
    room: int,
    limits: SchedulerLimits,
    cache: EmbeddingCache,
) -> int:
    """Return where the next chunk from `start` ends: `start` when nothing can be done yet.

    `budget` is what the step should take, `room` what it can: only an atom, which no chunk may cut, goes beyond the
    first. A chunk ends before an atom that does not fit, and holds the one that it begins with, or in.

    The chunk is cut before an item whose embedding is not ready. A little text before such an item is not worth a step
    of its own, so the cut goes back to a block boundary; but never across rows of another item: an item that is ready
    must be consumed as far as possible, or its pages could keep out the very item that is waited for.
    """
    stop = min(len(state.tokens), start + limits.chunk_tokens, start + budget)
    atom = _cut_atom(state, stop, limits)
    if atom is not None:
        probe("generate.chunk_holds_atom")
        first, end = atom
        stop = first if first > start else end
        if stop > start + room:
            return start
    consumed = start
    for item in state.items:
        if item.offset >= stop:
            break
        if item.end <= start:
            continue
        if not cache.is_ready(item.key):
            cut = max(item.offset, start)
            whole = max(consumed, cut - cut % limits.block_size)
            if _cut_atom(state, whole, limits) is not None:
                return start
            if start < whole < cut:
                probe("generate.chunk_cut_to_block")
            return whole
        consumed = item.end
    return stop


def reach(state: RequestState, start: int, limits: SchedulerLimits) -> int:
    """Return how far the next chunk from `start` can go: what lies before has to be encoded."""
    stop = min(len(state.tokens), start + limits.chunk_tokens)
    atom = _cut_atom(state, stop, limits)
    return stop if atom is None else atom[1]


def _cut_atom(state: RequestState, stop: int, limits: SchedulerLimits) -> tuple[int, int] | None:
    """Return the range of positions that see each other and that an end at `stop` would cut."""
    if limits.prompt_atomic:
        return (0, state.prompt_length) if 0 < stop < state.prompt_length else None
    if limits.item_atomic:
        for item in state.items:
            for first, end in item.runs if item.offset < stop < item.end else ():
                if first < stop < end:
                    return first, end
    return None


def pin_items(
    state: RequestState, start: int, stop: int, *, cache: EmbeddingCache
) -> tuple[list[ChunkItem], list[bytes]]:
    """Pin the items that a chunk over [start, stop) meets; return where they lie, and their keys."""
    met = [item for item in state.items if item.offset < stop and item.end > start]
    items = [ChunkItem(item.offset, item.tokens, cache.pin(item.key)) for item in met]
    return items, [item.key for item in met]


def drop_claims_before(state: RequestState, computed: int, *, cache: EmbeddingCache) -> None:
    """Drop claims on the items before `computed`: they lie in the KV cache, their embeddings are not needed."""
    for index, item in enumerate(state.items):
        if item.end > computed:
            break
        if index in state.wanted:
            state.wanted.discard(index)
            cache.release(state, index)
