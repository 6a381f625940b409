"""Slicing of a module into the shares of ranks.

A module of a family with a table is built on the meta device in full size, at no cost. Then each linear layer in the
table is replaced by a rank's share of it, and `Cut` describes the corresponding part of the checkpoint's tensor; the
rest is never read. A layer that is split by its outputs (column) is followed by one split by its inputs (row), and only
after the latter do the ranks sum. Parts that are not in the table are replicated: norms, embeddings, convolutions.

Other architectures follow transformers' own plan (`base_model_tp_plan`), which lists modules and parameters with the
kind of split. Modules are sliced in place, first on the meta device to verify that the model runs, and again when
weights are in mapped files, of which a rank copies only its share. Hooks sum or gather the results, in the order of the
ranks. Parameters outside the plan in a module with split ones are refused: each rank would add them, or they belong to
all heads (sinks).

Rejected: transformers' own implementation, whose collectives neither report the rank that failed nor sum in a fixed
order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsched_workers.families.sharing import PlanEntry, Sharing, Split, unshared
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
    if ranks == 1:
        return cuts
    for name, child in list(module.named_modules()):
        if sharing.experts and fnmatchcase(name, sharing.experts):
            experts = SharedExperts(child, ranks=ranks, rank=rank)
            module.set_submodule(name, experts)
            for tensor in ("gate_up_proj", "down_proj"):
                cuts[f"{name}.{tensor}"] = cut_of(experts.count, ranks=ranks, rank=rank)
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
    if group.size == 1:
        return
    for child in module.modules():
        if isinstance(child, SharedExperts):
            child.join(group)
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


GATE_AND_UP = 2
"""Parts of packed projections."""

_INPUTS = (PlanEntry.ROW, PlanEntry.SPLIT_ROW)


class PlannedRanks:
    """The ranks that share a model. Until they join, each stands in for all, with correct shapes and no communication.

    Attributes:
        cuts: This rank's part of each weight that was split, by its name in the model.
    """

    def __init__(self, *, ranks: int, rank: int) -> None:
        self.size = ranks
        self.rank = rank
        self.cuts: dict[str, Cut] = {}
        self._group: RankGroup | None = None

    def join(self, group: RankGroup) -> None:
        """Communicate with the other ranks from now on."""
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, bit-identical on each."""
        return tensor if self._group is None else self._group.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenation of all ranks' last dimensions."""
        if self._group is None:
            return torch.cat([tensor] * self.size, dim=-1)
        return self._group.all_gather(tensor)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension."""
        return tensor.chunk(self.size, dim=-1)[self.rank]


def share_by_plan(
    model: Any, plan: Mapping[str, PlanEntry], family: str, ranks: PlannedRanks
) -> None:
    """Reduce a model to a rank's share; `plan` lists modules and parameters of its decoder.

    Raises:
        CheckpointError: When a size is not divisible, or a part does not match its entry.
    """
    decoder: nn.Module = model.base_model
    ranks.cuts.clear()
    found = 0
    for name, parameter in list(decoder.named_parameters()):
        entry = plan.get(_pattern(name))
        if entry is not None:
            found += 1
            _cut(decoder, name, parameter, entry, family, ranks)
    for name, module in list(decoder.named_modules()):
        entry = plan.get(_pattern(name))
        if entry in (None, PlanEntry.WHOLE):
            continue
        found += 1
        parent = decoder.get_submodule(name.rpartition(".")[0])
        for owner, at in ((module, name), (parent, name.rpartition(".")[0])):
            _require_named(owner, at, plan, family)
        assert entry is not None
        if entry is PlanEntry.SUMMED:
            module.register_forward_hook(functools.partial(_summed, ranks))
        else:
            _share_linear(module, name, entry, family, ranks)
    if not found:
        raise unshared(family, "transformers' plan names none of its modules")
    within = next(name for name, module in model.named_modules() if module is decoder)
    prefix = f"{within}." if within else ""
    ranks.cuts = {f"{prefix}{name}": cut for name, cut in ranks.cuts.items()}


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _require_named(
    module: nn.Module, name: str, plan: Mapping[str, PlanEntry], family: str
) -> None:
    """Check that the plan lists all parameters next to shared modules: they may concern all heads, or be summed."""
    if isinstance(module, nn.Linear):
        return
    for own, _ in module.named_parameters(recurse=False):
        if _pattern(f"{name}.{own}") not in plan:
            raise unshared(family, f"transformers' plan says nothing of {name}.{own}")


def _share_linear(
    module: nn.Module, name: str, entry: PlanEntry, family: str, ranks: PlannedRanks
) -> None:
    if not isinstance(module, nn.Linear):
        raise unshared(family, f"{name} is not a linear layer, unlike in transformers' plan")
    bias = module.bias
    _cut(module, "weight", module.weight, entry, family, ranks, name=f"{name}.weight")
    if entry in _INPUTS:
        if entry is PlanEntry.SPLIT_ROW:
            module.register_forward_pre_hook(functools.partial(_split, ranks))
        module.bias = None  # type: ignore[assignment]  # as in a layer without a bias
        module.register_parameter("bias_of_all", bias)
        module.register_forward_hook(functools.partial(_summed, ranks))
    elif bias is not None:
        _cut(module, "bias", bias, entry, family, ranks, name=f"{name}.bias")
    if entry is PlanEntry.GATHERED:
        module.register_forward_hook(functools.partial(_gathered, ranks))
    module.out_features, module.in_features = module.weight.shape


def _cut(
    owner: nn.Module,
    attribute: str,
    parameter: torch.Tensor,
    entry: PlanEntry,
    family: str,
    ranks: PlannedRanks,
    *,
    name: str = "",
) -> None:
    """Replace a parameter by a rank's part of its inputs, the last dimension, or its outputs, the one before."""
    if entry is PlanEntry.WHOLE:
        return
    if entry is PlanEntry.SUMMED:
        raise unshared(family, f"{name or attribute} is not a module, unlike in transformers' plan")
    parts = GATE_AND_UP if entry is PlanEntry.PACKED else 1
    dimension = parameter.dim() - 1 if entry in _INPUTS else max(parameter.dim() - 2, 0)
    size = parameter.shape[dimension]
    if size % (parts * ranks.size):
        raise unshared(
            family,
            f"{name or attribute} has {size} entries in {parts} parts, which {ranks.size} ranks cannot share equally",
        )
    cut: Cut = cut_of(size, ranks=ranks.size, rank=ranks.rank, dimension=dimension, parts=parts)
    parent, _, own = attribute.rpartition(".")
    ranks.cuts[name or attribute] = cut
    part = nn.Parameter(cut.read(parameter.data), requires_grad=False)
    setattr(owner.get_submodule(parent), own, part)


def _split(ranks: PlannedRanks, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return ranks.part(given[0]), *given[1:]


def _summed(
    ranks: PlannedRanks, module: Any, _: tuple[Any, ...], made: torch.Tensor
) -> torch.Tensor:
    total = ranks.all_reduce(made)
    bias = getattr(module, "bias_of_all", None)
    return total if bias is None else total + bias


def _gathered(
    ranks: PlannedRanks, _: nn.Module, __: tuple[Any, ...], made: torch.Tensor
) -> torch.Tensor:
    return ranks.all_gather(made)
