"""The oracles detect a broken kernel: each fails when its own property is broken.

The kernel's own checks are switched off here, so that the oracles have to detect the error.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.sim.planted import Plant, planted
from tests.unit.sim.shapes import COST, SCARCE, TINY, config, scarce
from vsched.kernel import Scheduler
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.fast.simulation import simulate
from vsched.sim.invariants import Oracles, SimulationFailed
from vsched.sim.setup import prepare

HANDLE = "vsched.kernel.scheduler:Scheduler.handle"
FINISHED = "[one for one in commands if type(one).__name__ == 'Finish']"
BREAKS = {
    Plant(
        "blocks freed twice",
        "vsched.kernel.generate.blocks:BlockPool.release",
        "self._free += free",
        "self._free += 2 * free",
    ): "is given twice|is held already",
    Plant(
        "pages of a reader given away",
        "vsched.kernel.encode.embedding_cache:EmbeddingCache.unpin",
        "entry.pins -= 1",
        "entry.pins -= 1; self.free += entry.pages[:1]",
    ): "given to two images|written while it is read|hold something else",
    Plant(
        "put at the tail",
        "vsched.kernel.generate.group:GenerateGroup._preempt",
        "state.phase = PREEMPTED",
        "state.phase = PREEMPTED; state.order = (state.number + 1000, 0)",
    ): "which is older",
    Plant(
        "last in, first out",
        "vsched_policies.admission:Fifo.admit",
        "pack(view)",
        "pack(view, order=range(len(view.waiting))[::-1])",
    ): "which is older",
    Plant(
        "a reply lost",
        HANDLE,
        "return commands",
        f"return [one for one in commands if one not in {FINISHED} or one.number != 7]",
    ): "never ended|joins after its end|KeyError",
    Plant("a reply doubled", HANDLE, "return commands", f"return commands + {FINISHED}"): (
        "KeyError|terminal reply"
    ),
    Plant(
        "a slot given twice",
        "vsched.kernel.generate.requests:RunningSet.assign_slot",
        "self._free_slots.pop()",
        "self._free_slots[-1]",
    ): "given twice|leaves slot|KeyError|slot",
    Plant(
        "a step sent twice",
        HANDLE,
        "return commands",
        "return commands + [one for one in commands if getattr(one, 'group', '') == 'generate']",
    ): "steps are out|came back|AssertionError|KeyError",
}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda one: one.name)
def test_oracles_notice(broken: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check_invariants", lambda _: None)
    with planted(broken), pytest.raises(SimulationFailed, match=BREAKS[broken]) as failure:
        simulate_all()
    assert "event " in str(failure.value)
    assert "seed " in str(failure.value)


def simulate_all() -> None:
    for seed in range(20):
        simulate(config(*SCARCE), scarce(seed), cost=COST, seed=seed, oracles=True)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"batch_tokens": 20}, "tokens in a step"),
        ({"chunk_tokens": 8}, "a chunk is too long"),
        ({"slots": 2}, "requests run"),
        ({"encode_items": 1}, "images in a step"),
        ({"generate_depth": 1}, "steps are out"),
        ({"waiting_ns": 1_000_000}, "has waited for"),
    ],
)
def test_oracles_know_the_limits(field: dict[str, int], message: str) -> None:
    """A kernel with larger limits than the oracles know exceeds them."""
    setup = prepare(config(*SCARCE), COST)
    smaller = msgspec.structs.replace(setup.limits, **field)
    oracles = Oracles(msgspec.structs.replace(setup, limits=smaller))
    with pytest.raises(SimulationFailed, match=message):
        simulate(config(*SCARCE), scarce(1), cost=COST, observers=[oracles])


def test_oracles_know_the_tokens_of_an_encoder_step() -> None:
    setup = prepare(config(*SCARCE, "encode.admission.max_tokens=60"), COST)
    with pytest.raises(SimulationFailed, match="image tokens in a step"):
        simulate(config(*SCARCE), scarce(1), cost=COST, observers=[Oracles(setup)])


def test_oracles_look_at_everything_as_often_as_they_can_afford(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def count(_: Scheduler) -> None:
        nonlocal calls
        calls += 1

    monkeypatch.setattr(Scheduler, "check_invariants", count)
    setup = prepare(config(*SCARCE), COST)

    def simulate_checked(check_every: int) -> SimulationOutcome:
        oracles = Oracles(setup, check_every=check_every)
        return simulate(config(*SCARCE), scarce(1), cost=COST, observers=[oracles])

    every = simulate_checked(1)
    assert calls == every.events
    calls = 0
    simulate_checked(10)
    assert every.events / 10 <= calls < every.events / 8
    assert Oracles(prepare(config(), COST, info=TINY, kv_tokens=64)).check_every > 1


def test_oracles_change_nothing() -> None:
    plain, checked = (
        simulate(config(*SCARCE), scarce(2), cost=COST, oracles=oracles)
        for oracles in (False, True)
    )
    assert plain.digest == checked.digest
    assert plain.figures == checked.figures
