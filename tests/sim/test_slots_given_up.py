"""The swarm with an admission policy that takes slots from running requests: faults, losses and swaps in between."""

from __future__ import annotations

from typing import get_args

import pytest

from vsched.policy import Admission, AdmissionView, PreemptionMode, RequestPolicy
from vsched.sim.cluster.scenario import swarm

SCENARIOS = 12
victims: list[int] = []
"""Number of requests that each call of the policy preempted."""


class HighestFirst(RequestPolicy, frozen=True, kw_only=True):
    """Requests of a higher priority join first, and take the slots of all of a lower one."""

    preempts = True
    mode: PreemptionMode = "recompute"

    def admit(self, view: AdmissionView) -> Admission:
        waiting, running = view.waiting, view.running_requests
        order = sorted(range(len(waiting)), key=lambda index: -waiting[index].priority)
        joining, left = order[: view.entries_free], order[view.entries_free :]
        lower = sorted(view.eligible, key=lambda index: running[index].priority)
        preempted: list[int] = []
        for index, victim in zip(left, lower, strict=False):
            if waiting[index].priority <= running[victim].priority:
                break
            joining.append(index)
            preempted.append(victim)
        victims.append(len(preempted))
        return Admission(joining, preempt=preempted, mode=self.mode)


@pytest.mark.parametrize("mode", get_args(PreemptionMode))
def test_swarm_passes_while_requests_give_up_their_slots(mode: PreemptionMode) -> None:
    victims.clear()
    table = {"use": f"{__name__}:HighestFirst", "mode": mode}
    outcome = swarm(SCENARIOS, seed=500, policies={"generate.admission": table})
    assert not outcome.failures, outcome.failures[0]
    assert sum(victims) > 3, "hardly any request gave up its slot"
    assert outcome.losses > 5, "hardly any group was lost"


def test_no_place_of_a_joining_request_is_written_in_the_same_step() -> None:
    """Found by the swarm: the next request took a slot, and the swapped blocks of its victim came first."""
    table = {"use": f"{__name__}:HighestFirst", "mode": "swap"}
    outcome = swarm(1, seed=3151, policies={"generate.admission": table})
    assert not outcome.failures, outcome.failures[0]
