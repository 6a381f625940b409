"""A policy that needs what a host lacks is refused with a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vsched.errors import PolicyError
from vsched.policy import Admission, AdmissionView, Policy, RequestPolicy
from vsched.policy_host import HostCapabilities, check_capabilities
from vsched_policies.preemption import SwapLong, Youngest

PLAIN = HostCapabilities(
    host="Plain 1.0",
    tables=frozenset({"generate.admission", "generate.preemption"}),
    refused={"generate.step": "its steps are fixed"},
    features=frozenset({"hold"}),
)


class Preempts(RequestPolicy, frozen=True, kw_only=True):
    preempts = True

    def admit(self, view: AdmissionView) -> Admission:
        return Admission()


class Levitates(Preempts, frozen=True, kw_only=True):
    def needs(self) -> Sequence[str]:
        return ("levitation",)


@pytest.mark.parametrize(
    ("policy", "table", "sentence"),
    [
        (
            Preempts(),
            "generate.step",
            "generate.step: not decided by a policy in Plain 1.0: its steps are fixed",
        ),
        (
            Preempts(),
            "routing",
            "Plain 1.0 makes this decision itself. .* or use Preempts in generate.admission",
        ),
        (
            Preempts(),
            "generate.admission",
            r"Preempts needs preemption .* \(preempt\), which Plain 1.0 does not have",
        ),
        (Levitates(), "generate.admission", "'levitation', which is none of hold"),
        (SwapLong(), "generate.preemption", "SwapLong needs swap space"),
        (Youngest(mode="swap"), "generate.preemption", r"Youngest needs .*\(swap\)"),
    ],
)
def test_host_refuses_policies_that_it_cannot_follow(
    policy: Policy, table: str, sentence: str
) -> None:
    with pytest.raises(PolicyError, match=sentence):
        check_capabilities(policy, table, PLAIN)


def test_host_takes_policies_that_need_only_what_it_has() -> None:
    check_capabilities(Youngest(), "generate.preemption", PLAIN)
    check_capabilities(Preempts(), "generate.preemption", PLAIN)  # it never admits there
