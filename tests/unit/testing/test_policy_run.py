"""`run_policy` serves a few requests with one policy, and shows what became of them."""

from __future__ import annotations

import msgspec
import pytest

from vsched.errors import PolicyError
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    MemoryPolicy,
    Preemption,
    PreemptionView,
    RequestPolicy,
    Shed,
)
from vsched.testing import RequestAt, default_policies, run_policy
from vsched_policies.requests import TenantFair


class Seen(msgspec.Struct):
    arrived: int = 0
    joined: int = 0


class LastFirst(RequestPolicy, frozen=True, kw_only=True):
    """Admits the newest first, turns a tenant away, and counts both."""

    state_type = Seen
    unwanted: str = "unwanted"

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        view.state.arrived += 1
        return Shed("not today") if view.request.tenant == self.unwanted else Admit()

    def admit(self, view: AdmissionView) -> Admission:
        newest = range(len(view.waiting) - 1, -1, -1)[: view.entries_free]
        if view.stage == "generate":
            view.state.joined += len(newest)
        return Admission(newest)


def test_run_policy_shows_order_times_states_and_rejections() -> None:
    run = run_policy(
        LastFirst(),
        RequestAt(output_tokens=100),
        RequestAt(at_s=0.1),
        RequestAt(at_s=0.2, name="late", images=(64,)),
        RequestAt(at_s=0.3, tenant="unwanted"),
        slots=1,
        step_ms=10,
    )
    assert run.joined == ["1", "late", "2"]
    assert list(run.times) == ["1", "late", "2"]
    assert run.times["1"].first_token_ns == pytest.approx(10e6, abs=1e6)
    assert run.times["1"].finished_ns == pytest.approx(1e9, abs=2e7)
    assert run.times["late"].encoded_items == 1
    assert run.rejected == {"4": "not today"}
    assert run.states["generate.admission"] == Seen(arrived=4, joined=3)
    assert run.statistics["finished"]["length"] == 3
    held = TenantFair(rate=1, burst=1, wait_s=2)
    run = run_policy(held, RequestAt(), RequestAt(), RequestAt(at_s=9))
    assert run.times["2"].first_token_ns == pytest.approx(1.01e9, abs=1e6), "not as the next comes"


def test_run_policy_lists_a_preempted_request_again() -> None:
    class Oldest(RequestPolicy, frozen=True, kw_only=True):
        def victim(self, view: PreemptionView) -> Preemption:
            return Preemption(len(view.running) - 1)

    requests = [RequestAt(text_tokens=30, output_tokens=60) for _ in range(2)]
    run = run_policy(Oldest(), *requests, blocks=8)
    assert run.joined == ["1", "2", "2"]
    assert run.times["2"].preemptions == 1
    with pytest.raises(PolicyError, match="requests have one name: a, a"):
        run_policy(Oldest(), RequestAt(name="a"), RequestAt(name="a"))


def test_run_policy_names_the_line_of_a_failure() -> None:
    class Broken(RequestPolicy, frozen=True, kw_only=True):
        def admit(self, view: AdmissionView) -> Admission:
            raise ZeroDivisionError("broken")

    with pytest.raises(PolicyError, match=r"Broken failed at test_policy_run.py:\d+") as caught:
        run_policy(Broken(), RequestAt())
    assert any("in admit" in note for note in caught.value.__notes__)


def test_default_policies_put_a_policy_at_all_its_seats() -> None:
    policies = default_policies(LastFirst())
    arriving, encoding = (policies.by_table[one] for one in ("arrival", "encode.admission"))
    assert arriving is policies.several is encoding
    assert default_policies().several is None
    with pytest.raises(PolicyError, match="overrides no method"):
        default_policies(MemoryPolicy())
