"""Expert parallelism: each rank has whole experts, placed by load.

The router is the same on every rank, so each rank knows the experts of every row; it computes its own experts, and the
ranks sum the results. A step takes as long as the rank with the most rows, so experts are rebalanced from time to time:
by the row counts of each layer since the last time, greedily, the heaviest expert first, to the rank with the fewest
rows that has a free place. Every rank has the same number of experts, so memory is constant. Rebalancing does not
change results, only where they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from vsched_workers.parallel.rank_group import RankGroup

Placement = list[list[int]]
"""The experts of each rank, in the order of its weights."""

BALANCE = "expert-balance"

INTERVAL_S = 600.0
"""Interval of rebalancing while there are steps."""


class SharedExperts(nn.Module):
    """The experts of one layer, of which this rank holds its share.

    Shape: `gate_up_proj` [own experts, 2 * inner, hidden], `down_proj` [own experts, hidden, inner]; the experts are in
    the order of `placement[rank]`.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, experts: Any, *, ranks: int, rank: int) -> None:
        """Replace transformers' module, which is on the meta device."""
        super().__init__()
        self.count: int = experts.num_experts
        share = self.count // ranks
        self.placement: Placement = [
            list(range(owner * share, (owner + 1) * share)) for owner in range(ranks)
        ]
        self.rank = rank
        self.rows: torch.Tensor | None = None
        for name in ("gate_up_proj", "down_proj"):
            shape = (share, *getattr(experts, name).shape[1:])
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta")))
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = experts.act_fn
        self._group: RankGroup | None = None

    def join(self, group: RankGroup) -> None:
        """Set the group to sum over; the weights are loaded."""
        self._group = group
        self.rows = torch.zeros(self.count, dtype=torch.int64, device=self.gate_up_proj.device)

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run rows [rows, hidden] through their chosen experts, [rows, choices], and return the weighted sums."""
        assert self._group is not None, "join comes first"
        assert self.rows is not None, "join comes first"
        self.rows.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        total = torch.zeros_like(hidden)
        places = {expert: place for place, expert in enumerate(self.placement[self.rank])}
        for expert in torch.unique(chosen).tolist():
            place = places.get(expert)
            if place is None:
                continue
            rows, choices = torch.where(chosen == expert)
            gate, up = functional.linear(hidden[rows], self.gate_up_proj[place]).chunk(2, dim=-1)
            made = functional.linear(self.act_fn(gate) * up, self.down_proj[place])
            total.index_add_(0, rows, made * weights[rows, choices, None])
        return self._group.all_reduce(total)

    def move(self, placement: Placement) -> int:
        """Move experts to a new placement; return the number that moved. Collective call."""
        assert self._group is not None, "join comes first"
        owners = {expert: owner for owner, own in enumerate(self.placement) for expert in own}
        arrived: list[tuple[int, list[torch.Tensor]]] = []
        moved = 0
        for target, experts in enumerate(placement):
            for place, expert in enumerate(experts):
                source = owners[expert]
                if source == target:
                    continue
                moved += 1
                held = self.placement[source].index(expert)
                parts = [
                    self._group.move(weight, held, source=source, target=target)
                    for weight in (self.gate_up_proj, self.down_proj)
                ]
                if target == self.rank:
                    arrived.append((place, [part for part in parts if part is not None]))
        # Not earlier: the previous contents of a place may have been in transit to another rank.
        for place, (gate_up, down) in arrived:
            self.gate_up_proj[place] = gate_up
            self.down_proj[place] = down
        self.placement = placement
        return moved


class ExpertBalance:
    """Rebalances the experts of all layers by the rows that they had since the last time."""

    def __init__(self, layers: Sequence[SharedExperts], group: RankGroup) -> None:
        self.layers = layers
        self._group = group

    def reset(self) -> None:
        """Reset the counts."""
        for layer in self.layers:
            assert layer.rows is not None, "join comes first"
            layer.rows.zero_()

    @torch.inference_mode()
    def rebalance(self) -> int:
        """Rebalance the experts; return the number that moved. Collective call at the same step on all ranks.

        Every rank has counted the same, as every row passes every router. The sum over ranks ensures that: different
        placements would lose experts.
        """
        with self._group.together():
            counts = self._group.all_reduce(self._counts().clone()).tolist()
            moved = sum(
                layer.move(next_placement(rows, layer.placement))
                for layer, rows in zip(self.layers, counts, strict=True)
            )
        self.reset()
        return moved

    def _counts(self) -> torch.Tensor:
        return torch.stack([layer.rows for layer in self.layers if layer.rows is not None])


def place_experts(rows: Sequence[int], ranks: int) -> Placement:
    """Give each rank the same number of experts, and balance rows greedily, the heaviest expert first."""
    room = len(rows) // ranks
    placement: Placement = [[] for _ in range(ranks)]
    load = [0] * ranks
    for expert in sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert)):
        free = (rank for rank in range(ranks) if len(placement[rank]) < room)
        rank = min(free, key=lambda rank: (load[rank], rank))
        placement[rank].append(expert)
        load[rank] += rows[expert]
    return placement


def max_rows(rows: Sequence[int], placement: Placement) -> int:
    """Return the rows of the busiest rank."""
    return max(sum(rows[expert] for expert in experts) for experts in placement)


def next_placement(rows: Sequence[int], current: Placement) -> Placement:
    """Return a better placement with few moves; the current one if there is none.

    Experts that stay with a rank keep their place; new ones take the free places.
    """
    groups = place_experts(rows, len(current))
    if max_rows(rows, groups) >= max_rows(rows, current):
        return current
    found: Placement = [[] for _ in current]
    for rank, group in _matched(groups, current):
        coming = iter(sorted(set(group) - set(current[rank])))
        found[rank] = [expert if expert in group else next(coming) for expert in current[rank]]
    return found


def _matched(groups: Placement, current: Placement) -> Iterator[tuple[int, list[int]]]:
    """Assign a group of experts to each rank, preferring the largest overlap with the experts that it has."""
    pairs = [(rank, index) for rank in range(len(current)) for index in range(len(groups))]
    pairs.sort(key=lambda pair: (-len({*current[pair[0]]} & {*groups[pair[1]]}), pair))
    ranks, taken = set(range(len(current))), set(range(len(groups)))
    for rank, index in pairs:
        if rank in ranks and index in taken:
            ranks.remove(rank)
            taken.remove(index)
            yield rank, groups[index]
