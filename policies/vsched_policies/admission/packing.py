"""Selection of joining entries by an order and limits, shared by the admission policies."""

from __future__ import annotations

from collections.abc import Iterable

from vsched.policy import AdmissionView, WaitingEntry

SECOND_NS = 1_000_000_000


def budget(max_tokens: int | None, default_tokens: int) -> int | None:
    """Return the token budget of a step: None derives it from the stage, 0 means no budget."""
    return (default_tokens if max_tokens is None else max_tokens) or None


def pack(
    view: AdmissionView,
    *,
    order: Iterable[int] | None = None,
    tokens_max: int | None = None,
    items_max: int | None = None,
    blocks_max: int | None = None,
    look_ahead: int = 0,
    starvation_s: float = 0.0,
) -> list[int]:
    """Return the entries that join, in order, up to the first that does not fit.

    The first entry of the order always joins; one of unknown size joins alone. If entries may join
    with a part of their tokens, an entry larger than the free tokens takes them all.

    Args:
        view: The waiting entries and the free resources.
        order: Indices into `view.waiting`, the most urgent first; the queue's order by default.
        tokens_max: The token budget, None for no budget.
        items_max: Maximum number of entries, None for no limit beyond the free ones.
        blocks_max: Maximum number of KV blocks. None leaves blocks to the kernel, which stops at
            the first entry without enough.
        look_ahead: Number of entries after the first that does not fit that may still join. Such an
            entry also needs its `blocks` to be free; these include blocks of a cached prefix in use
            by others, so the check errs towards waiting.
        starvation_s: Waiting time after which an entry cannot be overtaken.
    """
    room = tokens_max
    if view.divisible:
        room = view.tokens_free if room is None else min(room, view.tokens_free)
    blocks = None
    if look_ahead or blocks_max is not None:
        blocks = view.blocks_free if blocks_max is None else min(blocks_max, view.blocks_free)
    count_max = view.entries_free if items_max is None else min(items_max, view.entries_free)
    patient_since_ns = view.now_ns - int(starvation_s * SECOND_NS)
    chosen: list[int] = []
    passes = look_ahead
    passing = False
    front = None
    for index in range(len(view.waiting)) if order is None else order:
        if len(chosen) >= count_max or (view.divisible and room is not None and room <= 0):
            break
        if passing:
            passes -= 1
            if passes < 0:
                break
        front = index if front is None else front
        entry = view.waiting[index]
        if _fits(entry, room, blocks, alone=not chosen, divisible=view.divisible):
            chosen.append(index)
            if entry.tokens is None:
                break
            room = None if room is None else room - entry.tokens
            blocks = None if blocks is None else blocks - entry.blocks
        elif entry.arrived_ns <= patient_since_ns:
            break
        else:
            passing = True
    if not chosen and front is not None:
        return [front]  # the kernel checks whether it fits, and calls again after a change
    return chosen


def _fits(
    entry: WaitingEntry, room: int | None, blocks: int | None, *, alone: bool, divisible: bool
) -> bool:
    if blocks is not None and entry.blocks > blocks:
        return False
    if entry.tokens is None:
        return alone
    return room is None or alone or divisible or entry.tokens <= room
