"""Groups of the fast simulator: links to other hosts, contention for cores, and outages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
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
from vsched.sim.cost.model import CostModel, HostCost
from vsched.sim.fast.groups import GroupOutage
from vsched.sim.fast.simulation import simulate
from vsched.sim.setup import Setup, prepare
from vsched.sim.workload.requests import Image, Text, workload_of
from vsched.testing.cluster import TICK_NS, ModelCluster

MS = 1_000_000
TOGETHER = 'placement="together"'


def slowed_down(*contention: float) -> CostModel:
    host: HostCost = msgspec.structs.replace(COST.host, contention=contention)
    return msgspec.structs.replace(COST, host=host)


@pytest.mark.parametrize(
    "placement", ["separate", pytest.param("together", marks=pytest.mark.thorough)]
)
def test_simulation_with_contention_takes_longer_and_repeats(placement: str) -> None:
    settings = config(*SCARCE, f"placement={placement}")
    plain, alike, slow, again = (
        simulate(settings, scarce(1), cost=slowed_down(*contention), oracles=True)
        for contention in ((), (1.0, 1.0, 1.0), (1.0, 1.8, 2.5), (1.0, 1.8, 2.5))
    )
    assert alike.digest == plain.digest
    assert slow.digest == again.digest != plain.digest
    assert slow.figures.finished == plain.figures.finished == 40
    assert slow.figures.span_s > plain.figures.span_s


@pytest.mark.parametrize("images", [1, 2])
def test_simulation_slows_decoding_while_images_are_prepared(images: int) -> None:
    """One request decodes, alone, except for images that take threads of the engine 20 ms, and twice that together."""
    host = HostCost(image_ns=20_000_000, contention=(1.0, 2.0, 9.0))
    cost = msgspec.structs.replace(COST, host=host)
    long = arrival(0, 0.0, Text(0, 10), outputs=100)
    others = [
        arrival(number, 10.0, Image(f"{number}", 16), Text(number, 10), outputs=1)
        for number in range(1, 1 + images)
    ]
    alone = simulate(config(), workload_of("", [long]), cost=cost).figures.e2e_ms.p99
    beside = simulate(config(), workload_of("", [long, *others]), cost=cost).figures.e2e_ms.p99
    assert alone + 15 < beside < alone + 30, "the threads are one process"


@pytest.mark.parametrize(
    ("outage", "sets", "codes"),
    [
        (GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS), [], set()),
        (GroupOutage(group="encode", at_ns=10 * MS, duration_ns=90 * MS), [], set()),
        (GroupOutage(group="generate", at_ns=30 * MS), [], {"given_up"}),
        (GroupOutage(group="generate-1", at_ns=30 * MS), ["generate.replicas=2"], set()),
        (GroupOutage(group="encode", at_ns=30 * MS, duration_ns=20 * MS), [TOGETHER], set()),
    ],
    ids=["generate", "encode", "the only group for good", "one of two for good", "shared process"],
)
def test_outage_ends_requests_only_without_another_group(
    outage: GroupOutage, sets: list[str], codes: set[str]
) -> None:
    settings = config(*SCARCE, *sets)
    figures = simulate(settings, scarce(3), cost=COST, outages=[outage], oracles=True).figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    assert set(figures.failed) == codes


def test_outage_takes_time_and_must_be_of_a_known_group() -> None:
    lost = GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)
    plain, longer = (
        simulate(config(*SCARCE), scarce(3), cost=COST, outages=outages).figures
        for outages in ([], [lost])
    )
    assert 0.05 < longer.span_s - plain.span_s < 0.2
    assert longer.itl_ms.p99 >= plain.itl_ms.p99
    with pytest.raises(ConfigError, match="generate-7: no such group. Known: encode, generate"):
        simulate(config(), scarce(0), cost=COST, outages=[GroupOutage(group="generate-7", at_ns=0)])


def test_overlapping_outages_are_one() -> None:
    """Of two groups that share a process as well: both are lost, once."""
    settings = config(*SCARCE, TOGETHER, "encode.replicas=2", "generate.replicas=2")
    overlapping = [
        GroupOutage(group=group, at_ns=at_ms * MS, duration_ns=30 * MS)
        for group, at_ms in (("generate-1", 60), ("encode-1", 50), ("generate-1", 10))
    ]
    whole = [
        GroupOutage(group="encode-1", at_ns=10 * MS, duration_ns=30 * MS),
        GroupOutage(group="encode-1", at_ns=50 * MS, duration_ns=40 * MS),
    ]
    one, same = (
        simulate(settings, scarce(3), cost=COST, outages=outages, oracles=True)
        for outages in (overlapping, whole)
    )
    assert one.figures.finished == one.figures.requests == 40
    assert one.digest == same.digest


# --- the fast simulator and the model cluster agree: the same results, and the same decisions ---

# The model cluster checks every KV position and every embedding that is read, so any run that it accepts was possible.
# Here it observes a simulation: when a step of the simulation ends, the model group computes it by itself and must
# reach the same result; then its own kernel, which gets that result, must send the same commands.


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
                    cluster.generators[group].restart_rank()
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
