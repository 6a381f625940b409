"""One suite for every registered policy: for any view, its decision is one that the kernel can carry out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import msgspec
import pytest

from vsched.plugins import (
    RegisteredPolicy,
    check_contract,
    list_policies,
    load_policy_class,
    resolve_policy,
)
from vsched.policy import (
    SEVERAL,
    Admission,
    AdmissionView,
    CachePolicy,
    EncodingView,
    ImagePolicy,
    ItemSpan,
    Policy,
    PreemptionView,
    RequestPolicy,
    WaitingEntry,
    decisions_of,
)

REGISTERED = list_policies()
FIELDS: dict[str, dict[str, Any]] = {"pinned": {"tokens": 64}}
"""Values for fields without defaults, by policy."""
ROUNDS = 200
View = TypeVar("View", AdmissionView, PreemptionView)


def make(policy: RegisteredPolicy) -> Policy:
    return resolve_policy(policy.kind, {"use": policy.name, **FIELDS.get(policy.name, {})})


def with_state(view: View, policy: Policy) -> View:
    """Return the view with a fresh state, if the policy has one."""
    if policy.state_type is None:
        return view
    return msgspec.structs.replace(view, state=policy.state_type())


def every(kind: str) -> pytest.MarkDecorator:
    chosen = [
        policy
        for policy in REGISTERED
        if policy.kind == kind
        or (
            policy.kind == SEVERAL and kind in decisions_of(load_policy_class(SEVERAL, policy.name))
        )
    ]
    assert chosen, f"no {kind} policy is registered; is the project installed?"
    return pytest.mark.parametrize("registered", chosen, ids=[policy.name for policy in chosen])


def admission_view(rng: random.Random) -> AdmissionView:
    waiting = [
        WaitingEntry(
            tokens=rng.choice([None, 1, 7, 100, 5000]),
            blocks=rng.randrange(9),
            priority=rng.randrange(3),
            arrived_ns=position,
            target_ns=rng.choice([None, 0, 999, 10**9]),
            tenant=rng.choice(["", "a", "b"]),
        )
        for position in range(rng.randrange(1, 12))
    ]
    return AdmissionView(
        stage=rng.choice(["encode", "generate"]),
        now_ns=rng.choice([1_000, 10**9, 10**11]),
        waiting=waiting,
        tokens_free=rng.choice([1, 10, 2048]),
        entries_free=rng.randrange(1, 9),
        blocks_free=rng.randrange(100),
        running=0,
        divisible=rng.choice([True, False]),
        default_tokens=rng.choice([1, 64, 2048]),
    )


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


@every("admission")
def test_admission_proposes_what_can_be_enacted(registered: RegisteredPolicy) -> None:
    policy = cast("RequestPolicy", make(registered))
    rng = random.Random(registered.name)
    for _ in range(ROUNDS):
        view = admission_view(rng)
        admission = policy.admit(with_state(view, policy))
        assert isinstance(admission, Admission)
        indices = list(admission.indices)
        assert len(set(indices)) == len(indices) <= view.entries_free
        assert all(0 <= index < len(view.waiting) for index in indices)
        assert indices or (admission.hold_until_ns or 0) > view.now_ns, (
            "nothing runs, nothing joins"
        )
        unknown = [index for index in indices if view.waiting[index].tokens is None]
        assert not unknown or indices == unknown[:1], "an entry of unknown size runs alone"
        again = policy.admit(with_state(view, policy))
        assert again == admission, "the same view, the same answer"


@every("encoding")
def test_encoding_selects_items_that_are_not_ready(registered: RegisteredPolicy) -> None:
    policy = cast("ImagePolicy", make(registered))
    rng = random.Random(registered.name)
    for _ in range(ROUNDS):
        edges = sorted(rng.sample(range(1000), 2 * rng.randrange(1, 6)))
        items = [
            ItemSpan(start, stop, rng.choice([True, False]))
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]
        start = rng.randrange(900)
        view = EncodingView(
            items=items,
            chunk_start=start,
            chunk_stop=start + rng.randrange(1, 100),
            chunk_tokens=100,
            prompt_tokens=1000,
            arriving=rng.choice([True, False]),
        )
        chosen = list(policy.select(view))
        assert len(set(chosen)) == len(chosen)
        assert all(not items[index].ready for index in chosen)


@every("eviction")
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
