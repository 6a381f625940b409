"""Insertion policies decide which blocks of a finished request the prefix cache keeps."""

from __future__ import annotations

import random

import pytest

from vsched.policy import CachePolicy, InsertionView
from vsched_policies.insertion import Everything, Matching


def blocks(name: str, count: int) -> list[bytes]:
    return [random.Random(f"{name} {index}").randbytes(16) for index in range(count)]


def ask(
    policy: CachePolicy,
    prompt: list[bytes],
    answer: list[bytes],
    *,
    found: int = 0,
    tenant: str = "",
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
    )
    return policy.keep(view)


def test_everything_keeps_outputs() -> None:
    assert ask(Everything(), blocks("a", 3), blocks("answer", 2)) == 5


@pytest.mark.parametrize(
    ("tokens", "tenant", "kept"),
    [(8, "a", 2), (4, "a", 0), (40, "a", 10), (44, "a", 0), (8, "b", 0), (8, "", 0)],
)
def test_matching_keeps_tenants_and_lengths(tokens: int, tenant: str, kept: int) -> None:
    policy = Matching(tenants=("a",), tokens_min=8, tokens_max=40)
    assert ask(policy, blocks("p", tokens // 4), [], tenant=tenant) == kept


def test_matching_keeps_all_without_fields() -> None:
    assert ask(Matching(), blocks("p", 2), blocks("answer", 1), tenant="any") == 3
