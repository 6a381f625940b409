"""Policies by name: resolution, strict conversion, the contract check, and one policy for several decisions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from vsched.config import load_config
from vsched.config.document import to_toml
from vsched.errors import ConfigError, PolicyError
from vsched.plugins import check_contract, describe_policy, list_policies, resolve_policy
from vsched.policy import (
    DECISIONS,
    SEVERAL,
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    Fraction,
    PositiveCount,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
)
from vsched.testing import run_random
from vsched.testing.cluster import default_policies
from vsched.types import FinishReason


class Whole(RequestPolicy, frozen=True, kw_only=True):
    """Takes the front.

    A second paragraph.
    """

    part: Fraction = 0.5
    most: PositiveCount
    end: FinishReason = FinishReason.STOP

    def admit(self, look: AdmissionView, *, extra: int = 0) -> Admission:
        return Admission([0] * (extra + 1))


class Silent(RequestPolicy, frozen=True, kw_only=True):
    pass


class Greedy(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView, more: int) -> Admission:  # type: ignore[override]
        return Admission([more])


class Lazy(RequestPolicy, frozen=True, kw_only=True):
    async def admit(self, view: AdmissionView) -> Admission:  # type: ignore[override]
        return Admission()


class Fixed(RequestPolicy, frozen=True, kw_only=True):
    @staticmethod
    def admit(view: AdmissionView) -> Admission:
        return Admission()


Hidden = msgspec.defstruct("Hidden", [("share", int, 1)], bases=(Silent,), frozen=True)
Used = msgspec.defstruct("Used", [("use", str, "x")], bases=(Whole,), frozen=True, kw_only=True)
Thawed = msgspec.defstruct("Thawed", [], bases=(Silent,), frozen=False)


class Newer(RequestPolicy, frozen=True, kw_only=True):
    api_version: ClassVar[int] = 2

    def admit(self, view: AdmissionView) -> Admission:
        return Admission()


class Router(RoutingPolicy, frozen=True, kw_only=True):
    def choose(self, view: RoutingView) -> int:
        return 0


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Silent, "Silent: method `admit` is missing; define `admit(self, view:"),
        (Greedy, "Greedy.admit: takes `(self, view: 'AdmissionView', more: 'int')"),
        (Lazy, "Lazy.admit: must return a plain value"),
        (Fixed, "Fixed.admit: a staticmethod, not a method"),
        (Thawed, "Thawed: not frozen; declare it `class Thawed(..., frozen=True)`"),
        (Hidden, "Hidden: the field `share` hides a method"),
        (Used, "Used: the field `use` cannot be set"),
        (Newer, "Newer: made for version 2 of RequestPolicy, this is version 3"),
        (Router, "not a subclass of vsched.policy.RequestPolicy (its bases: RoutingPolicy)"),
        (int, "builtins.int: not a subclass of"),
        (3, "3: not a class; admission policies subclass vsched.policy.RequestPolicy"),
    ],
)
def test_check_contract_names_class_method_and_difference(cls: object, expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        check_contract(cls, "admission")
    assert expected in str(caught.value)


def test_check_contract_accepts_other_names_and_optional_arguments() -> None:
    assert check_contract(Whole, "admission") is Whole


def test_resolve_policy_by_module_and_class() -> None:
    table = {"use": "vsched_policies.admission:TokenBudget", "max_tokens": 5}
    policy = resolve_policy("admission", table)
    assert type(policy).__name__ == "TokenBudget"
    assert policy == resolve_policy("admission", {"use": "token-budget", "max_tokens": 5})


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "a.b.use: no policy is named. Known in vsched.admission: "),
        ({"use": ""}, "a.b.use: no policy is named."),
        ({"use": "nope"}, "a.b.use: 'nope' is unknown. Known in vsched.admission: "),
        (
            {"use": "no_such_module:Class"},
            "a.b.use: cannot import 'no_such_module:Class': No module named 'no_such_module'. Remedy: install",
        ),
        ({"use": "vsched_policies.admission:Nope"},
         "a.b.use: cannot import 'vsched_policies.admission:Nope': module"),
        (
            {"use": "vsched_policies.admission:Fiffo"},
            (
                "a.b.use: cannot import 'vsched_policies.admission:Fiffo': module 'vsched_policies.admission' "
                "has no attribute 'Fiffo'. Remedy: name an attribute of the module. Did you mean Fifo?"
            ),
        ),
        ({"use": ":"}, "a.b.use: cannot import ':'"),
        ({"use": f"{__name__}:Whole"}, "a.b.most: a field of '"),
        ({"use": "fifo", "x": 1}, "a.b.x: unknown field of 'fifo'. Its fields: "),
        ({"use": "token-budget", "max_items": "8"}, "a.b.max_items is not valid: value '8', limit"),
        ({"use": "tenant-fair", "rates": {"a": 0}},
         "a.b.rates is not valid: value {'a': 0}, limit object (Expected `float` > 0.0 - at `$[...]`)"),
        ({"use": f"{__name__}:Whole", "most": 1, "end": "never"},
         "a.b.end is not valid: value 'never', limit 'abort' or 'error' or 'length' or 'stop'."),
    ],
)  # fmt: skip
def test_resolve_policy_refusal_starts_with_the_key(table: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_policy("admission", table, path="a.b")
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def admit(:\n", r"SyntaxError: .*\(a_faulty_module.py, line 1\). Remedy: "),
        ("\nAdmision()\n", r"NameError: .*/a_faulty_module.py, line 2\). Remedy: "),
        ("raise SystemExit(3)\n", r"SystemExit: 3 .*/a_faulty_module.py, line 1\). Remedy: "),
    ],
)
def test_resolve_policy_names_the_line_of_a_module_that_cannot_be_imported(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_faulty_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"a.b.use: cannot import 'a_faulty_module:A': {message}"):
        resolve_policy("admission", {"use": "a_faulty_module:A"}, path="a.b")


UNBUILT = """
from vsched.policy import RequestPolicy


