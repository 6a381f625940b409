"""Recurrent states in slots: ownership, initial states, and continuation by chunks and decode rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from vsched.worker.contract import Batch, Chunk
from vsched_workers.batching.paged_attention import PagedStep, Segment, running
from vsched_workers.batching.recurrent_state import RecurrentStates

HIDDEN, SLOTS, SNAPSHOTS, KERNEL = 4, 6, 2, 3


class Sums(nn.Module):
    """A recurrence that sums its inputs, after a convolution that sums three tokens; both are exact."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.calls: list[tuple[int, ...]] = []

    def forward(
        self, hidden_states: torch.Tensor, cache_params: Any = None, **options: Any
    ) -> torch.Tensor:
        assert options.get("attention_mask") is None
        self.calls.append(tuple(hidden_states.shape[:2]))
        before = cache_params.get_recurrent_state(self.layer_idx)
        tokens = hidden_states.shape[1]
        seen = cache_params.update_conv_state(
            hidden_states.transpose(1, 2), self.layer_idx, conv_kernel_size=KERNEL
        )
        padded = nn.functional.pad(seen, (KERNEL, 0))
        mixed = padded.unfold(-1, KERNEL, 1).sum(-1)[..., -tokens:].transpose(1, 2)
        sums = mixed.cumsum(1)
        if before is not None:
            sums = sums + before[:, None]
        cache_params.update_recurrent_state(sums[:, -1], self.layer_idx)
        return sums


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sums(0), Sums(2)
        self.other = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(rows, attention_mask=torch.ones(1)))
        return out


def numbers(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (1, tokens, HIDDEN), generator=generator).float()


@pytest.fixture
def model() -> Model:
    made = Model()
    states = made.states = RecurrentStates(made)  # type: ignore[assignment]
    with states.noting():
        made(numbers(2, 0))
    states.build(SLOTS, SNAPSHOTS, lambda shape, /, *, dtype: torch.full(shape, 7.0, dtype=dtype))
    return made


class Part(NamedTuple):
    """Rows of the sequence in a slot, from position `first` on; a single row at a position above 0 decodes."""

    slot: int
    rows: torch.Tensor
    first: int
    writes: Sequence[tuple[int, int]] = ()

    @property
    def last(self) -> int:
        return self.first + self.rows.shape[1]

    @property
    def decodes(self) -> bool:
        return self.first > 0 and self.last == self.first + 1 and not self.writes


def step(
    model: Model, *given: tuple[Any, ...], restored: Sequence[tuple[int, int]] = ()
) -> list[torch.Tensor]:
    """Run parts of sequences in one step; return the rows of each."""
    parts = [Part(*one) for one in given]
    decoding, chunks = (
        [one for one in parts if one.decodes],
        [one for one in parts if not one.decodes],
    )
    segments: list[Segment] = []
    made: Any = Segment
    row = len(decoding)
    for one in chunks:
        where = {"start": row, "first": one.first, "last": one.last}
        segments.append(made(None, **where, block_size=4, device="cpu"))
        row = segments[-1].stop
    batch: Any = Batch
    made = PagedStep
    running_now = made(None, None, None, None, len(decoding), None, None, segments)
    states: Any = model.states
    states.begin(
        running_now,
        batch(
            np.array([one.slot for one in decoding], dtype=np.int32),
            *[None] * 5,
            chunks=[Chunk(one.slot, None, 0, 0, False, (), one.writes) for one in chunks],  # type: ignore[arg-type]
            restored=restored,
        ),
        torch.from_numpy,
    )
    ordered = [*decoding, *chunks]
    with running(running_now):
        out = model(torch.cat([one.rows for one in ordered], dim=1))
    lengths = [one.rows.shape[1] for one in ordered]
    slots = [one.slot for one in ordered]
    found = dict(zip(slots, out.split(lengths, dim=1), strict=True))
    return [found[one.slot] for one in parts]


