"""What drafting policies grant: by what is held to a form, and by what came of drafts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import generate_statistics, make_limits, words
from vsched.policy import Draft, DraftingPolicy, DraftingView
from vsched.testing import ModelCluster, default_policies, make_request
from vsched_policies.drafting import ForcedTokens, NoDrafts, PromptLookup

FREE = DraftingView(now_ns=0, held=False, outputs=1, outputs_max=100, running=1, rows_free=20)
TRIAL = Draft(4, 4, 3)
ALL = Draft(8, 8, 3)
PAUSE = Draft(0, 128, 0)


def view(**changes: Any) -> DraftingView:
    return msgspec.structs.replace(FREE, **changes)


@pytest.mark.parametrize("held", [False, True])
def test_no_drafts_grants_nothing_for_good(held: bool) -> None:
    assert NoDrafts().grant(view(held=held)) == Draft(0, 0, 0)


def test_forced_tokens_grants_what_is_held_to_a_form_drafts_without_lookup() -> None:
    policy = ForcedTokens(tokens=5)
    assert policy.grant(view(held=True)) == Draft(5, 0, 0)
    assert policy.grant(view()).tokens == 0


@pytest.mark.parametrize(
    ("changes", "granted"),
    [
        ({}, TRIAL),
        ({"last": TRIAL, "drafted": 12, "accepted": 4}, ALL),  # three steps brought four
        ({"last": TRIAL, "drafted": 12, "accepted": 3}, PAUSE),
        ({"last": TRIAL}, ALL),  # nothing was found, and nothing paid
        ({"last": ALL, "drafted": 64, "accepted": 10}, ALL),
        ({"last": ALL, "drafted": 64, "accepted": 9}, PAUSE),
        ({"last": PAUSE}, TRIAL),
        ({"last": Draft(0, 64, 3)}, ALL),  # it found no free row, which says nothing of drafts
    ],
)
def test_prompt_lookup_goes_on_while_drafts_bring_enough(
    changes: dict[str, Any], granted: Draft
) -> None:
    assert PromptLookup().grant(view(**changes)) == granted


def test_prompt_lookup_drafts_what_a_grammar_forces_even_in_a_pause() -> None:
    wrong = view(held=True, last=ALL, drafted=64, accepted=0)
    assert PromptLookup().grant(wrong) == Draft(8, 128, 0)
    assert (
        PromptLookup().grant(view(held=True, last=Draft(8, 128, 0), drafted=9, accepted=9)) == TRIAL
    )


def steps_of(policy: DraftingPolicy) -> int:
    limits = make_limits(drafts=True, slots=32)
    cluster = ModelCluster(limits, default_policies(drafting=policy))
    cluster.submit(make_request("a", words(9), max_tokens=400))
    cluster.drain()
    return generate_statistics(cluster)["steps"]


def test_prompt_lookup_takes_fewer_steps_where_half_of_the_drafts_prove_right() -> None:
    """As they do in model ranks."""
    assert steps_of(NoDrafts()) > 400 > 250 > steps_of(PromptLookup())
