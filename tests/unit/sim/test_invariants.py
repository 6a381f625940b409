"""The oracles detect a broken kernel: each fails when its own property is broken.

The kernel's own checks are switched off here, so that the oracles have to detect the error.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.sim.planted import Plant, planted
from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.kernel import Scheduler
from vsched.sim.fast.simulation import simulate
from vsched.sim.invariants import Oracles, SimulationFailed
from vsched.sim.setup import prepare

HANDLE = "vsched.kernel.scheduler:Scheduler.handle"
FINISHED = "[one for one in commands if type(one).__name__ == 'Finish']"
BREAKS = {
    Plant(
        "blocks freed twice",
        "vsched.kernel.generate.blocks:BlockPool.release_blocks",
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


def simulate_all() -> None:
    for seed in range(20):
        simulate(config(*SCARCE), scarce(seed), cost=COST, seed=seed, oracles=True)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda one: one.name)
def test_oracles_notice(broken: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check_invariants", lambda _: None)
    with planted(broken), pytest.raises(SimulationFailed, match=BREAKS[broken]) as failure:
        simulate_all()
    assert "event " in str(failure.value)
    assert "seed " in str(failure.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"batch_tokens": 20}, "tokens in a step"),
        ({"chunk_tokens": 8}, "a chunk is too long"),
        ({"slots": 2}, "requests run"),
        ({"encode_items": 1}, "images in a step"),
        ({"generate_depth": 1}, "steps are out"),
        ({"waiting_ns": 1_000_000}, "has waited for"),
        ({}, "image tokens in a step"),
    ],
)
def test_oracles_know_the_limits(field: dict[str, int], message: str) -> None:
    """A kernel with larger limits than the oracles know exceeds them."""
    sets = () if field else ("encode.admission.max_tokens=60",)
    setup = prepare(config(*SCARCE, *sets), COST)
    smaller = msgspec.structs.replace(setup.limits, **field)
    oracles = Oracles(msgspec.structs.replace(setup, limits=smaller))
    with pytest.raises(SimulationFailed, match=message):
        simulate(config(*SCARCE), scarce(1), cost=COST, observers=[oracles])


def test_oracles_change_nothing() -> None:
    plain, checked = (
        simulate(config(*SCARCE), scarce(2), cost=COST, oracles=oracles)
        for oracles in (False, True)
    )
    assert plain.digest == checked.digest
    assert plain.figures == checked.figures
