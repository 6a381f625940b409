"""Timeline of a request."""

from __future__ import annotations

import msgspec

from vsched.aio.streams.sink import AnswerSink
from vsched.types import FinishReason


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one request in each phase, in milliseconds."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    encoded_items: int
    preemptions: int
    preprocess_ms: float
    encode_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    finish_reason: str


def timeline_of(generation: AnswerSink, preprocess_ms: float) -> RequestTimeline:
    """Return the timeline of an ended request."""
    times = generation.times

    def span_ms(start_ns: int, end_ns: int) -> float:
        return round((end_ns - start_ns) / 1e6, 3) if start_ns and end_ns else 0.0

    return RequestTimeline(
        request_id=generation.request_id,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=times.cached_tokens,
        output_tokens=generation.output_tokens,
        encoded_items=times.encoded_items,
        preemptions=times.preemptions,
        preprocess_ms=round(preprocess_ms, 3),
        encode_ms=span_ms(times.submitted_ns, times.items_ready_ns),
        queue_ms=span_ms(times.items_ready_ns, times.admitted_ns),
        prefill_ms=span_ms(times.admitted_ns, times.first_token_ns),
        decode_ms=span_ms(times.first_token_ns, times.finished_ns),
        finish_reason=(generation.reason or FinishReason.ERROR).value,
    )
