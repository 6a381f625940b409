"""The order and the limits of prefills in a step: the answer of the step policy, with overdue requests first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vsched.policy import StepShares, StepView
from vsched.policy.checks import PASSED_OVER
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.step_times import PrefillBudget

NONE_ADVANCES = "no request would have advanced"
"""Reason of an answer that the host did not follow because nothing decodes and no request would be prefilled."""


class DecidedShares(NamedTuple):
    """The prefills of a step, by their indices in the view.

    Attributes:
        shares: Maximum tokens of each request that advances, in order; None for no limit.
        left_out: Requests that the policy left out, overdue ones included.
        unlimited: Whether all requests advance without limits. If not, nothing decodes, and no request got a chunk, the
            host lets all advance in order of arrival, and overrules the policy with `NONE_ADVANCES`.
    """

    shares: Mapping[int, int | None]
    left_out: Sequence[int]
    unlimited: bool


def decide_shares(seat: PolicySeat, view: StepView, budget: PrefillBudget) -> DecidedShares:
    """Ask the step policy; set its time limit in the budget of the step."""
    count, late = len(view.prefilling), view.overdue
    answer: StepShares = seat.decide(view, count)
    if answer.time_ns is not None and not late:
        budget.limit_time(answer.time_ns)
    shares: dict[int, int | None] = dict.fromkeys(answer.order)
    if answer.tokens is not None:
        shares = {index: most for index, most in zip(shares, answer.tokens, strict=True) if most}
    unlimited = answer.tokens is None and len(shares) == count
    left_out = (
        [index for index in range(count) if index not in shares] if len(shares) < count else ()
    )
    if any(index not in shares for index in late):
        seat.overrule(PASSED_OVER)
        shares = {**dict.fromkeys([index for index in late if index not in shares]), **shares}
    return DecidedShares(shares, left_out, unlimited)
