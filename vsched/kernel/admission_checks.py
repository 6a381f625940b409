"""What can never be served as configured, or not now, is refused at once: value, limit, remedy."""

from __future__ import annotations

from vsched.errors import limit_message
from vsched.kernel.commands import Refuse
from vsched.kernel.limits import SchedulerLimits
from vsched.types import MediaItem, Request


def refuse_impossible(request: Request, limits: SchedulerLimits, *, scope: str) -> Refuse | None:
    """Return why a request can never be served with these limits; None when it can.

    `scope` is the encoding policy's: what shares a cache entry.
    """
    prompt = len(request.prompt_token_ids)
    total = prompt + request.sampling.max_tokens
    if not prompt or request.sampling.max_tokens < 1:
        return _refuse(
            request,
            "empty",
            "the prompt and max_tokens must not be empty",
            value=f"{prompt} prompt tokens, max_tokens {request.sampling.max_tokens}",
            limit="at least 1 each",
            remedy="send a prompt and ask for a token",
        )
    if not _items_fit(request.items, prompt):
        return _refuse(
            request,
            "bad_items",
            "items overlap, hold no tokens, or lie outside the prompt",
            value=[(item.offset, item.end) for item in request.items],
            limit=f"spans in order within 0 to {prompt}",
            remedy="place each item on its own placeholders",
        )
    if total > limits.context_tokens:
        return _refuse(
            request,
            "context_exceeded",
            "prompt plus max_tokens exceeds the context",
            value=total,
            limit=f"{limits.context_tokens} tokens",
            remedy="shorten the prompt or lower max_tokens",
        )
    if limits.blocks_for(total) > limits.blocks:
        return _refuse(
            request,
            "kv_exceeded",
            "prompt plus max_tokens can never fit the KV cache",
            value=total,
            limit=f"{limits.blocks * limits.block_size} tokens",
            remedy="lower max_tokens, or give the server a larger KV cache (generate.memory)",
        )
    return _refuse_images(request, limits, scope)


def _refuse_images(request: Request, limits: SchedulerLimits, scope: str) -> Refuse | None:
    limit = f"{limits.pages * limits.page_rows} tokens"
    for item in request.items:
        if limits.pages_for(item.tokens) > limits.pages:
            return _refuse(
                request,
                "image_exceeds_cache",
                "an image can never fit the embedding cache",
                value=item.tokens,
                limit=limit,
                remedy="send a smaller image, or raise arena.embedding_bytes",
            )
    together = sum(limits.pages_for(item.tokens) for item in request.items)
    if scope == "request" and together > limits.pages:
        # One entry for the whole set: it is there as a whole or not at all.
        return _refuse(
            request,
            "images_exceed_cache",
            "the images of a request can never fit the embedding cache together",
            value=f"{together * limits.page_rows} tokens, each image in whole pages of {limits.page_rows}",
            limit=limit,
            remedy="send fewer images, raise arena.embedding_bytes, or encode by item "
            "(encode.encoding)",
        )
    return None


def refuse_unserved(request: Request, reason: str) -> Refuse:
    """Refuse a request because no group is left, nor will be, to serve it."""
    message = f"{reason}. Remedy: restart the server."
    return Refuse(request.request_id, "given_up", 503, message)


def refuse_duplicate(request: Request) -> Refuse:
    """Refuse a request whose id is in use."""
    message = "this request id is in use. Remedy: choose another, or none."
    return Refuse(request.request_id, "duplicate_id", 409, message)


def refuse_full_count(request: Request, waiting: int, limits: SchedulerLimits) -> Refuse:
    """Refuse a request because too many wait already; it may come again."""
    message = limit_message(
        "too many requests wait",
        value=waiting + 1,
        limit=limits.waiting,
        remedy="try again later, or raise generate.max_waiting",
    )
    return Refuse(request.request_id, "queue_full", 429, message, retry_after_s=1)


def refuse_full_bytes(request: Request, size: int, limits: SchedulerLimits) -> Refuse:
    """Refuse a request because those that wait hold too many bytes; it may come again."""
    message = limit_message(
        "the requests that wait hold too many bytes",
        value=size,
        limit=limits.waiting_bytes,
        remedy="try again later, or raise generate.max_waiting_bytes",
    )
    return Refuse(request.request_id, "queue_full", 429, message, retry_after_s=1)


def _refuse(
    request: Request, code: str, what: str, *, value: object, limit: object, remedy: str
) -> Refuse:
    message = limit_message(what, value=value, limit=limit, remedy=remedy)
    return Refuse(request.request_id, code, 400, message)


def _items_fit(items: tuple[MediaItem, ...], prompt_tokens: int) -> bool:
    """Return whether items are in order, do not overlap, hold tokens, and lie within the prompt."""
    position = 0
    for item in items:
        if item.tokens < 1 or item.offset < position or item.end > prompt_tokens:
            return False
        position = item.end
    return True
