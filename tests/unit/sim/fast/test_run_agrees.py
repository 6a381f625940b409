"""The fast simulator and the model cluster agree: the same results, and the same decisions.

The model cluster checks every KV position and every embedding that is read, so any run that it accepts was possible.
Here it observes a simulation: when a step of the simulation ends, the model group computes it by itself and must reach
the same result; then its own kernel, which gets that result, must send the same commands.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.failures import EncodeErrorKind
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, Decide
from vsched.kernel.decisions import GenerateDecision
from vsched.kernel.events import (
    Arrived,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    Stepped,
    Submitted,
)
from vsched.sim.fast.groups import GroupOutage
from vsched.sim.fast.simulation import simulate
from vsched.sim.setup import Setup, prepare
from vsched.testing.cluster import TICK_NS, ModelCluster

MS = 1_000_000

SWAPPED = ("generate.preemption={use='swap-long',tokens_min=0}", "generate.swap_memory=256KiB")


class Shadow:
    """A model cluster that gets the events of the simulation."""

    def __init__(self, setup: Setup) -> None:
        self.cluster = ModelCluster(setup.limits, setup.policies.for_kernel())
        self.steps = 0
        self.swapped = 0

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        if isinstance(event, GroupReady) and event.group not in self.cluster.down:
            return  # the cluster is up from the start
        self.cluster.now_ns = now_ns - TICK_NS
        wanted = self.send(event)
        assert plain(wanted) == plain(commands)

    def send(self, event: Event) -> list[Command]:
        cluster = self.cluster
        match event:
            case Arrived():
                cluster.now_ns += TICK_NS
                return cluster.kernel.handle(event, cluster.now_ns)
            case Submitted():
                return cluster.hand_in(event)
            case Stepped(step, tokens, finished, busy_ns, group):
                result, _ = cluster.generators[group].step()
                assert result.step == step
                assert [token >= 0 for token in result.tokens] == [token >= 0 for token in tokens]
                assert result.finished == finished
                self.steps += 1
                assert result.swap_blocks == event.swap_blocks
                self.swapped += event.swap_blocks
                times = {"busy_ns": busy_ns, "swap_ns": event.swap_ns}
                return cluster.send(msgspec.structs.replace(result, **times))
            case Encoded(group=group):
                return self.encoded(group, None)
            case EncodeFailed(group=group, failure=failure):
                return self.encoded(group, failure)
            case GroupLost(group=group):
                cluster.down.add(group)
                if group in cluster.generators:
                    cluster.generators[group].lose()
                else:
                    cluster.encode_logs[group].clear()
            case GroupReady(group=group):
                cluster.down.discard(group)
            case _:
                raise AssertionError(f"no timers here: {event}")
        return cluster.send(event)

    def encoded(self, group: str, fail: EncodeErrorKind | None) -> list[Command]:
        cluster = self.cluster
        decision = cluster.encode_logs[group].popleft()
        if fail:
            return cluster.send(EncodeFailed(decision.step, fail, group))
        for task in decision.tasks:
            cluster.arena.encode(task)
        return cluster.send(Encoded(decision.step, group))


def plain(commands: Sequence[Command]) -> list[Command]:
    """Return commands without the tokens that ranks are sent: the simulated groups all yield the same one."""
    found: list[Command] = []
    for command in commands:
        if isinstance(command, Decide) and isinstance(command.decision, GenerateDecision):
            joined = [msgspec.structs.replace(join, data=None) for join in command.decision.joined]
            decision = msgspec.structs.replace(command.decision, joined=joined)
            command = Decide(command.group, decision)
        found.append(command)
    return found


TWO, PACED = ("generate.replicas=2", "encode.replicas=2"), ("generate.step_target_ms=3",)
OUTAGES = (
    GroupOutage(group="generate", at_ns=50 * MS, duration_ns=30 * MS),
    GroupOutage(group="encode", at_ns=100 * MS, duration_ns=10 * MS),
)
MORE = (
    *((1, (), ()), (0, SWAPPED, ()), (1, (), OUTAGES)),
    *((seed, sets, ()) for seed in (0, 1) for sets in (TWO, PACED)),
)


@pytest.mark.parametrize(
    ("seed", "sets", "outages"),
    [
        *((0, (), ()), (1, SWAPPED, ()), (0, (), OUTAGES)),
        *(pytest.param(*row, marks=pytest.mark.thorough) for row in MORE),
    ],
)
def test_run_agrees_with_model_cluster(
    seed: int, sets: tuple[str, ...], outages: Sequence[GroupOutage]
) -> None:
    settings = config(*SCARCE, *sets)
    shadow = Shadow(prepare(settings, COST))
    outcome = simulate(
        settings, scarce(seed), cost=COST, observers=[shadow], oracles=True, outages=outages
    )
    figures = outcome.figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    if not outages:
        assert not figures.failed
        assert shadow.steps == figures.generate_steps > 100
        assert figures.preemptions, "nothing is scarce"
    assert (shadow.swapped > 0) == (sets == SWAPPED)
