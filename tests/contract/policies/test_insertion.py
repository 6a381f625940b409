"""Insertion policies decide which blocks of a finished request the prefix cache keeps."""

from __future__ import annotations

import random

import pytest

from vsched.policy import CachePolicy, InsertionView
from vsched.testing import check_policy
from vsched_policies.insertion import Everything, Matching, Prompts, SecondTouch
from vsched_policies.insertion.second_touch import SLOTS, Touched

BUILT_IN: list[CachePolicy] = [
    Everything(),
    Prompts(),
    Matching(tenants=("a",), tokens_min=8, tokens_max=40),
    SecondTouch(),
    SecondTouch(with_outputs=False),
]
each = pytest.mark.parametrize("policy", BUILT_IN, ids=repr)


def blocks(name: str, count: int) -> list[bytes]:
    return [random.Random(f"{name} {index}").randbytes(16) for index in range(count)]


def ask(
    policy: CachePolicy,
    prompt: list[bytes],
    answer: list[bytes],
    *,
    found: int = 0,
    tenant: str = "",
    state: object = None,
) -> int:
    view = InsertionView(
        now_ns=0,
        hashes=[*prompt, *answer],
        prompt_blocks=len(prompt),
        found=found,
        block_tokens=4,
        prompt_tokens=4 * len(prompt),
        output_tokens=4 * len(answer),
        tenant=tenant,
        state=state,
    )
    return policy.keep(view)


@pytest.mark.slow
@each
def test_insertion_policy_keeps_its_contract(policy: CachePolicy) -> None:
    check_policy(policy, seeds=range(8))


@each
def test_insertion_answer_is_one_that_the_kernel_takes(policy: CachePolicy) -> None:
    state, rng = Touched(), random.Random(1)
    for _ in range(200):
        prompt = blocks(rng.choice("abc"), rng.randint(0, 20))
        answer = blocks("answer", rng.randint(0, 3))
        found = rng.randint(0, len(prompt))
        kept = ask(policy, prompt, answer, found=found, tenant=rng.choice("ab"), state=state)
        assert 0 <= kept <= len(prompt) + len(answer)


def test_everything_and_prompts() -> None:
    assert ask(Everything(), blocks("a", 3), blocks("answer", 2)) == 5
    assert ask(Prompts(), blocks("a", 3), blocks("answer", 2)) == 3


@pytest.mark.parametrize(
    ("tokens", "tenant", "kept"),
    [(8, "a", 2), (4, "a", 0), (40, "a", 10), (44, "a", 0), (8, "b", 0), (8, "", 0)],
)
def test_matching_keeps_tenants_and_lengths(tokens: int, tenant: str, kept: int) -> None:
    policy = Matching(tenants=("a",), tokens_min=8, tokens_max=40)
    assert ask(policy, blocks("p", tokens // 4), [], tenant=tenant) == kept


def test_matching_keeps_all_without_fields() -> None:
    assert ask(Matching(), blocks("p", 2), blocks("answer", 1), tenant="any") == 3


def test_second_touch_keeps_the_part_that_came_before() -> None:
    state, policy = Touched(), SecondTouch()
    shared, answer = blocks("shared", 3), blocks("answer", 1)
    assert ask(policy, [*shared, *blocks("one", 2)], answer, state=state) == 0
    assert ask(policy, [*shared, *blocks("two", 2)], answer, state=state) == 3
    assert ask(policy, [*shared, *blocks("two", 2)], answer, state=state, found=3) == 6


def test_second_touch_leaves_answers_out_where_it_is_told_to() -> None:
    state, policy = Touched(), SecondTouch(with_outputs=False)
    for kept in (0, 3):
        assert ask(policy, blocks("p", 3), blocks("answer", 1), state=state) == kept


def test_second_touch_keeps_no_answer_to_a_prompt_of_less_than_a_block() -> None:
    state = Touched()
    for _ in range(2):
        assert ask(SecondTouch(), [], blocks("answer", 2), state=state) == 0


def test_second_touch_forgets_what_came_long_ago() -> None:
    state, policy = Touched(), SecondTouch()
    ask(policy, blocks("p", 3), [], state=state)
    ask(policy, blocks("many", 8 * SLOTS), [], state=state)
    assert ask(policy, blocks("p", 3), [], state=state) == 0
