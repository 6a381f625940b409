"""One policy that makes several decisions: configuration, one state for all of them, snapshots."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from vsched.config import load_config
from vsched.config.document import to_toml
from vsched.errors import ConfigError, PolicyError
from vsched.plugins import check_contract
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    PositiveCount,
    RequestPolicy,
)
from vsched.testing import run_random
from vsched.testing.cluster import default_policies


class Counts(msgspec.Struct):
    arrived: int = 0
    admitted: int = 0


class Counting(RequestPolicy, frozen=True, kw_only=True):
    """Counts arrivals in one method and admissions in another."""

    state_type = Counts
    most: PositiveCount = 8

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        view.state.arrived += 1
        return Admit()

    def admit(self, view: AdmissionView) -> Admission:
        count = min(len(view.waiting), max(view.entries_free, 1))
        view.state.admitted += count
        return Admission(range(count))


USE = f"policy.use={__name__}:Counting"


def load(*sets: str) -> Any:
    return load_config(None, sets=sets, environ={})


def decided_by(policies: Any) -> list[str]:
    return [path for path, policy in policies.by_table.items() if isinstance(policy, Counting)]


def test_policy_table_decides_for_its_methods_or_its_seats() -> None:
    policies = load(USE, "policy.most=3").policies
    assert decided_by(policies) == ["arrival", "encode.admission", "generate.admission"]
    assert decided_by(load(USE, 'policy.seats=["arrival"]').policies) == ["arrival"]
    kernel = policies.for_kernel()
    arriving, admission = kernel.by_table["arrival"], kernel.by_table["generate.admission"]
    assert arriving is admission is kernel.several == Counting(most=3)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([USE, 'policy.seats=["generate.step"]'], "policy.seats: not tables for which"),
        ([USE, "policy.seats=[]"], "policy.seats: not tables for which"),
        ([USE, "policy.seats=7"], "policy.seats: not tables for which"),
        ([USE, "policy.fly=7"], "policy.fly: unknown field of"),
        (["policy.most=7"], "policy.use: no policy is named"),
        (
            [USE, "generate.admission.use=priority"],
            "generate.admission: both this table and policy",
        ),
    ],
)
def test_policy_table_refuses_input_that_it_cannot_decide(sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*sets)
    assert str(caught.value).startswith(expected)


def test_configuration_with_a_policy_table_is_written_and_read_again(tmp_path: Any) -> None:
    loaded = load(USE, "policy.most=3", 'policy.seats=["arrival"]')
    path = tmp_path / "config.toml"
    path.write_text(to_toml(loaded))
    again = load_config(path, environ={})
    assert again.config.policy == loaded.config.policy
    assert again.policies.for_kernel() == loaded.policies.for_kernel()


def test_class_without_a_method_or_with_a_hidden_one_is_refused() -> None:
    empty = msgspec.defstruct("Empty", [], bases=(RequestPolicy,), frozen=True, kw_only=True)
    hidden = msgspec.defstruct(
        "Hidden", [("share", int, 1)], bases=(Counting,), frozen=True, kw_only=True
    )
    with pytest.raises(PolicyError, match="overrides no method"):
        check_contract(empty, "policy")
    with pytest.raises(PolicyError, match="the field `share` hides a method"):
        check_contract(hidden, "admission")


def test_answers_of_the_base_class_are_valid_for_the_kernel() -> None:
    """What a subclass does not override decides as the kernel's defaults do."""
    policies = default_policies(
        arrival=RequestPolicy(), step=RequestPolicy(), preemption=RequestPolicy()
    )
    cluster = run_random(random.Random(3), policies)
    assert not cluster.kernel.statistics()["policy_faults"]
