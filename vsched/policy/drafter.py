"""Policies for speculative decoding."""

from __future__ import annotations

import msgspec

from vsched.policy.base import Policy, PolicyKey, RequestView, decides
from vsched.policy.checks import COUNT_MAX, check_number

DRAFT_TOKENS_MAX = 32
"""Maximum draft tokens of one request in one step."""


class Draft(msgspec.Struct, frozen=True):
    """Grant of draft tokens for one request, from the next step on.

    Draft tokens are verified: they do not change the output of the request.

    Attributes:
        tokens: Maximum draft tokens in each step, up to `DRAFT_TOKENS_MAX`; 0 for none.
        steps: Number of steps of the generate group after which the policy is called again; 0 for a grant that lasts
            until the request leaves its slot.
        ngram: Minimum number of matching last tokens for prompt lookup, which drafts the tokens after an earlier match;
            0 for no lookup. Tokens that a grammar forces are drafted in any case.
        model: Use the draft model if grammar and prompt lookup draft nothing. Ignored by ranks without a draft model.
    """

    tokens: int = 0
    steps: int = 0
    ngram: int = 0
    model: bool = False


class DraftingView(RequestView, frozen=True, kw_only=True):
    """Input of a drafting policy: one decoding request.

    Attributes:
        held: Whether its output is constrained by a grammar.
        outputs: Tokens that it has generated, as far as known: results of steps in flight are missing.
        outputs_max: Maximum tokens that it may generate.
        running: Requests with a slot in its replica.
        rows_free: Maximum draft tokens that can be granted to it: slots that neither running requests nor the draft
            tokens of other grants use.
        last: The grant that ended; None if the request begins to decode.
        drafted: Tokens drafted under that grant, as far as known.
        accepted: Tokens of these that were accepted.
        model: Whether ranks have a draft model.
    """

    held: bool
    outputs: int
    outputs_max: int
    running: int
    rows_free: int
    last: Draft | None = None
    drafted: int = 0
    accepted: int = 0
    model: bool = False


def check_draft(returned: Draft) -> Draft:
    """Return the checked grant."""
    return Draft(
        check_number(returned.tokens, most=DRAFT_TOKENS_MAX),
        check_number(returned.steps, most=COUNT_MAX),
        check_number(returned.ngram, most=COUNT_MAX),
        bool(returned.model),
    )


class DraftingPolicy(Policy, frozen=True, kw_only=True):
    """Decides the number of draft tokens of a request, and for how many steps it applies."""

    @decides(
        "drafting",
        PolicyKey(
            "generate.drafting",
            "forced-tokens",
            "Number of draft tokens per request in a step (speculative decoding); see "
            "docs/speculative-decoding.md.",
        ),
        check=check_draft,
        default=Draft,
    )
    def grant(self, view: DraftingView) -> Draft:
        """Return the draft tokens to grant to the request; the kernel cuts them to `view.rows_free`.

        Called when a request begins to decode, and at the end of each grant with `steps`.
        """
        raise NotImplementedError
