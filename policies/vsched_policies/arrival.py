"""Arrival policies: admission of requests before any work is done for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from vsched.errors import limit_message
from vsched.policy import (
    Admit,
    ArrivalDecision,
    ArrivalView,
    Fraction,
    PositiveCount,
    Redirect,
    RequestPolicy,
    Shed,
)
from vsched.policy.measured import FirstTokenTime

GAPS_MAX = 17
"""Number of gaps between first tokens in the estimate."""
GAPS_MIN = 8
"""Above this number of gaps, the longest one is left out."""


class DeadlineShed(RequestPolicy, frozen=True, kw_only=True):
    """Sheds a request if its first token would miss the target, judging by recent first tokens.

    The estimate is the number of requests ahead times the mean gap between two first tokens while a
    request was waiting. So under overload the served requests are in time, and no work is spent on
    others.

    Attributes:
        by_priority: Whether urgent requests are served first, as by `priority` in
            `generate.admission`: then requests of lower priority are not ahead, and the gap is
            measured without first tokens of more urgent requests.
        ttft_target_ms: Target of requests without their own; None admits these.
        wait_share: Maximum share of the time until the target for the estimated wait; the rest is
            for the request's own images and prompt.
        redirect_to: Base URL of a server to which clients are redirected; empty for none.
    """

    by_priority: bool = False
    ttft_target_ms: PositiveCount | None = 2000
    wait_share: Fraction = 0.7
    redirect_to: str = ""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        target_ns = view.request.target_ns
        if target_ns is None and self.ttft_target_ms is not None:
            target_ns = view.request.arrived_ns + self.ttft_target_ms * 1_000_000
        if target_ns is None:
            return Admit()
        ahead, firsts = view.held + view.preparing + view.waiting, view.measured.first_tokens
        gap_ns = busy_gap_ns(firsts)
        if self.by_priority:
            ahead = view.as_urgent
            gap_ns = gap_from_ns(firsts, view.request.priority)
        wait_ns = ahead * gap_ns
        late_ns = wait_ns - self.wait_share * (target_ns - view.now_ns)
        if late_ns <= 0:
            return Admit()
        if self.redirect_to:
            return Redirect(self.redirect_to)
        retry_s = min(max(ceil(late_ns / 1e9), 1), 3600)
        text = limit_message(
            "the first token would miss its target",
            value=f"a wait of {wait_ns / 1e6:.0f} ms behind {ahead} requests",
            limit=f"{(wait_ns - late_ns) / 1e6:.0f} ms",
            remedy=f"try again in {retry_s} s, or allow more time (ttft_target_ms)",
        )
        return Shed(text.removesuffix("."), retry_s, 503)


def busy_gap_ns(firsts: Sequence[FirstTokenTime]) -> float:
    """Return the mean gap between consecutive first tokens, over gaps in which the next request was already waiting.

    Only recent gaps count, without the longest one: after a slow phase of the machine requests are
    soon admitted as before, and a single pause sheds none.
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
    """Return the gap for requests of this or a lower priority, which more urgent ones overtake.

    If none of them got a first token recently, the next gap may be as long as the whole history.
    """
    passed = [one for one in firsts if one.priority <= priority]
    if passed or not firsts:
        return busy_gap_ns(passed)
    return float(firsts[-1].ended_ns - firsts[0].ended_ns)


class Open(RequestPolicy, frozen=True, kw_only=True):
    """Admits every request; the limits of preparation and of the waiting queue refuse any excess."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        return Admit()
