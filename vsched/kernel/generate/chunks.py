"""The end of a prefill chunk, and the embeddings that it reads."""

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
    """Return the end of the next chunk from `start`; `start` if it must wait.

    A chunk has at most `budget` tokens, unless it begins with or in an atom, a range that no chunk may cut: it has the
    whole atom if that fits into `room`, the tokens left in the step. It ends before any later atom that does not fit.

    A chunk ends before an item whose embedding is not ready. A little text before that item is not worth a step, so the
    chunk then ends at a block boundary, but not within another item: ready items must be consumed as far as possible,
    or their pages could keep out the missing item.
    """
    stop = min(len(state.tokens), start + limits.chunk_tokens, start + budget)
    atomic = limits.item_atomic or limits.prompt_atomic
    if atomic and (atom := _cut_atom(state, stop, limits)) is not None:
        probe("generate.chunk_holds_atom")
        first, end = atom
        stop = first if first > start else end
        if stop > start + room:
            return start
    consumed = start
    for item in state.items:
        if item.offset >= stop:
            break
        end = item.end
        if end <= start:
            continue
        if not cache.is_ready(item.key):
            cut = max(item.offset, start)
            whole = max(consumed, cut - cut % limits.block_size)
            if atomic and _cut_atom(state, whole, limits) is not None:
                return start
            if start < whole < cut:
                probe("generate.chunk_cut_to_block")
            return whole
        consumed = end
    return stop


def reach(state: RequestState, start: int, limits: SchedulerLimits) -> int:
    """Return the furthest end of the next chunk from `start`; items before it have to be encoded."""
    stop = min(len(state.tokens), start + limits.chunk_tokens)
    atom = _cut_atom(state, stop, limits)
    return stop if atom is None else atom[1]


def _cut_atom(state: RequestState, stop: int, limits: SchedulerLimits) -> tuple[int, int] | None:
    """Return the atom, positions that attend to each other, that a chunk end at `stop` would cut."""
    if limits.prompt_atomic:
        return (0, state.prompt_length) if 0 < stop < state.prompt_length else None
    if limits.item_atomic:
        for item in state.items:
            for first, end in item.atoms if item.offset < stop < item.end else ():
                if first < stop < end:
                    return first, end
    return None


def pin_items(
    state: RequestState, start: int, stop: int, *, cache: EmbeddingCache
) -> tuple[list[ChunkItem], list[bytes]]:
    """Pin the items in a chunk over [start, stop); return their positions and pages, and their keys."""
    met = [item for item in state.items if item.offset < stop and item.end > start]
    items = [ChunkItem(item.offset, item.tokens, cache.pin(item.key)) for item in met]
    return items, [item.key for item in met]


def drop_claims_before(state: RequestState, computed: int, *, cache: EmbeddingCache) -> None:
    """Drop claims on items before `computed`: their KV is computed, and their embeddings are not needed."""
    for index, item in enumerate(state.items):
        if item.end > computed:
            break
        if index in state.wanted:
            state.wanted.discard(index)
            cache.release(state, index)
