"""What the built-in policies for routing and preemption decide, case by case."""

from __future__ import annotations

from vsched.policy import (
    PreemptionView,
    ReplicaView,
    RoutingView,
    RunningView,
)
from vsched_policies.preemption import Youngest
from vsched_policies.routing import RoundRobin


def test_round_robin_takes_the_healthy_in_turn() -> None:
    def choose(healthy: list[bool]) -> list[int]:
        replicas = [
            ReplicaView(index=index, load_tokens=0, healthy=well)
            for index, well in enumerate(healthy)
        ]
        return [
            RoundRobin().choose(
                RoutingView(replicas=replicas, prompt_tokens=1, item_keys=[], routed=routed)
            )
            for routed in range(4)
        ]

    assert choose([True, True, True]) == [0, 1, 2, 0]
    assert choose([True, False, True]) == [0, 2, 0, 2]
    assert choose([False, False]) == [0, 1, 0, 1]


def test_youngest_takes_the_last() -> None:
    running = [
        RunningView(tokens=1, blocks=1, outputs=0, priority=0, arrived_ns=index)
        for index in range(3)
    ]
    assert Youngest().victim(PreemptionView(now_ns=9, running=running)) == 2