def whole(rows: torch.Tensor) -> torch.Tensor:
    """Return the results of one sequence alone, in one step."""
    fresh = Model()
    states = RecurrentStates(fresh)
    with states.noting():
        out: torch.Tensor = fresh(rows)
    return out


def test_states_are_noted_with_their_sizes(model: Model) -> None:
    states: RecurrentStates = model.states  # type: ignore[assignment]
    assert {name: each.shape for name, each in states.shapes.items()} == {
        (layer, kind, 0): shape
        for layer in (0, 2)
        for kind, shape in (("conv", (HIDDEN, KERNEL)), ("recurrent", (HIDDEN,)))
    }
    assert (states.modules, states.layers) == (2, {0, 2})
    assert states.size_bytes == 2 * (HIDDEN * KERNEL + HIDDEN) * 4


def test_chunks_and_decodes_of_several_sequences_are_those_of_each_alone(model: Model) -> None:
    """Slots in arbitrary order, decode rows and chunks in one step, one of them of a single token."""
    one, two, three = numbers(9, 1), numbers(5, 2), numbers(4, 3)
    got: dict[int, list[torch.Tensor]] = {4: [], 1: [], 5: []}
    plan = [
        [(4, one[:, :4], 0)],
        [(4, one[:, 4:5], 4), (1, two[:, :1], 0)],
        [(1, two[:, 1:4], 1), (4, one[:, 5:6], 5), (5, three[:, :3], 0)],
        [(5, three[:, 3:], 3), (4, one[:, 6:7], 6), (1, two[:, 4:], 4)],
        [(4, one[:, 7:], 7)],
    ]
    for parts in plan:
        for (slot, *_), rows in zip(parts, step(model, *parts), strict=True):
            got[slot].append(rows)
    for slot, rows in ((4, one), (1, two), (5, three)):
        assert torch.equal(torch.cat(got[slot], dim=1), whole(rows))
    assert (3, 1) in model.first.calls, "those that decode run in one call"


def test_slot_is_reset_for_each_sequence(model: Model) -> None:
    """After another request in the slot, or after the same one before its preemption."""
    rows = numbers(6, 4)
    step(model, (3, numbers(5, 5), 0))
    step(model, (3, rows[:, :2], 0))
    again = torch.cat(
        [step(model, (3, rows[:, :4], 0))[0], step(model, (3, rows[:, 4:], 4))[0]], dim=1
    )
    assert torch.equal(again, whole(rows))


def test_step_leaves_the_states_of_other_slots_alone(model: Model) -> None:
    rows = numbers(4, 6)
    step(model, (2, rows[:, :3], 0))
    step(model, (0, numbers(3, 7), 0), (1, numbers(2, 8), 0))
    assert torch.equal(step(model, (2, rows[:, 3:], 3))[0], whole(rows)[:, 3:])


def test_slot_begins_with_a_snapshot(model: Model) -> None:
    """Taken within a chunk, at its end, and from another slot; in a step, they are read before they are overwritten."""
    rows, other = numbers(12, 9), numbers(6, 10)
    step(model, (0, rows[:, :9], 0, [(4, 1), (9, 0)]))
    step(model, (0, numbers(7, 11), 0))
    expected = whole(rows)
    (found,) = step(model, (5, rows[:, 4:7], 4), restored=[(5, 1)])
    assert torch.equal(found, expected[:, 4:7])
    after, fresh = step(model, (3, rows[:, 9:], 9), (2, other, 0, [(2, 0)]), restored=[(3, 0)])
    assert torch.equal(after, expected[:, 9:])
    assert torch.equal(fresh, whole(other))
    (found,) = step(model, (1, other[:, 2:], 2), restored=[(1, 0)])
    assert torch.equal(found, whole(other)[:, 2:])


def test_states_are_dropped_with_the_cache(model: Model) -> None:
    states: RecurrentStates = model.states  # type: ignore[assignment]
    assert len(states._slots) == 4
    states.drop()
    assert not states._slots