class A(RequestPolicy):
    def __post_init__(self):
        raise OSError("no file")

    def admit(self, view): ...
"""


def test_resolve_policy_names_the_line_of_a_class_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_unbuilt_module.py").write_text(UNBUILT)
    monkeypatch.syspath_prepend(tmp_path)
    words = r"a.b: 'an_unbuilt_module:A' cannot be built: OSError: no file \(.*/an_unbuilt_module.py, line 7\)"
    with pytest.raises(ConfigError, match=words):
        resolve_policy("admission", {"use": "an_unbuilt_module:A"}, path="a.b")


def test_resolve_policy_refuses_a_class_of_another_kind() -> None:
    table = {"use": "vsched_policies.routing:RoundRobin"}
    with pytest.raises(
        PolicyError, match=r"^a\.b\.use: .*RoundRobin: not a subclass of .*RequestPolicy"
    ):
        resolve_policy("admission", table, path="a.b")


def test_list_policies_reports_kind_fields_and_summary() -> None:
    listed = {(policy.kind, policy.name): policy for policy in list_policies()}
    assert list(dict.fromkeys(kind for kind, _ in listed)) == [*DECISIONS, SEVERAL]
    budget = listed["admission", "token-budget"]
    assert budget.error is None
    fields = [(field.name, field.type, field.default) for field in budget.fields]
    assert ("max_tokens", "int, 0 or more", None) in fields
    assert ("max_items", "int, 1 or more", None) in fields
    assert budget.summary.startswith("Admits in order of arrival until")
    assert listed["memory", "pinned"].fields[0].type == "number, above 0, at most 1"
    whole = describe_policy(f"{__name__}:Whole")
    required = [(field.name, field.required) for field in whole.fields]
    assert required == [("part", False), ("most", True), ("end", False)]


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
        ([USE, "generate.admission.use=priority"], "generate.admission: both this table and"),
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


def test_answers_of_the_base_class_are_valid_for_the_kernel() -> None:
    """What a subclass does not override decides as the kernel's defaults do."""
    base = RequestPolicy()
    policies = default_policies(arrival=base, step=base, preemption=base)
    cluster = run_random(random.Random(3), policies)
    assert not cluster.kernel.statistics()["policy_faults"]
