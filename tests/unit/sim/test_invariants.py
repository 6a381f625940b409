"""The oracles detect a broken kernel: each fails when its own property is broken.

The kernel's own checks are switched off here, so that the oracles have to detect the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, TINY, config, scarce
from vsched.kernel import Scheduler
from vsched.kernel.commands import Decide, Finish
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.generate.requests import RunningSet
from vsched.policy_host.waiting import OrderedQueue
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.fast.simulation import simulate
from vsched.sim.invariants import Oracles, SimulationFailed
from vsched.sim.setup import prepare

Break = Callable[[pytest.MonkeyPatch], None]


def blocks_freed_twice(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release

    def broken(self: BlockPool, blocks: list[int], *, kept: int | None = None) -> None:
        real(self, blocks, kept=kept)
        if blocks and self._hash_of[blocks[-1]] is None:
            self._free.append(blocks[-1])

    patch.setattr(BlockPool, "release", broken)


def pages_of_a_reader_given_away(patch: pytest.MonkeyPatch) -> None:
    real = EmbeddingCache.unpin

    def broken(self: EmbeddingCache, keys: Any) -> None:
        real(self, keys)
        for entry in list(self):
            if entry.pages and entry.phase.value == "ready" and len(self.free) < 2:
                self.free.append(entry.pages[0])

    patch.setattr(EmbeddingCache, "unpin", broken)


def put_at_the_tail(patch: pytest.MonkeyPatch) -> None:
    real = GenerateGroup._preempt

    def broken(self: GenerateGroup, state: Any, **mode: bool) -> None:
        real(self, state, **mode)
        state.order = (state.number + 1000, 0)

    patch.setattr(GenerateGroup, "_preempt", broken)


def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    real = GenerateGroup._admit

    def broken(self: GenerateGroup, plan: Any, now_ns: int) -> None:
        queue = self.queue
        for parallel in (queue._entries, queue._views):
            parallel.reverse()
        real(self, plan, now_ns)
        for parallel in (queue._entries, queue._views):
            parallel.reverse()

    def remove(self: OrderedQueue[Any], entry: Any, **_: Any) -> None:
        index = self._entries.index(entry)
        del self._entries[index], self._views[index]

    patch.setattr(OrderedQueue, "remove", remove)
    patch.setattr(GenerateGroup, "_admit", broken)


def reply_lost(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.handle

    def broken(self: Scheduler, event: Any, now_ns: int) -> list[Any]:
        found = real(self, event, now_ns)
        return [one for one in found if not (isinstance(one, Finish) and one.number == 7)]

    patch.setattr(Scheduler, "handle", broken)


def reply_doubled(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.handle

    def broken(self: Scheduler, event: Any, now_ns: int) -> list[Any]:
        found = real(self, event, now_ns)
        return found + [one for one in found if isinstance(one, Finish)]

    patch.setattr(Scheduler, "handle", broken)


def slot_given_twice(patch: pytest.MonkeyPatch) -> None:
    real = RunningSet.assign_slot

    def broken(self: RunningSet, state: Any, blocks: list[int], computed: int) -> None:
        real(self, state, blocks, computed)
        taken = [number for number, one in enumerate(self.slots) if one not in (None, state)]
        if taken:
            state.slot = taken[0]

    patch.setattr(RunningSet, "assign_slot", broken)


def step_sent_twice(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.handle

    def broken(self: Scheduler, event: Any, now_ns: int) -> list[Any]:
        found = real(self, event, now_ns)
        steps = [one for one in found if isinstance(one, Decide) and one.group == "generate"]
        return found + steps

    patch.setattr(Scheduler, "handle", broken)


BREAKS: dict[Break, str] = {
    blocks_freed_twice: "is given twice|is held already",
    pages_of_a_reader_given_away: "given to two images|written while it is read|hold something else",
    put_at_the_tail: "which is older",
    last_in_first_out: "which is older",
    reply_lost: "never ended|joins after its end|KeyError",
    reply_doubled: "KeyError|terminal reply",
    slot_given_twice: "given twice|leaves slot|KeyError|slot",
    step_sent_twice: "steps are out|came back|AssertionError|KeyError",
}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda one: one.__name__)
def test_oracles_notice(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check_invariants", lambda _: None)
    broken(monkeypatch)

    def run_all() -> None:
        for seed in range(20):
            simulate(config(*SCARCE), scarce(seed), cost=COST, seed=seed, oracles=True)

    with pytest.raises(SimulationFailed, match=BREAKS[broken]) as failure:
        run_all()
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
