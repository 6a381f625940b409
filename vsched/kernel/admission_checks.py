"""Checks for requests that can never be served, or not now; these are refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.kernel.commands import RefusalCode, Refuse
from vsched.kernel.limits import SchedulerLimits
from vsched.types import MediaItem, Request, count_of


def refuse_impossible(
    request: Request, limits: SchedulerLimits, *, scope: str, emitted: int = 0
) -> Refuse | None:
    """Return the refusal of a request that can never be served with these limits; None for others.

    `scope` is from the encoding policy. `emitted` is the number of outputs from an earlier engine.
    """
    name, prompt = request.request_id, len(request.prompt_token_ids)
    outputs = request.sampling.max_tokens
    total = prompt + outputs
    if not prompt or outputs - emitted < 1:
        return Refuse(name, RefusalCode.EMPTY, prompt, 1, detail=(outputs - emitted,))
    if not _items_fit(request.items, prompt):
        spans = tuple(at for item in request.items for run in item.runs for at in run)
        return Refuse(name, RefusalCode.BAD_ITEMS, limit=prompt, detail=spans)
    if total > limits.context_tokens:
        context = limits.context_tokens
        return Refuse(name, RefusalCode.CONTEXT_EXCEEDED, total, context, "generate.context_tokens")
    if limits.blocks_for(total) > limits.blocks:
        room = limits.blocks * limits.block_size
        return Refuse(name, RefusalCode.KV_EXCEEDED, total, room, "generate.memory")
    return _refuse_atoms(request, limits) or _refuse_images(request, limits, scope)


def _refuse_atoms(request: Request, limits: SchedulerLimits) -> Refuse | None:
    largest = 0
    if limits.prompt_atomic:
        largest = len(request.prompt_token_ids)
    elif limits.item_atomic:
        atoms = (end - first for item in request.items for first, end in item.atoms)
        largest = max(atoms, default=0)
    if largest <= limits.atom_tokens:
        return None
    code, setting = RefusalCode.CHUNK_EXCEEDED, "generate.max_batch_tokens"
    return Refuse(request.request_id, code, largest, limits.atom_tokens, setting)


def _refuse_images(request: Request, limits: SchedulerLimits, scope: str) -> Refuse | None:
    name, setting = request.request_id, "arena.embedding_bytes"
    room = limits.pages * limits.page_rows
    for item in request.items:
        if limits.pages_for(item.tokens) > limits.pages:
            return Refuse(name, RefusalCode.IMAGE_EXCEEDS_CACHE, item.tokens, room, setting)
    by_choice = scope == "request"
    if not (by_choice or limits.prompt_atomic):
        return None
    # All images must be in the cache at once: with an entry each in a set, or one for equal images in a chunk.
    entries = {index if by_choice else item.key: item for index, item in enumerate(request.items)}
    pages = sum(limits.pages_for(item.tokens) for item in entries.values())
    if pages > limits.pages:
        tokens, rows = pages * limits.page_rows, limits.page_rows
        code = RefusalCode.IMAGES_EXCEED_CACHE
        return Refuse(name, code, tokens, room, setting, detail=(rows, int(by_choice)))
    return None


def refuse_full(
    request: Request, *, choices: int, waiting: int, waiting_bytes: int, limits: SchedulerLimits
) -> Refuse | None:
    """Return the refusal if too many requests would wait, or waiting requests would hold too many bytes.

    A single request may exceed the limits. `waiting` excludes this request, `waiting_bytes` includes it.
    """
    name, code = request.request_id, RefusalCode.QUEUE_FULL
    if waiting and waiting + choices > limits.waiting:
        return Refuse(name, code, waiting + choices, limits.waiting, "generate.max_waiting")
    if waiting and waiting_bytes > limits.waiting_bytes:
        setting = "generate.max_waiting_bytes"
        return Refuse(name, code, waiting_bytes, limits.waiting_bytes, setting)
    return None


def _items_fit(items: tuple[MediaItem, ...], prompt_tokens: int) -> bool:
    """Return True if items are in order, do not overlap, and lie within the prompt.

    Each of an item's rows, or of those that it keeps, has a placeholder, and its attention spans are within them.
    """
    for item in items:
        runs, rows = item.runs, item.tokens
        if item.kept:
            if not (item.spans and _ascend(item.kept, rows)):
                return False
            rows = count_of(item.kept)
        if item.offset != runs[0][0] or count_of(runs) != rows:
            return False
        if item.attention and not item.offset <= item.attention[0][0]:
            return False
        if not _ascend(item.attention or (), item.end):
            return False
    return _ascend([run for item in items for run in item.runs], prompt_tokens)


def _ascend(spans: Sequence[tuple[int, int]], stop: int) -> bool:
    """Return True if ranges are in order within [0, stop), and none is empty."""
    position = 0
    for start, end in spans:
        if not position <= start < end <= stop:
            return False
        position = end
    return True
