"""Slicing of a module into the shares of ranks, before it has weights.

A module is built on the meta device in full size, at no cost. Then each linear layer in its family's table is replaced
by a rank's share of it, and `Cut` describes the corresponding part of the checkpoint's tensor; the rest is never read.
A layer that is split by its outputs (column) is followed by one split by its inputs (row), and only after the latter do
the ranks sum. Parts that are not in the table are replicated: norms, embeddings, convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsched_workers.families.sharing import Sharing, Split
from vsched_workers.parallel.experts import SharedExperts

if TYPE_CHECKING:
    from vsched_workers.parallel.rank_group import RankGroup

FUSED_PARTS = 3
"""Queries, keys and values are stacked in a fused layer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor: the spans [start, stop) of one dimension, which has `whole` entries in full."""

    dimension: int
    whole: int
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Entries of the dimension that the rank has."""
        return sum(stop - start for start, stop in self.spans)

    def shape_before(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor of which `shape` is the rank's part."""
        assert shape[self.dimension] == self.size, f"{shape} is not cut to {self}"
        return (*shape[: self.dimension], self.whole, *shape[self.dimension + 1 :])

    def shifted(self, dimension: int) -> Cut:
        """Return the same part of another dimension."""
        return Cut(dimension, self.whole, self.spans)

    def read(self, source: Any) -> torch.Tensor:
        """Read only this part of a tensor in a file or in memory."""
        before = (slice(None),) * self.dimension
        parts = [source[(*before, slice(start, stop))] for start, stop in self.spans]
        part = torch.cat(parts, self.dimension) if len(parts) > 1 else parts[0]
        assert part.shape[self.dimension] == self.size, f"{tuple(part.shape)} is not cut to {self}"
        return part


def cut_of(size: int, *, ranks: int, rank: int, dimension: int = 0, parts: int = 1) -> Cut:
    """Return a rank's part of a dimension that consists of `parts` equal parts, each of which is split."""
    share, rest = divmod(size, parts * ranks)
    assert not rest, f"{size} entries in {parts} parts do not divide by {ranks} ranks"
    starts = [part * share * ranks + rank * share for part in range(parts)]
    return Cut(dimension, size, tuple((start, start + share) for start in starts))


def slice_module(module: nn.Module, sharing: Sharing, *, ranks: int, rank: int) -> dict[str, Cut]:
    """Reduce a module on the meta device to a rank's share; return the cuts by the tensors' names."""
    cuts: dict[str, Cut] = {}
    for name, child in list(module.named_modules()):
        if sharing.experts and fnmatchcase(name, sharing.experts):
            experts = SharedExperts(child, ranks=ranks, rank=rank)
            module.set_submodule(name, experts)
            for tensor in ("gate_up_proj", "down_proj"):
                cuts[f"{name}.{tensor}"] = cut_of(experts.count, ranks=ranks, rank=rank)
    if ranks == 1:
        return {}
    for name, split, parent, attribute, linear in _shared_linears(module, sharing):
        inputs, outputs = linear.in_features, linear.out_features
        by_inputs = split is Split.ROW
        cut = cut_of(
            inputs if by_inputs else outputs,
            ranks=ranks,
            rank=rank,
            dimension=int(by_inputs),
            parts=FUSED_PARTS if split is Split.FUSED else 1,
        )
        cuts[f"{name}.weight"] = cut
        if linear.bias is not None and not by_inputs:
            cuts[f"{name}.bias"] = cut
        inputs, outputs = (cut.size, outputs) if by_inputs else (inputs, cut.size)
        share = nn.Linear(inputs, outputs, linear.bias is not None, device="meta")
        setattr(parent, attribute, share)
    for pattern, attributes in sharing.counts.items():
        for name, child in module.named_modules():
            if fnmatchcase(name, pattern):
                for attribute in attributes:
                    count, rest = divmod(getattr(child, attribute), ranks)
                    assert not rest, f"{name}.{attribute} does not divide by {ranks} ranks"
                    setattr(child, attribute, count)
    return cuts


def sum_rows(module: nn.Module, sharing: Sharing, group: RankGroup) -> None:
    """Make row-split layers and mixtures of experts sum over the ranks; the weights are loaded."""
    for child in module.modules():
        if isinstance(child, SharedExperts):
            child.join(group)
    if group.size == 1:
        return
    for _, split, parent, attribute, linear in _shared_linears(module, sharing):
        if split is Split.ROW:
            setattr(parent, attribute, SummedLinear(linear, group))


class SummedLinear(nn.Module):
    """A row-split linear layer. The bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.bias = None  # type: ignore[assignment]  # as in a layer without a bias
        self.partial = linear
        self._group = group

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., a rank's inputs]; return [..., outputs], the same on every rank."""
        total = self._group.all_reduce(self.partial(rows))
        return total if self.bias is None else total + self.bias


def _shared_linears(
    module: nn.Module, sharing: Sharing
) -> Iterator[tuple[str, Split, nn.Module, str, nn.Linear]]:
    """Yield the layers of the table: name, split, parent, attribute in it, and the layer."""
    unused = {*sharing.linears} - {*sharing.absent}
    for name, child in list(module.named_modules()):
        for pattern, split in sharing.linears.items():
            if fnmatchcase(name, pattern):
                assert isinstance(child, nn.Linear), f"{name} is no linear layer"
                unused.discard(pattern)
                parent, _, attribute = name.rpartition(".")
                yield name, split, module.get_submodule(parent), attribute, child
    assert not unused, f"no layer has the names that the family shares: {sorted(unused)}"
