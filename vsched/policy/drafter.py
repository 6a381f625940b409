"""Policies about speculative decoding."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.policy.base import Policy
from vsched.policy.measured import NOTHING_MEASURED, Measured

DRAFT_TOKENS_MAX = 32
"""Most tokens that may be drafted for one request in one step."""


class Draft(msgspec.Struct, frozen=True):
    """What ranks may draft for one request, from now on.

    Drafted tokens are verified, not trusted: with and without them a request gets the same tokens.

    Attributes:
        tokens: At most so many in a step; 0 for none.
        steps: For so many steps of the group; then the policy is asked again. 0: until the request leaves its slot.
        ngram: What follows an earlier place with the same last tokens, at least so many, is drafted (prompt lookup); 0
            for no lookup. What a grammar leaves no choice about is drafted in any case.
        model: Whether the draft model is asked where there is nothing else to draft. Ranks without one draft nothing
            more for it.
    """

    tokens: int = 0
    steps: int = 0
    ngram: int = 0
    model: bool = False


class DraftingView(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafting policy sees of one decoding request: when it begins to decode, and when its grant is over.

    Attributes:
        held: Whether its answer is held to a grammar.
        outputs: Tokens that it has yielded, as far as known.
        outputs_max: Tokens that it may yield in all.
        running: Requests that hold a slot.
        rows_free: Tokens that a step can take beside those of running requests and of grants: slots that are free.
        last: The grant that is over; None where it begins to decode.
        drafted: Tokens drafted for it under that grant, as far as known.
        accepted: Those of them that it was given.
        model: Whether ranks have a draft model.
        tenant: Whose the request is.
        measured: Times of this replica.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    held: bool
    outputs: int
    outputs_max: int
    running: int
    rows_free: int
    last: Draft | None = None
    drafted: int = 0
    accepted: int = 0
    model: bool = False
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class DraftingPolicy(Policy, frozen=True, kw_only=True):
    """Decides how many tokens may be drafted for a request, and for how long."""

    def grant(self, view: DraftingView) -> Draft:
        """Return what may be drafted for the request; the kernel cuts it to `rows_free`."""
        raise NotImplementedError
