"""Whoever would be too late anyway is told so at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from vsched.errors import limit_message
from vsched.measured import FirstTokenTime
from vsched.policy import (
    Fraction,
    FrontDoorAnswer,
    FrontDoorPolicy,
    FrontDoorView,
    LetIn,
    PositiveCount,
    Redirect,
    Shed,
)

GAPS_MAX = 17
"""Times between first tokens that the estimate looks back at."""
GAPS_MIN = 8
"""With more of them than these, the longest is left out."""


class DeadlineShed(FrontDoorPolicy, frozen=True, kw_only=True):
    """Sheds a request whose first token would come after its target, as first tokens have come lately.

    The estimate: those ahead of it, times the mean time between two first tokens while somebody waited. So under
    overload the requests that are served are served in time, and no work goes into others.

    Attributes:
        by_priority: Whether the more urgent are served first, as by `priority` in `generate.admission`: then those of a
            lower priority are not ahead, and the time between first tokens is what the more urgent leave.
        ttft_target_ms: Target of requests without one of their own; None lets these in.
        wait_share: Share of the time until the target that the estimate may take; the rest is for the request's own
            images and prompt.
        redirect_to: Base URL of a server that the client is sent to instead; empty for none.
    """

    by_priority: bool = False
    ttft_target_ms: PositiveCount | None = 2000
    wait_share: Fraction = 0.7
    redirect_to: str = ""

    def receive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return whether the first token would come in time."""
        target_ns = view.request.target_ns
        if target_ns is None and self.ttft_target_ms is not None:
            target_ns = view.request.arrived_ns + self.ttft_target_ms * 1_000_000
        if target_ns is None:
            return LetIn()
        ahead, firsts = view.held + view.preparing + view.waiting, view.measured.first_tokens
        gap_ns = busy_gap_ns(firsts)
        if self.by_priority:
            ahead = view.as_urgent
            gap_ns = gap_from_ns(firsts, view.request.priority)
        wait_ns = ahead * gap_ns
        late_ns = wait_ns - self.wait_share * (target_ns - view.now_ns)
        if late_ns <= 0:
            return LetIn()
        if self.redirect_to:
            return Redirect(self.redirect_to)
        retry_s = min(max(ceil(late_ns / 1e9), 1), 3600)
        text = limit_message(
            "the first token would come too late",
            value=f"a wait of {wait_ns / 1e6:.0f} ms behind {ahead} requests",
            limit=f"{(wait_ns - late_ns) / 1e6:.0f} ms",
            remedy=f"try again in {retry_s} s, or allow more time (ttft_target_ms)",
        )
        return Shed(text.removesuffix("."), retry_s, 503)


def busy_gap_ns(firsts: Sequence[FirstTokenTime]) -> float:
    """Return the mean time from one first token to the next, where the next request was waiting all that time.

    Of the latest gaps only, and without the longest: after a slow stretch of the machine requests are soon let in as
    before, and one stop of it sheds nobody.
    """
    gaps = [
        this.ended_ns - last.ended_ns
        for last, this in pairwise(firsts)
        if this.ended_ns - this.ttft_ns <= last.ended_ns
    ][-GAPS_MAX:]
    if len(gaps) > GAPS_MIN:
        gaps.remove(max(gaps))
    return sum(gaps) / len(gaps) if gaps else 0.0


def gap_from_ns(firsts: Sequence[FirstTokenTime], priority: int) -> float:
    """Return that time for requests of this priority and lower ones: others pass, also those that are yet to come.

    Where none of them got a first token lately, the next may be as far as all that are remembered.
    """
    passed = [one for one in firsts if one.priority <= priority]
    if passed or not firsts:
        return busy_gap_ns(passed)
    return float(firsts[-1].ended_ns - firsts[0].ended_ns)
