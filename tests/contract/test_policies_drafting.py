"""Grants of drafting policies, by grammar constraints and by acceptance of draft tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vsched.policy import Draft, DraftingPolicy, DraftingView
from vsched.policy.measured import Measurements, StepTime
from vsched_policies.drafting import (
    ForcedTokens,
    ModelDrafts,
    NoDrafts,
    PromptLookup,
    Trials,
    TriedDrafts,
)

FREE = DraftingView(now_ns=0, held=False, outputs=1, outputs_max=100, running=1, rows_free=20)
TRIAL = Draft(4, 4, 3)
ALL = Draft(8, 8, 3)
PAUSE = Draft(0, 128, 0)


def view(**changes: Any) -> DraftingView:
    return msgspec.structs.replace(FREE, **{"state": Trials(), **changes})


LOOKUP = PromptLookup()
FORCED = Draft(8, 128, 0)


@pytest.mark.parametrize(
    ("policy", "changes", "granted"),
    [
        (NoDrafts(), {}, Draft(0, 0, 0)),
        (NoDrafts(), {"held": True}, Draft(0, 0, 0)),
        (ForcedTokens(tokens=5), {"held": True}, Draft(5, 0, 0)),
        (ForcedTokens(tokens=5), {}, Draft(0, 0, 0)),
        (LOOKUP, {}, TRIAL),
        (LOOKUP, {"last": TRIAL, "drafted": 12, "accepted": 3}, ALL),  # three steps yielded three
        (LOOKUP, {"last": TRIAL, "drafted": 12, "accepted": 2}, PAUSE),
        (LOOKUP, {"last": TRIAL}, ALL),  # nothing was found, and nothing paid
        (LOOKUP, {"last": ALL, "drafted": 64, "accepted": 8}, ALL),
        (LOOKUP, {"last": ALL, "drafted": 64, "accepted": 7}, PAUSE),
        (LOOKUP, {"last": PAUSE}, TRIAL),
        (LOOKUP, {"last": Draft(0, 64, 3)}, ALL),  # without a free row, it proved nothing
        # Tokens forced by a grammar are drafted even in a pause.
        (LOOKUP, {"held": True, "last": ALL, "drafted": 64, "accepted": 0}, FORCED),
        (LOOKUP, {"held": True, "last": FORCED, "drafted": 9, "accepted": 9}, TRIAL),
    ],
)
def test_drafts_go_on_while_they_pay(
    policy: DraftingPolicy, changes: dict[str, Any], granted: Draft
) -> None:
    assert policy.grant(view(**changes)) == granted


# --- acceptance, in both policies ---

GUESSES = [PromptLookup(), ModelDrafts()]


def steps(*busy_ns: int, drafted: int = 0, accepted: int = 0, start: int = 1) -> list[StepTime]:
    return [
        StepTime(start + at, busy_ns=each, decodes=1, drafted=drafted, accepted=accepted)
        for at, each in enumerate(busy_ns)
    ]


def judged(
    policy: TriedDrafts, last: Draft, count: int, reported: list[StepTime]
) -> tuple[Draft, Trials]:
    """Return the next grant and the state, after `count` steps with the last grant and one accepted token each."""
    state = Trials()
    proved = {"drafted": count * last.tokens, "accepted": count}
    measured = Measurements(steps=reported)
    return policy.grant(view(last=last, state=state, measured=measured, **proved)), state


@pytest.mark.parametrize("policy", GUESSES)
@pytest.mark.parametrize(("drafted_ns", "goes_on"), [(1900, True), (2000, False)])
def test_drafts_go_on_while_tokens_are_measured_to_come_faster(
    policy: TriedDrafts, drafted_ns: int, goes_on: bool
) -> None:
    """Twice the tokens in less than twice the time."""
    reported = steps(*[1000] * 5) + steps(*[drafted_ns] * 5, drafted=4, accepted=1, start=9)
    found, state = judged(policy, policy.guess, 5, reported)
    assert (found == policy.guess) == goes_on
    assert state.failed == (0 if goes_on else 1)
    assert state.speedup(1) == pytest.approx(2000 / drafted_ns)
    assert state.speedup(9) is None


def test_drafts_are_not_judged_by_steps_with_prefill_or_seen_before() -> None:
    state = Trials()
    reported = [*steps(1000), StepTime(2, busy_ns=9000, decodes=1, prefill_tokens=50, drafted=4)]
    for _ in range(2):
        PromptLookup().grant(view(state=state, measured=Measurements(steps=reported)))
    assert state.seen_ns == 2
    assert state.kinds[1].plain_ns.value == 1000
    assert state.speedup(1) is None


@pytest.mark.parametrize("at", [1, 8])
def test_one_step_that_was_held_up_does_not_end_drafts(at: int) -> None:
    """Twice the tokens in 1.6 times the time; a neighbour, a garbage collection or a page fault in between."""
    policy, busy_ns = PromptLookup(), [1600] * 9
    busy_ns[at] = 50_000
    reported = steps(*[1000] * 9) + steps(*busy_ns, drafted=4, accepted=1, start=10)
    found, _ = judged(policy, policy.guess, 9, reported)
    assert found == policy.guess


def test_drafts_pay_again_in_the_first_trial_after_a_slow_stretch() -> None:
    """All steps with draft tokens were five times slower, then come some without and one trial at full speed."""
    reported = steps(*[5000] * 40, drafted=4, accepted=1) + steps(*[1000] * 20, start=41)
    reported += steps(*[1100] * 4, drafted=4, accepted=1, start=61)
    found, state = judged(LOOKUP, TRIAL, 4, reported)
    assert (found, state.failed) == (LOOKUP.guess, 0)


def test_drafts_are_tried_by_ever_fewer_requests_while_trials_fail() -> None:
    policy, state = ModelDrafts(), Trials()
    trial = policy.grant(view(state=state))
    assert (trial.tokens, trial.steps, trial.model) == (2, 4, True)
    failing = view(state=state, last=policy.guess, drafted=32, accepted=0)
    tried = []
    for _ in range(60):
        found = policy.grant(view(state=state))
        tried.append(found.model)
        if found.model:
            assert policy.grant(failing) == Draft(0, 128)
    assert [at for at, one in enumerate(tried) if one] == [0, 1, 3, 7, 15, 23, 31, 39, 47, 55]
    right = view(state=state, last=policy.guess, drafted=32, accepted=32)
    assert policy.grant(right) == policy.guess
    assert policy.grant(view(state=state)).model


def test_model_drafts_only_while_few_requests_run() -> None:
    policy = ModelDrafts(running_max=2, ngram=3)
    assert policy.guess == Draft(4, 8, 3, model=True)
    assert policy.grant(view(running=2)).model
    assert policy.grant(view(running=3)) == Draft(0, 8)
    assert policy.grant(view(running=3, held=True)) == Draft(4, 8)
    resumed = policy.grant(view(running=2, last=Draft(0, 8)))
    assert (resumed.tokens, resumed.ngram, resumed.model) == (2, 3, True)
