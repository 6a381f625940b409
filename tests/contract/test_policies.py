"""One suite for every registered policy; see `test_policies_in_kernel` for their decisions in random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, cast

import msgspec
import pytest

from vsched.plugins import (
    RegisteredPolicy,
    check_contract,
    list_policies,
    load_policy_class,
    resolve_policy,
)
from vsched.policy import CachePolicy, Policy

REGISTERED = list_policies()
FIELDS: dict[str, dict[str, Any]] = {"pinned": {"tokens": 64}}
"""Values for fields without defaults, by policy."""
ROUNDS = 200


def make(policy: RegisteredPolicy) -> Policy:
    return resolve_policy(policy.kind, {"use": policy.name, **FIELDS.get(policy.name, {})})


@pytest.mark.parametrize(
    "registered", REGISTERED, ids=lambda policy: f"{policy.kind}-{policy.name}"
)
def test_policy_meets_its_contract(registered: RegisteredPolicy) -> None:
    assert registered.error is None
    cls = load_policy_class(registered.kind, registered.name)
    assert check_contract(cls, registered.kind) is cls
    assert registered.summary
    assert registered.summary.endswith(".")
    policy = make(registered)
    assert msgspec.convert(msgspec.to_builtins(policy), cls) == policy, "fields are its whole state"


@pytest.mark.parametrize(
    "registered",
    [policy for policy in REGISTERED if policy.kind == "eviction"],
    ids=lambda policy: policy.name,
)
def test_eviction_order_names_only_what_it_holds(registered: RegisteredPolicy) -> None:
    order = cast("CachePolicy", make(registered)).build_order()
    rng = random.Random(registered.name)
    held: dict[Hashable, None] = {}
    key: Hashable
    for step in range(ROUNDS):
        action = rng.randrange(4)
        if action < 2 or not held:
            # New entries, entries that were evicted before, and entries in use.
            key = rng.randrange(ROUNDS // 4) if rng.random() < 0.5 else ROUNDS + step
            if key not in held and order.add(key, rng.randrange(1, 9)):
                held[key] = None
        elif action == 2:
            key = rng.choice(list(held))
            cast("Callable[[Hashable], None]", rng.choice([order.reuse, order.drop]))(key)
            del held[key]
        else:
            key = order.victim()
            assert key in held
            assert order.victim() == key, "naming a victim does not remove it"
            order.drop(key)
            del held[key]
        assert len(order) == len(held)
        assert sorted(map(str, order)) == sorted(map(str, held))
