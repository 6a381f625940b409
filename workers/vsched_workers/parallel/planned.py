"""Tensor parallelism of any architecture, by transformers' own plan.

The plan (`base_model_tp_plan`) lists modules and parameters with the kind of split. Modules are sliced in place, first
on the meta device to verify that the model runs, and again when weights are in mapped files, of which a rank copies
only its share. Hooks sum or gather the results, in the order of the ranks.

Modules that are not in the plan are replicated: embeddings, heads, norms. Parameters outside the plan in a module with
split ones are refused: each rank would add them, or they belong to all heads (sinks).

Rejected: transformers' own implementation, whose collectives neither report the rank that failed nor sum in a fixed
order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsched_workers.families.sharing import PlanEntry, unshared
from vsched_workers.parallel.slicing import Cut, cut_of

if TYPE_CHECKING:
    from vsched_workers.parallel.rank_group import RankGroup

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
