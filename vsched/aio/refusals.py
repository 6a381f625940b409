"""Error messages for the kernel's refusals, for clients over HTTP and in Python."""

from __future__ import annotations

from vsched.errors import RequestRefused, limit_message
from vsched.kernel.commands import RefusalCode, Refuse

STATUS = {
    RefusalCode.QUEUE_FULL: 429,
    RefusalCode.DUPLICATE_ID: 409,
    RefusalCode.GIVEN_UP: 503,
}
"""HTTP status of refusals that are not client errors; client errors have 400."""
RETRY_AFTER_S = {RefusalCode.QUEUE_FULL: 1}


def refusal_error(refuse: Refuse) -> RequestRefused:
    """Return the client's error for a refusal: the problem, the value, the limit, the remedy."""
    code = refuse.code
    return RequestRefused(
        _message(refuse),
        code=code.value,
        status=STATUS.get(code, 400),
        retry_after_s=RETRY_AFTER_S.get(code),
    )


def _message(refuse: Refuse) -> str:
    if refuse.code is RefusalCode.GIVEN_UP:
        return f"{refuse.reason}. Remedy: restart the server."
    if refuse.code is RefusalCode.DUPLICATE_ID:
        return "this request id is in use. Remedy: choose another, or none."
    what, value, limit, remedy = _words(refuse)
    return limit_message(what, value=value, limit=limit, remedy=remedy)


def _words(refuse: Refuse) -> tuple[str, object, object, str]:
    """Return the problem, the value, the limit and the remedy."""
    value, setting, detail = refuse.value, refuse.setting, refuse.detail
    tokens = f"{refuse.limit} tokens"
    match refuse.code:
        case RefusalCode.EMPTY:
            return (
                "the prompt and max_tokens must not be empty",
                f"{value} prompt tokens, max_tokens {detail[0]}",
                f"at least {refuse.limit} each",
                "send a prompt and ask for a token",
            )
        case RefusalCode.BAD_ITEMS:
            return (
                "items overlap, hold no tokens, or lie outside the prompt",
                list(zip(detail[::2], detail[1::2], strict=True)),
                f"spans in order within 0 to {refuse.limit}",
                "place each item on its own placeholders",
            )
        case RefusalCode.CONTEXT_EXCEEDED:
            what = "prompt plus max_tokens exceeds the context"
            return what, value, tokens, "shorten the prompt or lower max_tokens"
        case RefusalCode.KV_EXCEEDED:
            what = "prompt plus max_tokens can never fit the KV cache"
            remedy = f"lower max_tokens, or give the server a larger KV cache ({setting})"
            return what, value, tokens, remedy
        case RefusalCode.IMAGE_EXCEEDS_CACHE:
            what = "an image can never fit the embedding cache"
            return what, value, tokens, f"send a smaller image, or raise {setting}"
        case RefusalCode.IMAGES_EXCEED_CACHE:
            rows, by_choice = detail
            return (
                "the images of a request can never fit the embedding cache together",
                f"{value} tokens, each image in whole pages of {rows}",
                tokens,
                f"send fewer images, raise {setting}, or encode by item (encode.encoding)"
                if by_choice
                else f"send fewer images, or raise {setting}",
            )
        case RefusalCode.CHUNK_EXCEEDED:
            what = "positions of this model see later ones, so one step must hold them together"
            return what, f"{value} tokens", tokens, f"send less at once, or raise {setting}"
        case _:
            bytes_wait = setting == "generate.max_waiting_bytes"
            what = (
                "the requests that wait hold too many bytes"
                if bytes_wait
                else "too many requests wait"
            )
            return what, value, refuse.limit, f"try again later, or raise {setting}"
