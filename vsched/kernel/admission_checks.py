"""What can never be served as configured, or not now, is refused at once: a code, and the facts."""

from __future__ import annotations

from vsched.kernel.commands import RefusalCode, Refuse
from vsched.kernel.limits import SchedulerLimits
from vsched.types import MediaItem, Request


def refuse_impossible(
    request: Request, limits: SchedulerLimits, *, scope: str, emitted: int = 0
) -> Refuse | None:
    """Return why a request can never be served with these limits; None when it can.

    `scope` is the encoding policy's: what shares a cache entry. `emitted` outputs are there already.
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
        runs = (end - first for item in request.items for first, end in item.runs)
        largest = max(runs, default=0)
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
    # One set, of which each image has an entry, or one chunk, for which the same image has one: all are there at once.
    entries = {index if by_choice else item.key: item for index, item in enumerate(request.items)}
    pages = sum(limits.pages_for(item.tokens) for item in entries.values())
    if (by_choice or limits.prompt_atomic) and pages > limits.pages:
        tokens, rows = pages * limits.page_rows, limits.page_rows
        code = RefusalCode.IMAGES_EXCEED_CACHE
        return Refuse(name, code, tokens, room, setting, detail=(rows, int(by_choice)))
    return None


def refuse_full(
    request: Request, *, answers: int, waiting: int, waiting_bytes: int, limits: SchedulerLimits
) -> Refuse | None:
    """Return the refusal when too many requests would wait, or hold too many bytes while they wait.

    One request alone may hold more bytes than the limit, and have more answers. `waiting` does not count this request,
    `waiting_bytes` does.
    """
    name, code = request.request_id, RefusalCode.QUEUE_FULL
    if waiting and waiting + answers > limits.waiting:
        return Refuse(name, code, waiting + answers, limits.waiting, "generate.max_waiting")
    if waiting and waiting_bytes > limits.waiting_bytes:
        setting = "generate.max_waiting_bytes"
        return Refuse(name, code, waiting_bytes, limits.waiting_bytes, setting)
    return None


def _items_fit(items: tuple[MediaItem, ...], prompt_tokens: int) -> bool:
    """Return whether items are in order, do not overlap, hold tokens, and lie within the prompt."""
    position = 0
    for item in items:
        if item.offset != item.runs[0][0]:
            return False
        for start, stop in item.runs:
            if not position <= start < stop <= prompt_tokens:
                return False
            position = stop
        if item.tokens != sum(stop - start for start, stop in item.runs):
            return False
    return True
